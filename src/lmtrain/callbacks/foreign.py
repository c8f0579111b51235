"""Lightning's callbacks that can't do here what they are for, and why.

docs/lightning.md says what the others do.
"""

import lightning.pytorch.callbacks as theirs
from lightning.pytorch.callbacks import Callback

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
        "a step that failed halfway can't be resumed; the last checkpoint can, with run.resume=auto"
    ),
    theirs.StochasticWeightAveraging: "it sets the learning rate and counts epochs; callbacks=ema averages weights",
    theirs.WeightAveraging: _AVERAGES,
    theirs.LearningRateFinder: f"{_FINDS}; lmtrain.tune finds a rate, from the same config",
    theirs.ThroughputMonitor: "it has to be told what a batch holds; tokens_per_s, samples_per_s and mfu are recorded",
    theirs.LambdaCallback: "it takes functions, which a config can't name; write a Callback of your own",
    theirs.BatchSizeFinder: f"{_FINDS}; lmtrain.tune finds the largest data.micro_batch_size, from the same config",
}
