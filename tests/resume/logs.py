"""Callbacks as users write them: each has a state that it logs every step, by a different logging method."""

from typing import Any

import lightning.pytorch as pl

WAYS = (*("log", "log_dict", "logger", "batch_start", "before_step", "after_backward", "prog_bar", "in_validation"),)


class Logs(pl.Callback):
    """Logs a running mean of step number times a constant, so a lost or repeated step changes all later values."""

    def __init__(self, way: str) -> None:
        self.way, self.mean, self.seen = way, 0.0, 0

    @property
    def state_key(self) -> str:
        return f"Logs.{self.way}"

    def state_dict(self) -> dict[str, Any]:
        return {"mean": self.mean, "seen": self.seen}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.mean, self.seen = state_dict["mean"], state_dict["seen"]

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any) -> None:
        self.seen += 1
        self.mean += (trainer.global_step * len(self.way) - self.mean) / self.seen
        if self.way == "batch_start":
            pl_module.log("batch_start", self.mean)

    def on_before_optimizer_step(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any) -> None:
        if self.way == "before_step":
            pl_module.log("before_step", self.mean)

    def on_after_backward(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self.way == "after_backward":
            pl_module.log("after_backward", self.mean)

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any) -> None:
        if self.way in ("log", "prog_bar", "in_validation"):
            pl_module.log(self.way, self.mean, prog_bar=self.way == "prog_bar")
        elif self.way == "log_dict":
            pl_module.log_dict({"log_dict/mean": self.mean, "log_dict/seen": float(self.seen)}, sync_dist=True)
        elif self.way == "logger":
            for logger in trainer.loggers:
                logger.log_metrics({"logger": self.mean}, step=trainer.global_step)

    def on_validation_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self.way == "in_validation":
            pl_module.log("val/mean", self.mean)
