"""Stops a run cleanly: a signal or the time limit asks, the next step boundary saves, and the run ends with exit 75.

Ranks agree on stopping in the all-reduce that counts the step's tokens (objectives/base.py), so no rank stops alone and
no extra collective is paid; within a validation they ask each other about once a second. A second signal ends the
process at once (stop_signals.py); the last complete checkpoint stays.
"""

import time
from typing import Any

import lightning.pytorch as pl
import torch

from lmtrain.objectives.base import Objective
from lmtrain.stop_signals import StopSignals

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
    """`reason` says why this rank wants to stop, or is None."""

    def __init__(self, time_limit: float | None, started: float) -> None:
        self.deadline = None if time_limit is None else started + time_limit
        self.reason: str | None = None
        self.stopped = False
        self.interrupted_validation = False
        self.signals = StopSignals()
        self._vote = Vote()

    # Not earlier: until the devices hold the model there is nothing to save, and a signal ends the process.
    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.signals.listen()
        if not trainer.is_global_zero:
            self.deadline = None  # the first rank's clock is the run's: it tells the others, and the user

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self.interrupted_validation:  # the one that was owed: its checkpoint is there
            self._stop(trainer)

    def asked_to_stop(self) -> bool:
        if self.reason is None:
            past = self.deadline is not None and time.time() >= self.deadline
            self.reason = self.signals.first or ("run.time_limit" if past else None)
        return self.reason is not None

    def why(self) -> str:
        """What asked for the stop. A signal to all ranks may have reached this one after another had told it."""
        return self.reason or self.signals.first or "a signal to another rank"

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        assert isinstance(pl_module, Objective)
        pl_module.stop_requested = self.asked_to_stop()

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        assert isinstance(pl_module, Objective)
        alone = trainer.world_size == 1
        if pl_module.stop_agreed or (alone and self.asked_to_stop()):
            self._stop(trainer)

    def _stop(self, trainer: pl.Trainer) -> None:
        self.stopped = True
        trainer.should_stop = True

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._vote = Vote()

    def on_validation_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any, **__: Any) -> None:
        if not self.signals.listens:  # no training to save
            return
        assert isinstance(pl_module, Objective)
        stop = self.asked_to_stop()
        if trainer.world_size > 1:
            stop = self._vote.after_batch(stop, pl_module.device)
        if stop:
            pl_module.stop_agreed = self.interrupted_validation = True
            raise ValidationInterrupted

    def on_fit_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if not self.stopped:  # else until summary.json says how the run ended: train.py closes them
            self.signals.close()
