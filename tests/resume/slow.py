"""Callbacks that make a moment long enough to be interrupted, or interrupt at one."""

import os
import signal
import time
from pathlib import Path
from typing import Any

import lightning.pytorch as pl

from lmtrain import checkpoint as store


class SlowSave(pl.Callback):
    """A save that a signal asked for takes ten seconds."""

    def on_save_checkpoint(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.should_stop:
            time.sleep(10)


class SlowValidation(pl.Callback):
    """Each validation batch takes so many seconds, in short naps; of the validation after `step` only, if given.

    `marker` is a file to make when it begins.
    """

    def __init__(self, seconds: float = 10.0, step: int | None = None, marker: str | None = None) -> None:
        self.seconds, self.step, self.marker = seconds, step, marker

    def on_validation_batch_start(self, trainer: pl.Trainer, *_: Any, **__: Any) -> None:
        if self.step not in (None, trainer.global_step):
            return
        if self.marker is not None:
            Path(self.marker).touch()
        for _nap in range(round(10 * self.seconds)):
            time.sleep(0.1)


class SlowDisk(pl.Callback):
    """Each file of a checkpoint takes so many seconds more."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        write = store._write

        def write_slowly(file: Path, content: Any) -> dict[str, Any]:
            time.sleep(self.seconds)
            return write(file, content)

        store._write = write_slowly


class StopAt(pl.Callback):
    """SIGTERM to the run itself, so that it saves after `step` steps and ends."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.global_step == self.step - 1:
            os.kill(os.getpid(), signal.SIGTERM)
