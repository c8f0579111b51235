"""`-m key=a,b`: Hydra's sweeper chooses the jobs, each runs as a process of its own in a folder of its own."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from lmtrain import cli, errors


def run(verb: str, overrides: list[str], config_dir: str | None) -> int:
    """Runs every job of the sweep; 0 when all ended well, 1 when any failed (its own output says why)."""
    import hydra
    from hydra.core.hydra_config import HydraConfig

    failed: list[str] = []

    def job(_cfg: Any) -> float:
        info = HydraConfig.get()
        folder = Path(info.sweep.dir).absolute() / str(info.job.num)
        command = [sys.executable, "-m", f"lmtrain.{verb}", *info.overrides.task, f"run.dir={folder}"]
        command += [] if config_dir is None else ["--config-dir", config_dir]
        print(f"sweep job {info.job.num}: {' '.join(info.overrides.task)}", flush=True)
        code = subprocess.run(command, check=False).returncode
        if code != 0:
            failed.append(f"job {info.job.num} ({' '.join(info.overrides.task)}) ended with {code}")
        if code == errors.PREEMPTED:
            sys.exit(code)  # the machine is going away: don't start the next job
        return score(folder)

    argv, sys.argv = sys.argv, [f"lmtrain.{verb}", "-m", *overrides]
    if config_dir is not None:
        sys.argv += ["--config-dir", config_dir]
    try:
        hydra.main(config_path=str(cli.conf_dir()), config_name="config", version_base="1.3")(job)()
    finally:
        sys.argv = argv
    for line in failed:
        cli.print_error(line)
    return errors.FAILED if failed else errors.FINISHED


def score(folder: Path) -> float:
    """What a search minimises: the best monitored value of the job, infinity where there is none."""
    try:
        best = json.loads((folder / "summary.json").read_text())["best_metric"]
    except (OSError, json.JSONDecodeError, KeyError):
        return float("inf")
    return float(next(iter(best.values()))) if best else float("inf")
