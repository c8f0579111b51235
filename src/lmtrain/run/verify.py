"""The `lmtrain verify` command: checks that a run with this config resumes exactly on this machine.

It trains a few steps without interruption, then again with a SIGKILL in the middle and a resume, and compares the rows
trained on, every logged number and every weight.
"""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import torch

from lmtrain import errors
from lmtrain.callbacks.metrics import without_times
from lmtrain.checkpoints import store
from lmtrain.config import trust
from lmtrain.config.schema import Config
from lmtrain.distributed import devices
from lmtrain.errors import RunError, UserError
from lmtrain.files import read_jsonl
from lmtrain.run_folder.folder import folder_beside_runs

STEPS, SAVE_EVERY, KILL_AFTER = 6, 2, 3
GROWN_UP = 4  # the step at which row length (data.curriculum) and step size (data.batch_warmup) stop growing
_TIMEOUT_SECONDS = 1800


def verify(config: Config) -> int:
    """Runs the check in a temporary folder; returns 0 if the resumed run equals the uninterrupted one, else 1."""
    left_out = ("run.", "trainer.max_steps", "trainer.max_epochs", "trainer.fast_dev_run", "logger=", "logger.")
    overrides = [w for w in config.command.words if trust.of_typed([w]) or not w.lstrip("+").startswith(left_out)]
    with folder_beside_runs(config, "verify") as folder:
        print(f"1/3  {STEPS} steps without interruption", flush=True)
        whole = folder / "whole"
        overrides += growing(config)
        _finish(_start(overrides, whole), whole)
        steps = _steps_taken(whole)
        print(f"2/3  the same, killed (SIGKILL) after step {KILL_AFTER}", flush=True)
        killed = folder / "killed"
        _kill_after(_start(overrides, killed), killed, KILL_AFTER)
        print("3/3  resumed", flush=True)
        _finish(_start(overrides, killed), killed)
        problems = differences(whole, killed)
    for problem in problems:
        errors.print_error(problem)
    if problems:
        print(promise(config), end="")
        return errors.FAILED
    print(f"exact: rows, losses, gradient norms and weights of the killed and resumed run are equal bit for bit "
          f"over {steps} steps")  # fmt: skip
    return errors.FINISHED


def growing(config: Config) -> list[str]:
    """Returns overrides with which row length and step size reach their final values within these few steps."""
    data = config.data
    asked = {"curriculum": data.curriculum.by, "batch_warmup": data.batch_warmup.start_size}
    return [f"data.{section}.steps={GROWN_UP}" for section, value in asked.items() if value is not None]


def promise(config: Config) -> str:
    """Describes what a resume guarantees if numbers may differ (on a GPU without deterministic algorithms), else ''."""
    devices.resolve_auto(config)
    if config.trainer.accelerator != "cuda" or config.trainer.deterministic is True:
        return ""
    equal = "only the rows trained on, learning rates and random draws are promised to be equal"
    exact = "flash attention's backward adds in any order; trainer.deterministic=true makes resuming exact"
    return f"on a GPU {equal}: {exact}\n"


def _start(overrides: list[str], run_dir: Path) -> subprocess.Popen[bytes]:
    fixed = [
        f"run.dir={run_dir}",
        "run.resume=auto",
        f"trainer.max_steps={STEPS}",
        "trainer.max_epochs=null",
        f"trainer.save_every_n_steps={SAVE_EVERY}",
        "trainer.log_every_n_steps=1",
        f"trainer.val_check_interval={SAVE_EVERY}",
        "export.enabled=false",
        "logger=none",
    ]
    with _log(run_dir).open("ab") as log:  # a pipe that nobody reads would stop a run that prints much
        return subprocess.Popen(
            [sys.executable, "-m", "lmtrain.train", *overrides, *fixed],
            stdout=log,
            stderr=subprocess.STDOUT,
            env={**os.environ, "COLUMNS": "120"},
        )


def _log(run_dir: Path) -> Path:
    return run_dir.with_suffix(".log")


def _finish(process: subprocess.Popen[bytes], run_dir: Path) -> None:
    if process.wait(_TIMEOUT_SECONDS) != errors.FINISHED:
        output = _log(run_dir).read_text(encoding="utf-8", errors="replace")
        raise RunError(f"the run itself failed with exit code {process.returncode}:\n{output[-3000:]}")


def _steps_taken(run_dir: Path) -> int:
    """Returns the number of steps of the uninterrupted run; UserError if it ended before it could be killed."""
    last = max((row["step"] for row in read_jsonl(run_dir / "metrics.jsonl")), default=0)
    if last <= KILL_AFTER:
        found = f"the run ended after {last} of {STEPS} steps, so it can't be killed after step {KILL_AFTER}"
        raise UserError(f"{found}: set callbacks.early_stopping.enabled=false, or leave out what else ends it")
    return last


def _kill_after(process: subprocess.Popen[bytes], run_dir: Path, step: int) -> None:
    """Kills the run with SIGKILL as soon as `step` is logged; raises RunError if it ends before that."""
    while process.poll() is None:
        if any(row["step"] >= step for row in read_jsonl(run_dir / "metrics.jsonl")):
            process.send_signal(signal.SIGKILL)
            if process.wait() == -signal.SIGKILL:
                return
        time.sleep(0.01)
    _finish(process, run_dir)
    raise RunError("the run ended before it could be killed, so nothing is proved: the machine is busy, try again")


def differences(a: Path, b: Path) -> list[str]:
    """Describes how two finished runs differ, in logged rows (times excluded) and in the last checkpoint's weights."""
    problems = []
    rows_a, rows_b = ([without_times(r) for r in read_jsonl(run / "metrics.jsonl")] for run in (a, b))
    if len(rows_a) != len(rows_b):
        problems.append(f"metrics.jsonl has {len(rows_a)} rows uninterrupted, {len(rows_b)} resumed")
    for x, y in zip(rows_a, rows_b, strict=False):
        if x != y:
            changed = [f"{k}: {x.get(k)} against {y.get(k)}" for k in sorted({*x, *y}) if x.get(k) != y.get(k)]
            problems.append(f"step {x['step']} differs in {'; '.join(changed)}")
            break
    weights_a, weights_b = (store.load_weights(store.scan(run / "checkpoints")[-1]) for run in (a, b))
    unequal = [name for name in weights_a if not torch.equal(weights_a[name], weights_b[name])]
    if unequal:
        problems.append(f"{len(unequal)} of {len(weights_a)} weights differ, {unequal[0]} first")
    return problems
