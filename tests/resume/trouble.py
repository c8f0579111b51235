"""Callbacks that cause failures known from real machines."""

import multiprocessing
import os
import signal
from typing import Any

import lightning.pytorch as pl
import torch


class KillWorkers(pl.Callback):
    """Kills the loader's workers, as the system does when memory runs out."""

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.global_step == 3:
            for child in multiprocessing.active_children():
                os.kill(child.pid or 0, signal.SIGKILL)


class Greedy(pl.Callback):
    """Allocates a tensor that fits into no machine's memory."""

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.global_step == 3:
            torch.empty(2**50, dtype=torch.uint8)


class LoseTheData(pl.Callback):
    """Truncates the file of tokens while it is being read."""

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.global_step == 3:
            path = trainer.train_dataloader.dataset.rows.shards[0].path  # type: ignore[union-attr]
            os.truncate(path, 100)
