"""`-m key=a,b`: Hydra's sweeper chooses the jobs, each runs as a process of its own in a folder of its own."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import OverrideParseException

from lmtrain import cli, config, errors
from lmtrain import overrides as explain
from lmtrain.errors import UserError


def run(verb: str, overrides: list[str], config_dir: str | None, config_name: str = "config") -> int:
    """Runs every job of the sweep; 0 when all ended well, 1 when any failed (its own output says why).

    Raises:
        UserError: an override is wrong; no job has been started then.
    """
    import hydra
    from hydra.core.hydra_config import HydraConfig

    check(overrides, config_dir, config_name)
    failed: list[str] = []

    def job(_cfg: Any) -> float:
        info = HydraConfig.get()
        folder = Path(info.sweep.dir).absolute() / str(info.job.num)
        command = [sys.executable, "-m", f"lmtrain.{verb}", *info.overrides.task, f"run.dir={folder}"]
        command += [] if config_dir is None else ["--config-dir", config_dir]
        command += ["--config-name", config_name]
        chosen = " ".join(o for o in info.overrides.task if o not in overrides)
        print(f"sweep job {info.job.num}: {chosen}", flush=True)
        code = subprocess.run(command, check=False).returncode
        if code != 0:
            failed.append(f"job {info.job.num} ({chosen}) ended with {code}")
        if code == errors.PREEMPTED:
            sys.exit(code)  # the machine is going away: don't start the next job
        return score(folder)

    argv, sys.argv = sys.argv, [f"lmtrain.{verb}", "-m", *overrides]
    if config_dir is not None:
        sys.argv += ["--config-dir", config_dir]
    try:
        hydra.main(config_path=str(cli.conf_dir()), config_name=config_name, version_base="1.3")(job)()
    finally:
        sys.argv = argv
    for line in failed:
        cli.print_error(line)
    return errors.FAILED if failed else errors.FINISHED


def check(overrides: list[str], config_dir: str | None, config_name: str) -> None:
    """Raises UserError for what no job could be started with; each value of each sweep is looked at once."""
    try:
        parsed = OverridesParser.create().parse_overrides(overrides)
    except OverrideParseException as error:
        raise UserError(explain.unreadable(error.override)) from None
    mine = [o for o in parsed if not o.key_or_group.startswith("hydra")]
    fixed = [o.input_line or "" for o in mine if not o.is_sweep_override()]
    # An interval is searched by a sweeper of its own, which draws the values.
    swept = [o for o in mine if o.is_sweep_override() and not o.is_interval_sweep()]
    choices = [[f"{o.get_key_element()}={value}" for value in o.sweep_string_iterator()] for o in swept]
    first = [values[0] for values in choices]
    jobs = [first, *([*first[:i], v, *first[i + 1 :]] for i, values in enumerate(choices) for v in values[1:])]
    for job in jobs:
        config.check(config.compose([*fixed, *job], config_dir, config_name))


def score(folder: Path) -> float:
    """What a search minimises: the best monitored value of the job, infinity where there is none."""
    try:
        best = json.loads((folder / "summary.json").read_text())["best_metric"]
    except (OSError, json.JSONDecodeError, KeyError):
        return float("inf")
    return float(next(iter(best.values()))) if best else float("inf")
