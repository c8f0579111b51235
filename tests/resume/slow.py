"""Callbacks that make a moment long enough to be interrupted, or that interrupt at one."""

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
    """Sends SIGTERM to this process and returns once a thread of the run has noted it."""
    os.kill(os.getpid(), signal.SIGTERM)
    while listener(trainer).stop.signals.first is None:
        time.sleep(0.001)


class Lingers(pl.Callback):
    """Makes each step from `step` on take another 0.1 s, so that a test has time to interrupt."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.global_step >= self.step:
            time.sleep(0.1)


class SlowSave(pl.Callback):
    """Makes a save requested by a signal take minutes; `marker` is a file to create when it begins."""

    def __init__(self, marker: str) -> None:
        self.marker = Path(marker)

    def on_save_checkpoint(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.should_stop:
            self.marker.touch()
            time.sleep(200)


class SlowValidation(pl.Callback):
    """Makes each validation batch wait `seconds` seconds or until a signal.

    With `step`, only the validation after it is slow. `marker` is a file that gets a character for each batch begun.
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
    """Makes each file of a checkpoint take `seconds` seconds more."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        write = store.write

        def write_slowly(file: Path, content: Any) -> dict[str, Any]:
            time.sleep(self.seconds)
            return write(file, content)

        store.write = write_slowly


class StopAt(pl.Callback):
    """Sends SIGTERM to the run itself, so that it saves after `step` steps and ends."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.global_step == self.step - 1:
            stop(trainer)


class StopOneThenAll(StopAt):
    """Sends SIGTERM to the last rank in this step, and to the others only during the save that this causes."""

    def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.global_rank == trainer.world_size - 1:
            super().on_train_batch_start(trainer)

    def on_save_checkpoint(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.should_stop and trainer.global_rank < trainer.world_size - 1:
            stop(trainer)


class StopInC(StopAt):
    """Sends SIGTERM at the start of a step and again after `again` seconds, while the main thread stays in C code.

    Args:
        work: 5 are about a second. `marker` is a file to create when the work is done.
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


class BusyInC(pl.Callback):
    """Creates the file `marker` at the start of a step and keeps the main thread in C code for half a minute."""

    def __init__(self, step: int, marker: str) -> None:
        self.step, self.marker = step, Path(marker)

    def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.global_step == self.step - 1:
            self.marker.touch()
            hashlib.pbkdf2_hmac("sha256", b"", b"", 150 * 1_000_000)


class SlowsDown(pl.Callback):
    """Makes each step from `step` on take `seconds` seconds longer."""

    def __init__(self, step: int, seconds: float) -> None:
        self.step, self.seconds = step, seconds

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any, **__: Any) -> None:
        if trainer.global_step >= self.step:
            time.sleep(self.seconds)


class HangsOnOneRank(pl.Callback):
    """Makes the second rank hang after step `step`."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any, **__: Any) -> None:
        if trainer.global_step == self.step and trainer.global_rank == 1:
            time.sleep(3600)
