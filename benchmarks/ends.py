"""A callback that ends the process once its last timed step is recorded: nothing is validated, saved or exported."""

import os
from typing import Any

import lightning.pytorch as pl

STEPS_MORE = 1  # trainer.max_steps of such a run is larger than the number of timed steps


class Ends(pl.Callback):
    """Ends the process, without cleaning up, when the step after `steps` begins: by then that step is recorded."""

    def __init__(self, steps: int) -> None:
        self.steps = steps

    def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.global_step >= self.steps:
            os._exit(0)


def words(steps: int) -> list[str]:
    """Returns the arguments of a run of `lmtrain.train` on one device that ends after `steps` steps."""
    own = ["run.allow_target=[ends]", f"callbacks.extra=[{{_target_: ends.Ends, steps: {steps}}}]"]
    return [f"trainer.max_steps={steps + STEPS_MORE}", *own]
