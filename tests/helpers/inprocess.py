"""Runs verbs in this process, as `python -m lmtrain.VERB` would: fast, since everything is imported only once."""

import contextlib
import importlib
import io
import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path

import lightning.pytorch as pl
import pytest

from lmtrain.callbacks.metrics import without_times
from lmtrain.callbacks.stopping import Preemption
from support import TINY, rows

TWO_STEPS = ["trainer.max_steps=2", "trainer.val_check_interval=1", "trainer.limit_val_batches=1"]


@dataclass
class Ended:
    code: int
    out: str
    err: str
    seconds: float


def run(verb: str, *argv: str) -> Ended:
    """Returns the exit code and the output of a verb; exceptions that would print a traceback propagate."""
    out, err = io.StringIO(), io.StringIO()
    started = time.perf_counter()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = importlib.import_module(f"lmtrain.{verb}").main(list(argv))
    return Ended(code, out.getvalue(), err.getvalue(), time.perf_counter() - started)


def train_tiny(corpus: Path, *argv: str) -> Ended:
    """Trains a tiny model for two steps on the corpus, with the settings `argv` on top."""
    return run("train", *TINY, *TWO_STEPS, "data=text", f"data.path={corpus}", *argv)


def compare_runs(one: Path, other: Path) -> None:
    """Asserts that two runs had the same samples and rewards, and all other numbers up to rounding."""
    pairs = zip(
        *([without_times(row) for row in rows(folder / "metrics.jsonl")] for folder in (one, other)), strict=True
    )
    for ours, theirs in pairs:
        assert ours.keys() == theirs.keys()
        for key in (k for k in ours if k.startswith(("train/", "val/", "grad"))):
            assert ours[key] == pytest.approx(theirs[key], rel=1e-4, abs=2e-6), (ours["step"], key)


class StopsAt(pl.Callback):
    """A callback that asks the run to stop after a step, by SIGTERM."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_train_batch_end(self, trainer: pl.Trainer, *_: object) -> None:
        if trainer.global_step == self.step:
            os.kill(os.getpid(), signal.SIGTERM)
            preemption = next(c for c in trainer.callbacks if isinstance(c, Preemption))  # type: ignore[attr-defined]
            while preemption.stop.signals.first is None:  # a thread records the signal, with some delay
                time.sleep(0.001)


def stops_at(step: int) -> list[str]:
    """Returns settings with which a run is asked to stop after a step."""
    return [f"callbacks.extra=[{{_target_: {__name__}.StopsAt, step: {step}}}]", f"run.allow_target=[{__name__}]"]


def snapshot(folder: Path) -> dict[str, tuple[int, bytes]]:
    """Returns everything below a folder: files with modification time and content, folders by name."""
    return {
        str(p.relative_to(folder)): (p.lstat().st_mtime_ns, p.read_bytes()) if p.is_file() else (0, b"")
        for p in sorted(folder.rglob("*"))
    }


def message(err: str) -> str:
    """Returns the single error message on standard error; only what is being done may precede it."""
    *before, last = err.splitlines()
    assert last.startswith("error: "), err
    assert all(
        line.startswith(("lmtrain ", "read text: ", "tokenize ", "tokenized ", "training a BPE ", "train: ", "val: "))
        for line in before
    ), err
    return last.removeprefix("error: ")


class Breaks(pl.Callback):
    """A user's callback that raises at a step."""

    def __init__(self, at: int) -> None:
        self.at = at

    def on_train_batch_end(self, trainer: pl.Trainer, *_: object) -> None:
        if trainer.global_step == self.at:
            raise ZeroDivisionError("a mistake")
