"""Callbacks that make a moment long enough to be interrupted."""

import time
from typing import Any

import lightning.pytorch as pl


class SlowSave(pl.Callback):
    """A save that a signal asked for takes ten seconds."""

    def on_save_checkpoint(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.should_stop:
            time.sleep(10)


class SlowValidation(pl.Callback):
    """Each validation batch takes ten seconds, in short naps."""

    def on_validation_batch_start(self, *_: Any, **__: Any) -> None:
        for _nap in range(100):
            time.sleep(0.1)
