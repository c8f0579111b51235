"""Runs jobs in sequence on ranks that import torch once, and records the peak memory of each; started by memory.py.

    python -m torch.distributed.run --nproc-per-node=2 benchmarks/memory_ranks.py JOBS.json

Every rank writes <rank>.json beside the jobs, with the bytes of each job. The kernel records the peak (VmHWM, proc(5)),
which is reset after the second step, so it does not depend on sampling. File-backed pages (RssFile: libraries, which
the kernel drops when memory is short) are subtracted, as many as there are at the end.
"""

import ctypes
import gc
import json
import os
import sys
from pathlib import Path

import lightning.pytorch as pl

from lmtrain.config.compose import check, compose
from lmtrain.distributed import devices
from lmtrain.distributed.ranks import leave
from lmtrain.run.session import Session
from lmtrain.run_folder import folder as run_dir


class Peak(pl.Callback):
    """Writes the peak bytes of this process between its second and its fourth step to `path`."""

    def __init__(self, path: str) -> None:
        self.path = Path(path)

    def on_train_batch_end(self, trainer: pl.Trainer, *_: object) -> None:
        if trainer.global_step == 2:
            Path("/proc/self/clear_refs").write_text("5")  # resets the peak to the current value
        elif trainer.global_step == 4:
            self.path.write_text(str(_status("VmHWM") - _status("RssFile")))


def _status(name: str) -> int:
    """Returns the bytes in a field of this process's status in /proc."""
    return 1024 * int(Path("/proc/self/status").read_text().split(f"{name}:")[1].split()[0])


def held(overrides: list[str], path: Path) -> int:
    """Returns the peak bytes of this rank in a run."""
    path.unlink(missing_ok=True)
    config = check(compose([*overrides, f"callbacks.extra=[{{_target_: memory_ranks.Peak, path: {path}}}]",
                            "run.allow_target=[memory_ranks]"]))  # fmt: skip
    devices.resolve_auto(config)
    folder = run_dir.RunDir(Path(str(config.run.dir)))
    if os.environ.get("RANK", "0") == "0":  # as the parent process of a run does
        folder = run_dir.open_run(config)
    code = Session(config, folder).run()
    if code != 0:
        raise SystemExit(f"exit code {code}: {' '.join(overrides)}")
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    return int(path.read_text())


def main(jobs: list[list[str]], folder: Path) -> None:
    rank = os.environ.get("RANK", "0")
    found = [held(overrides, folder / f"peak_{rank}") for overrides in jobs]
    (folder / f"{rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[1]).parent)
    leave(0)
