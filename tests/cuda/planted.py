"""A callback with a mistake that test_fake_device.py must detect: it waits for the device in every step."""

from typing import Any

import lightning.pytorch as pl


class ReadsEachStep(pl.Callback):
    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: Any, *_: Any) -> None:
        float(pl_module.last_step.grad_norm)
