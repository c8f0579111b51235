"""What ends a run before its last step: a request to stop, too many bad steps in a row, the end of a trial.

A signal or the time limit asks, the next step boundary saves, and the run ends with exit 75. Ranks agree on stopping in
the all-reduce that counts the step's tokens (objectives/base.py), so no rank stops alone and no extra collective is
paid; within a validation they ask each other about once a second. A second signal ends the process at once
(stop_signals.py); the last complete checkpoint stays.
"""

import json
import math
import time
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch

from lmtrain.distributed.stop_signals import StopRequest
from lmtrain.errors import RunError
from lmtrain.objectives.base import Objective
from lmtrain.optim.schedules import Smoothed

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

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any, **__: Any) -> None:
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


class BadSteps(pl.Callback):
    """Looks at the guard each step on a CPU, with each logged row on a GPU (reading it waits for the device)."""

    def __init__(self, folder: Path, max_bad_steps: int, log_every_n_steps: int) -> None:
        self.folder, self.max_bad_steps, self.log_every_n_steps = folder, max_bad_steps, log_every_n_steps

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any, **__: Any) -> None:
        assert isinstance(pl_module, Objective)
        if pl_module.device.type != "cpu" and trainer.global_step % self.log_every_n_steps != 0:
            return
        total, in_a_row, start = pl_module.guard.counts()
        if in_a_row >= self.max_bad_steps:
            self.give_up(trainer, pl_module, total, in_a_row, start)

    def give_up(self, trainer: pl.Trainer, module: Objective, total: int, in_a_row: int, start: int) -> None:
        """Writes the first bad step's batch and raises. The weights are still those before it."""
        assert trainer.train_dataloader is not None
        dataset = trainer.train_dataloader.dataset
        batch = dataset[start]  # order is a pure function of the step: the same batch again
        losses = self.micro_batch_losses(module, batch["micro_batches"])
        worst = next((i for i, loss in enumerate(losses) if not loss < float("inf")), losses.index(max(losses)))
        name = f"bad_step_{start:08d}"
        rows = dataset.row_ids(start).tolist()
        if trainer.is_global_zero:
            torch.save(batch["micro_batches"][worst], self.folder / f"{name}.pt")
            report = {"step": start, "micro_batch": worst, "micro_batch_losses": losses, "epoch_and_row_ids": rows}
            (self.folder / f"{name}.json").write_text(json.dumps(report, indent=2))
        raise RunError(
            f"{in_a_row} updates in a row were skipped (loss or gradient not finite, or a loss spike), {total} in all, "
            f"from step {start} on. Its micro-batch {worst} and row ids are in {self.folder / name}.pt and .json. "
            f"Run that very step again: same command with debug=replay debug.step={start}. What helps most often: a "
            f"lower optimizer.lr, a longer schedule.warmup_steps, trainer.precision=32-true, objective.z_loss=1e-4"
        )

    def micro_batch_losses(self, module: Objective, micro_batches: list[dict[str, torch.Tensor]]) -> list[float]:
        """Each micro-batch's mean loss, computed in the precision it was trained in."""
        losses = []
        precision: Any = module.trainer.precision_plugin
        with torch.no_grad(), precision.forward_context():
            for micro_batch in micro_batches:
                parts = module.micro_batch_loss({k: v.to(module.device) for k, v in micro_batch.items()})
                losses.append(float(parts.loss_sum / parts.n_tokens.clamp(min=1)))
        return losses


class EndsEarly(pl.Callback):
    """Writes {"step", "lr", "loss", "time"} of each step to `path`, and ends the run before anything is validated or
    saved.

    Args:
        path: JSON lines, written by the first rank.
        steps: the last step.
        diverged: ends once the smoothed loss is above this many times its least, or no number; None: never.
        smoothing: of the loss, as in `Smoothed`.
        seconds: ends so long after the first step, once `fewest` steps are done; None: after `steps` only.
    """

    def __init__(
        self,
        path: str,
        steps: int,
        diverged: float | None = None,
        smoothing: float = 0.0,
        seconds: float | None = None,
        fewest: int = 1,
    ) -> None:
        self.path, self.steps, self.diverged = Path(path), steps, diverged
        self.smoothed, self.least = Smoothed(smoothing), math.inf
        self.seconds, self.fewest = seconds, fewest
        self.first_step: float | None = None

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any, **__: Any) -> None:
        assert isinstance(pl_module, Objective)
        numbers = pl_module.step_means()
        loss, step = numbers["train/loss"], trainer.global_step
        if trainer.is_global_zero:
            with self.path.open("a", encoding="utf-8") as file:
                file.write(json.dumps({"step": step, "lr": numbers["lr"], "loss": loss, "time": time.time()}) + "\n")
        if step >= self.steps or self._has_diverged(loss) or self._has_taken_long(step):
            trainer.should_stop = True
            raise StopIteration  # what Lightning's loop ends at; the callbacks that save come after this one

    def _has_taken_long(self, step: int) -> bool:
        if self.first_step is None:
            self.first_step = time.time()
        return self.seconds is not None and step >= self.fewest and time.time() - self.first_step > self.seconds

    def _has_diverged(self, loss: float) -> bool:
        if self.diverged is None:
            return False
        smoothed = self.smoothed.add(loss)
        self.least = min(self.least, smoothed)
        return not math.isfinite(loss) or smoothed > self.diverged * self.least
