"""Callbacks as users would write them."""

import shutil
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch

from lmtrain.callbacks.metrics import Metrics


class LogsAll(pl.Callback):
    """Logs in every possible way; each value is a function of the step and the rank."""

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        for logger in trainer.loggers:
            logger.log_metrics({"at_start": 1.0}, step=trainer.global_step)

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any) -> None:
        pl_module.log("before_step", float(trainer.global_step))

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any) -> None:
        step = trainer.global_step
        pl_module.log_dict({"mine/step": float(step), "mine/rank": torch.tensor(float(trainer.global_rank))})
        pl_module.log("mine/mean_rank", float(trainer.global_rank), sync_dist=True)
        pl_module.log("mine/epoch_mean", float(step), on_step=False, on_epoch=True)
        if step == 3:
            pl_module.log("mine/once", 3.0)
        for logger in trainer.loggers:
            logger.log_metrics({"mine/direct": 10.0 * step}, step=step)

    def on_validation_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        pl_module.log("val/mine", 100.0 - trainer.global_step, sync_dist=True)


class LogsOnce(pl.Callback):
    """Logs `what` in the hook named `at`."""

    def __init__(self, at: str, what: Any, directly: bool = False) -> None:
        def hook(trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any) -> None:
            value = torch.tensor(what) if isinstance(what, list) else what
            if directly:
                trainer.logger.log_metrics({"mine": value}, step=0)  # type: ignore[union-attr]
            else:
                pl_module.log("mine", value)

        setattr(self, at, hook)


class LongAgo(pl.Callback):
    """Makes a run believe that it has seen `tokens` tokens before."""

    def __init__(self, tokens: int) -> None:
        self.tokens = tokens

    def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        metrics = next(c for c in trainer.callbacks if isinstance(c, Metrics))  # type: ignore[attr-defined]
        if trainer.global_step == 0:
            metrics.tokens_seen += self.tokens


class TakesAway(pl.Callback):
    """Replaces a folder by a file after the second step."""

    def __init__(self, folder: str) -> None:
        self.folder = Path(folder)

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.global_step == 2:
            shutil.rmtree(self.folder)
            self.folder.write_text("in its place")


class Accumulates(pl.Callback):
    """Sets Lightning's gradient accumulation, which would work only if a batch were a micro-batch."""

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        trainer.accumulate_grad_batches = 2
