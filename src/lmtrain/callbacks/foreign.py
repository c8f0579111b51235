"""Lightning's callbacks that can't do here what they are for, and why. docs/lightning.md says what the others do."""

from typing import Any

import lightning.pytorch.callbacks as theirs
from lightning.pytorch.callbacks import Callback

from lmtrain.callbacks import throughput

_AVERAGES = (
    "it saves the average in place of the weights that training goes on from; callbacks=ema averages by the same "
    "formula, validates with the average, exports it and resumes exactly"
)
_FINDS = "it starts Lightning's loop again in the middle of the run's own"
REFUSED: dict[type[Callback], str] = {
    theirs.GradientAccumulationScheduler: (
        "a batch is a whole optimizer step here; data.global_batch_size says how many rows it has, "
        "data.micro_batch_size how many are computed at once"
    ),
    theirs.OnExceptionCheckpoint: (
        "a step that failed half way is no place to go on from; the last checkpoint is, with run.resume=auto"
    ),
    theirs.StochasticWeightAveraging: "it sets the learning rate and counts epochs; callbacks=ema averages weights",
    theirs.WeightAveraging: _AVERAGES,
    theirs.LearningRateFinder: f"{_FINDS}; lmtrain.tune finds a rate, from the same config",
    theirs.LambdaCallback: "it takes functions, which a config can't name; write a Callback of your own",
    theirs.BatchSizeFinder: f"{_FINDS}; lmtrain.tune finds the largest data.micro_batch_size, from the same config",
}


INSTEAD = dict.fromkeys(throughput.THEIRS, f"{throughput.__name__}.ThroughputMonitor")  # fitted to a batch of here


def fitted(entry: dict[str, Any]) -> dict[str, Any]:
    """An entry of callbacks.extra; for a callback of Lightning's that has to be told something, the one that is."""
    return {**entry, "_target_": INSTEAD.get(entry["_target_"], entry["_target_"])}
