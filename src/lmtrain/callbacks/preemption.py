"""Stops a run cleanly: a signal or the time limit asks, the next step boundary saves, and the run ends with exit 75.

Ranks agree on stopping in the all-reduce that counts the step's tokens (objectives/base.py), so no rank stops alone and
no extra collective is paid; within a validation they ask each other about once a second. A second signal ends the
process at once (stop_signals.py); the last complete checkpoint stays.
"""

import time
from typing import Any

import lightning.pytorch as pl
import torch

from lmtrain.distributed.stop_signals import StopRequest

_VOTE_SECONDS = 1.0  # how often ranks agree within a validation: a collective in which hosts wait for their devices


class ValidationInterrupted(Exception):
    """Raised between two validation batches when a stop was asked for; the validation is owed to the resumed run."""


class Vote:
    """Whether any rank wants to leave a validation, asked after the same batches on all of them."""

    def __init__(self) -> None:
        self.began, self.batches, self.every = time.monotonic(), 0, 1

    def after_batch(self, wants: bool, device: torch.device) -> bool:
        """Every rank calls it after each batch. Most calls return False at once."""
        self.batches += 1
        if self.batches < self.every:
            return False
        seconds = (time.monotonic() - self.began) / self.batches
        ballot = torch.tensor([float(wants), seconds], device=device)
        torch.distributed.all_reduce(ballot, torch.distributed.ReduceOp.MAX)
        stop, slowest = ballot.tolist()
        self.began, self.batches = time.monotonic(), 0
        self.every = max(1, int(_VOTE_SECONDS / max(slowest, 1e-6)))
        return stop > 0


class Preemption(pl.Callback):
    """Ends training, or a validation, once all ranks know of a request to stop."""

    def __init__(self, stop: StopRequest) -> None:
        self.stop = stop
        self.stopped = False
        self.interrupted_validation = False
        self._vote = Vote()

    # Not earlier: until the devices hold the model there is nothing to save, and a signal ends the process.
    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.stop.signals.listen()
        if not trainer.is_global_zero:
            self.stop.deadline = None  # the first rank's clock is the run's: it tells the others, and the user

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        # In the validation that was owed, or before a stream had its first rows: the checkpoint, if any, is there.
        if self.stop.agreed:
            self._end(trainer)

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        alone = trainer.world_size == 1
        if self.stop.agreed or (alone and self.stop.asked()):
            self._end(trainer)

    def _end(self, trainer: pl.Trainer) -> None:
        self.stopped = True
        trainer.should_stop = True

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._vote = Vote()

    def on_validation_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any, **__: Any) -> None:
        if not self.stop.signals.listens:  # no training to save
            return
        asked = self.stop.asked()
        if trainer.world_size > 1:
            asked = self._vote.after_batch(asked, pl_module.device)
        if asked:
            self.stop.agreed = self.interrupted_validation = True
            raise ValidationInterrupted

    def on_fit_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if not self.stopped:  # else until summary.json says how the run ended: session.py closes them
            self.stop.signals.close()
