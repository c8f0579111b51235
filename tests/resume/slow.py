"""Callbacks that make a moment long enough to be interrupted, or interrupt at one."""

import hashlib
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import lightning.pytorch as pl

from lmtrain.callbacks.stopping import Preemption
from lmtrain.checkpoints import store


def listener(trainer: pl.Trainer) -> Preemption:
    return next(c for c in trainer.callbacks if isinstance(c, Preemption))  # type: ignore[attr-defined]


def stop(trainer: pl.Trainer) -> None:
    """SIGTERM to this process, noted when this returns: a thread of the run does that, at its own time."""
    os.kill(os.getpid(), signal.SIGTERM)
    while listener(trainer).stop.signals.first is None:
        time.sleep(0.001)


class Lingers(pl.Callback):
    """Each step from `step` on takes a tenth of a second more: whoever waits for it has time to interrupt."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.global_step >= self.step:
            time.sleep(0.1)


class SlowSave(pl.Callback):
    """A save that a signal asked for takes minutes; `marker` is a file to make when it begins."""

    def __init__(self, marker: str) -> None:
        self.marker = Path(marker)

    def on_save_checkpoint(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.should_stop:
            self.marker.touch()
            time.sleep(200)


class SlowValidation(pl.Callback):
    """Each validation batch takes so many seconds, or until a signal; of the validation after `step` only, if given.

    `marker` is a file that gets a character for each batch begun.
    """

    def __init__(self, seconds: float, step: int | None = None, marker: str | None = None) -> None:
        self.seconds, self.step, self.marker = seconds, step, marker

    def on_validation_batch_start(self, trainer: pl.Trainer, *_: Any, **__: Any) -> None:
        if self.step not in (None, trainer.global_step):
            return
        if self.marker is not None:
            with open(self.marker, "a") as file:
                file.write("1")
        for _nap in range(round(10 * self.seconds)):
            if listener(trainer).stop.signals.first is not None:
                return
            time.sleep(0.1)


class SlowDisk(pl.Callback):
    """Each file of a checkpoint takes so many seconds more."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        write = store.write

        def write_slowly(file: Path, content: Any) -> dict[str, Any]:
            time.sleep(self.seconds)
            return write(file, content)

        store.write = write_slowly


class StopAt(pl.Callback):
    """SIGTERM to the run itself, so that it saves after `step` steps and ends."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.global_step == self.step - 1:
            stop(trainer)


class StopOneThenAll(StopAt):
    """The last rank gets its SIGTERM in this step, the others only when what it asked for is saved."""

    def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.global_rank == trainer.world_size - 1:
            super().on_train_batch_start(trainer)

    def on_save_checkpoint(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.should_stop and trainer.global_rank < trainer.world_size - 1:
            stop(trainer)


class StopInC(StopAt):
    """SIGTERM at the start of a step and again `again` seconds later, while the main thread is in C and stays there.

    Args:
        work: 5 are about a second. `marker` is a file to make when it is done.
    """

    def __init__(self, step: int, again: float, work: int, marker: str) -> None:
        super().__init__(step)
        self.again, self.work, self.marker = again, work, Path(marker)

    def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        super().on_train_batch_start(trainer)
        if trainer.global_step == self.step - 1:
            threading.Timer(self.again, os.kill, (os.getpid(), signal.SIGTERM)).start()
            hashlib.pbkdf2_hmac("sha256", b"", b"", self.work * 1_000_000)
            self.marker.touch()


class SlowsDown(pl.Callback):
    """From a step on, each takes so many seconds longer."""

    def __init__(self, step: int, seconds: float) -> None:
        self.step, self.seconds = step, seconds

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any, **__: Any) -> None:
        if trainer.global_step >= self.step:
            time.sleep(self.seconds)


class HangsOnOneRank(pl.Callback):
    """The second rank does nothing any more after a step."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any, **__: Any) -> None:
        if trainer.global_step == self.step and trainer.global_rank == 1:
            time.sleep(3600)
