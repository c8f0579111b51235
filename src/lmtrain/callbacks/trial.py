"""A run that is only tried: it ends after a few steps, or when it diverges, and saves nothing."""

import json
import math
from pathlib import Path
from typing import Any

import lightning.pytorch as pl

from lmtrain.objectives.base import Objective
from lmtrain.optim.range_test import Smoothed


class EndsEarly(pl.Callback):
    """Writes {"step", "lr", "loss"} of each step to `path`, and ends the run before anything is validated or saved.

    Args:
        path: JSON lines, written by the first rank.
        steps: the last step.
        diverged: ends once the smoothed loss is above this many times its least, or no number; None: never.
        smoothing: of the loss, as in `Smoothed`.
    """

    def __init__(self, path: str, steps: int, diverged: float | None = None, smoothing: float = 0.0) -> None:
        self.path, self.steps, self.diverged = Path(path), steps, diverged
        self.smoothed, self.least = Smoothed(smoothing), math.inf

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        assert isinstance(pl_module, Objective)
        numbers = pl_module.step_means()
        loss, step = numbers["train/loss"], trainer.global_step
        if trainer.is_global_zero:
            with self.path.open("a", encoding="utf-8") as file:
                file.write(json.dumps({"step": step, "lr": numbers["lr"], "loss": loss}) + "\n")
        if step >= self.steps or self._has_diverged(loss):
            trainer.should_stop = True
            raise StopIteration  # what Lightning's loop ends at; the callbacks that save come after this one

    def _has_diverged(self, loss: float) -> bool:
        if self.diverged is None:
            return False
        smoothed = self.smoothed.add(loss)
        self.least = min(self.least, smoothed)
        return not math.isfinite(loss) or smoothed > self.diverged * self.least
