"""Callbacks that bring about what goes wrong on real machines."""

import multiprocessing
import os
import signal
from typing import Any

import lightning.pytorch as pl
import torch


class KillWorkers(pl.Callback):
    """The system kills the loader's workers, as it does when memory runs out."""

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.global_step == 3:
            for child in multiprocessing.active_children():
                os.kill(child.pid or 0, signal.SIGKILL)


class Greedy(pl.Callback):
    """Asks for a tensor that no machine has room for."""

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.global_step == 3:
            torch.empty(2**50, dtype=torch.uint8)


class LoseTheData(pl.Callback):
    """The file of tokens is cut off while it is read."""

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.global_step == 3:
            path = trainer.train_dataloader.dataset.rows.shards[0].path  # type: ignore[union-attr]
            os.truncate(path, 100)
