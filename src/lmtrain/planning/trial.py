"""Trials: a few steps of a run in a separate process, to measure them without leaving a trace in the run itself.

The process gets a config that differs from the run's only in what is shown, saved and validated, and in the schedule.
"""

import contextlib
import copy
import os
import subprocess
import sys
from pathlib import Path
from typing import IO, Any

import numpy as np

from lmtrain import errors
from lmtrain.config import compose as rules
from lmtrain.config import trust
from lmtrain.config.batch import split_over
from lmtrain.config.schema import Config
from lmtrain.data.loaders import ChosenRows
from lmtrain.distributed import ranks
from lmtrain.errors import RunError, UserError
from lmtrain.files import read_jsonl, write_atomic
from lmtrain.run.start import start
from lmtrain.run_folder.folder import open_run

_NEVER = 2**31 - 1


class OutOfMemory(Exception):
    """Raised when a trial needs more memory than is available."""


def config_of(config: Config, folder: Path, steps: int, **ends: Any) -> Config:
    """Returns the config of a trial of `steps` steps in `folder`, which writes folder/curve.jsonl and saves nothing.

    Args:
        ends: further arguments of callbacks/stopping.py's EndsEarly.
    """
    trial = copy.deepcopy(config)
    run, t = trial.run, trial.trainer
    run.name, run.dir, run.resume, run.time_limit = None, str(folder / "run"), "none", None
    if run.cooldown_from is not None:  # the checkpoint's step is beyond those of a trial
        run.cooldown_from = trial.schedule.decay_from = None  # type: ignore[attr-defined]  # of schedule=wsd
    t.max_steps, t.max_epochs = steps + 1, None  # one more, because the last step is validated and saved
    t.val_check_interval = t.save_every_n_steps = t.profiler = None
    t.val_before_training, t.fast_dev_run, t.max_restarts = False, False, 0
    t.max_bad_steps = _NEVER  # a range test goes on until the loss diverges
    # Rows and batches of full size, which most of the run has and which need the most memory.
    trial.data.curriculum.by = trial.data.batch_warmup.start_size = None
    trial.callbacks.early_stopping.enabled = False
    trial.callbacks.samples.every_n_validations, trial.callbacks.samples.metrics = 0, []
    trial.callbacks.progress.style = "none"
    trial.export.enabled = trial.report.enabled = False
    trial.checkpoint.async_save, trial.logger, trial.debug = False, {}, {}
    ends |= {"_target_": "lmtrain.callbacks.stopping.EndsEarly", "path": str(folder / "curve.jsonl"), "steps": steps}
    trial.callbacks.extra = [*trial.callbacks.extra, ends]
    return trial


def run(trial: Config, folder: Path, longest_rows: bool = False) -> list[dict[str, Any]]:
    """Runs a trial and returns {"step", "lr", "loss", "time"} of each step that it took.

    Args:
        longest_rows: trains on the longest rows instead of the run's first ones, on one device.

    Raises:
        OutOfMemory: the trial ran out of memory.
        RunError, UserError: any other failure, with the trial's own message.
    """
    folder.mkdir(parents=True)
    write_atomic(folder / "config.yaml", rules.dump(trial))
    words = [str(folder / "config.yaml"), trust.as_word(trust.granted(trial)), *(["longest"] if longest_rows else [])]
    with (folder / "log.txt").open("w") as log:
        code = _in_process(words, log)
    text = (folder / "log.txt").read_text(encoding="utf-8", errors="replace")
    if code == errors.FINISHED:
        return list(read_jsonl(folder / "curve.jsonl"))
    if "out of memory" in text.lower() or code == -9:  # -9: killed by the kernel for lack of memory
        raise OutOfMemory
    said = [line.removeprefix("error: ") for line in text.splitlines() if line.startswith("error: ")]
    why = said[-1] if said else f"exit code {code}:\n{text[-3000:]}"
    raise (UserError if code == errors.WRONG_INPUT else RunError)(f"a trial of {trial.trainer.max_steps} steps: {why}")


def _in_process(words: list[str], log: IO[str]) -> int:
    line = [sys.executable, "-m", "lmtrain.planning.trial", *words]
    env = ranks.without_ranks(os.environ)
    return subprocess.run(line, stdout=log, stderr=subprocess.STDOUT, check=False, env=env).returncode


def _with_longest_rows(config: Config) -> int:
    """Trains as `start` does on one device; if rows are padded, on the longest ones, which need the most memory."""
    from lmtrain.distributed import devices
    from lmtrain.run.session import Session

    folder = open_run(config)
    devices.resolve_auto(config)
    split_over(config, 1)
    session = Session(config, folder)
    with contextlib.ExitStack() as stack:
        built = session.build(stack)
        rows = built.datamodule.train_rows
        if hasattr(rows, "lengths"):
            longest = np.argsort(-rows.lengths, kind="stable")[: config.data.global_batch_size]
            built.datamodule.train_rows = ChosenRows(rows, longest)
        return session.train(built)


def main(argv: list[str]) -> int:
    try:
        config = rules.load(Path(argv[0]), trust.of_words(argv[1:2]), own=True)
        return _with_longest_rows(config) if argv[2:] == ["longest"] else start(config)
    except (UserError, RunError) as error:
        errors.print_error(str(error))
        return error.exit_code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
