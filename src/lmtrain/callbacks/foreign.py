"""Lightning callbacks that are refused because they can't work here, with reasons; and an adapted ThroughputMonitor.

docs/lightning.md describes the others.
"""

from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import lightning.pytorch.callbacks as theirs
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.trainer.states import RunningStage

from lmtrain.config import safe_yaml

_WHY = safe_yaml.table(__file__, "refused.yaml")
REFUSED: dict[type[Callback], str] = {getattr(theirs, name): why for name, why in _WHY.items()}


Count = Callable[[Any], int]


def _micro_batches(batch: Any) -> list[Any]:
    """Returns the micro-batches of a training batch; a validation batch is a single one."""
    return batch.get("micro_batches", [batch])


def rows_of(batch: Any) -> int:
    return sum(len(micro_batch["input_ids"]) for micro_batch in _micro_batches(batch))


def tokens_of(batch: Any) -> int:
    """Counts the tokens of a batch, padding included."""
    return sum(micro_batch["input_ids"].numel() for micro_batch in _micro_batches(batch))


class ThroughputMonitor(theirs.ThroughputMonitor):
    """Lightning's ThroughputMonitor for batches of micro-batches; replaces the original in callbacks.extra."""

    def __init__(self, batch_size_fn: Count = rows_of, length_fn: Count = tokens_of, **kwargs: Any) -> None:
        super().__init__(batch_size_fn, length_fn, **kwargs)

    def on_validation_end(self, trainer: pl.Trainer, *_: Any) -> None:
        if RunningStage.TRAINING in self._t0s:  # false before the first step: nothing measured yet
            super().on_validation_end(trainer, *_)


_THROUGHPUT = f"{__name__}.ThroughputMonitor"
INSTEAD = {  # adapted to lmtrain's batches
    "lightning.pytorch.callbacks.ThroughputMonitor": _THROUGHPUT,
    "lightning.pytorch.callbacks.throughput_monitor.ThroughputMonitor": _THROUGHPUT,
}


def fitted(entry: dict[str, Any]) -> dict[str, Any]:
    """Returns an entry of callbacks.extra; a Lightning callback is replaced by its adapted version, if any."""
    return {**entry, "_target_": INSTEAD.get(entry["_target_"], entry["_target_"])}
