"""Lightning's ThroughputMonitor, told how many rows and tokens a batch has here."""

from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import ThroughputMonitor as LightningThroughputMonitor
from lightning.pytorch.trainer.states import RunningStage

THEIRS = (
    "lightning.pytorch.callbacks.ThroughputMonitor",
    "lightning.pytorch.callbacks.throughput_monitor.ThroughputMonitor",
)
Count = Callable[[Any], int]


def _micro_batches(batch: Any) -> list[Any]:
    """Those of a training step; a validation's batch is one."""
    return batch.get("micro_batches", [batch])


def rows_of(batch: Any) -> int:
    return sum(len(micro_batch["input_ids"]) for micro_batch in _micro_batches(batch))


def tokens_of(batch: Any) -> int:
    """With padding."""
    return sum(micro_batch["input_ids"].numel() for micro_batch in _micro_batches(batch))


class ThroughputMonitor(LightningThroughputMonitor):
    """Takes the place of Lightning's in callbacks.extra."""

    def __init__(self, batch_size_fn: Count = rows_of, length_fn: Count = tokens_of, **kwargs: Any) -> None:
        super().__init__(batch_size_fn, length_fn, **kwargs)

    def on_validation_end(self, trainer: pl.Trainer, *_: Any) -> None:
        if RunningStage.TRAINING in self._t0s:  # else before the first step: nothing was measured yet
            super().on_validation_end(trainer, *_)
