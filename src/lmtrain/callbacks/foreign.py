"""Lightning callbacks that are refused because they can't work here, with reasons; and an adapted ThroughputMonitor.

docs/lightning.md describes the others.
"""

from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import lightning.pytorch.callbacks as theirs
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.trainer.states import RunningStage

_FINDS = "it starts Lightning's training loop a second time inside the run's own loop"
REFUSED: dict[type[Callback], str] = {
    theirs.GradientAccumulationScheduler: (
        "a batch is a whole optimizer step here; data.global_batch_size says how many rows it has, "
        "data.micro_batch_size how many are computed at once"
    ),
    theirs.OnExceptionCheckpoint: (
        "a step that failed halfway can't be resumed; the last checkpoint can, with run.resume=auto"
    ),
    theirs.StochasticWeightAveraging: "it sets the learning rate and counts epochs; callbacks=ema averages weights",
    theirs.WeightAveraging: (
        "it saves the averaged weights instead of the weights that training continues from; callbacks=ema averages "
        "by the same formula, validates with the average, exports it and resumes exactly"
    ),
    theirs.LearningRateFinder: f"{_FINDS}; lmtrain.tune finds a rate, from the same config",
    theirs.LambdaCallback: "it takes functions, which a config can't name; write a Callback of your own",
    theirs.BatchSizeFinder: f"{_FINDS}; lmtrain.tune finds the largest data.micro_batch_size, from the same config",
}


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
