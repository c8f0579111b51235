"""Callbacks that end a run before its last step: on a stop request, after too many bad steps, at a trial's end.

After a signal or the time limit, the run saves at the next step boundary and exits with code 75. Ranks agree on
stopping in the all-reduce that counts the step's tokens (objectives/base.py), so no rank stops alone and no extra
collective is needed; within a validation they vote about once a second. A second signal ends the process at once
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
from lmtrain.files import strict_json
from lmtrain.objectives.base import Objective
from lmtrain.optim.schedules import Smoothed

_VOTE_SECONDS = 1.0  # time between votes in a validation: a collective in which hosts wait for their devices


class ValidationInterrupted(Exception):
    """Raised between two validation batches after a stop request; the resumed run makes the validation."""


class Vote:
    """A vote among ranks on leaving a validation, held after the same batches on all of them."""

    def __init__(self) -> None:
        self.began, self.batches, self.every = time.monotonic(), 0, 1

    def after_batch(self, wants: bool, device: torch.device) -> bool:
        """Returns whether any rank wants to stop; all call it after each batch. Most calls return False at once."""
        self.batches += 1
        if self.batches < self.every:
            return False
        seconds = (time.monotonic() - self.began) / self.batches
        ballot = torch.tensor([float(wants), seconds], dtype=torch.float32, device=device)
        torch.distributed.all_reduce(ballot, torch.distributed.ReduceOp.MAX)
        stop, slowest = ballot.tolist()
        self.began, self.batches = time.monotonic(), 0
        self.every = max(1, int(_VOTE_SECONDS / max(slowest, 1e-6)))
        return stop > 0


class Preemption(pl.Callback):
    """A callback that ends training, or a validation, once all ranks know of a stop request."""

    def __init__(self, stop: StopRequest) -> None:
        self.stop = stop
        self.stopped = False
        self.interrupted_validation = False

    # Not earlier: before the model is on the devices there is nothing to save, and a signal may end the process.
    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.stop.signals.listen()
        if not trainer.is_global_zero:
            self.stop.deadline = None  # only rank 0 checks the time limit; it tells the others and the user

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        # Stopped in an overdue validation or before the first rows of a stream: any checkpoint is already written.
        if self.stop.agreed:
            self._end(trainer)

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any, **__: Any) -> None:
        if self.stop.agreed or (trainer.world_size == 1 and self.stop.asked()):
            self._end(trainer)

    def _end(self, trainer: pl.Trainer) -> None:
        self.stopped = True
        trainer.should_stop = True

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._vote = Vote()

    def on_validation_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any, **__: Any) -> None:
        if not self.stop.signals.listens:  # not training: nothing to save
            return
        asked = self.stop.asked()
        if trainer.world_size > 1:
            asked = self._vote.after_batch(asked, pl_module.device)
        if asked:
            self.stop.agreed = self.interrupted_validation = True
            raise ValidationInterrupted

    def on_fit_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if not self.stopped:  # else session.py closes them once summary.json is written
            self.stop.signals.close()


class BadSteps(pl.Callback):
    """A callback that ends a run with too many bad steps in a row.

    It checks the guard at each step on a CPU, and at logged steps on a GPU, since reading it waits for the device.
    """

    def __init__(self, folder: Path, max_bad_steps: int, log_every_n_steps: int) -> None:
        self.folder, self.max_bad_steps, self.log_every_n_steps = folder, max_bad_steps, log_every_n_steps

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: Objective, *_: Any, **__: Any) -> None:
        if pl_module.device.type != "cpu" and trainer.global_step % self.log_every_n_steps != 0:
            return
        total, in_a_row, start = pl_module.guard.counts()
        if in_a_row >= self.max_bad_steps:
            self.give_up(trainer, pl_module, total, in_a_row, start)

    def give_up(self, trainer: pl.Trainer, module: Objective, total: int, in_a_row: int, start: int) -> None:
        """Saves the first bad step's worst micro-batch and raises RunError. The weights are still those before it."""
        try:
            saved = self._save(trainer, module, start)
        except RunError as error:  # the rows of a stream may be gone
            saved = f"The micro-batches of that step can't be saved: {error}."
        skipped = f"{in_a_row} updates in a row were skipped, {total} in all, from step {start} on"
        often = "a lower optimizer.lr, a longer schedule.warmup_steps, trainer.precision=32-true"
        why = "loss or gradient not finite"
        raise RunError(f"{skipped} ({why}). {saved} What helps most often: {often}")

    def _save(self, trainer: pl.Trainer, module: Objective, start: int) -> str:
        """Saves the worst micro-batch of a step; returns where it is."""
        assert trainer.train_dataloader is not None
        dataset = trainer.train_dataloader.dataset
        batch = dataset[start]  # the same batch: order is a pure function of the step
        losses = self.micro_batch_losses(module, batch["micro_batches"])
        worst = next((i for i, loss in enumerate(losses) if not loss < float("inf")), losses.index(max(losses)))
        name = f"bad_step_{start:08d}"
        rows = dataset.row_ids(start).tolist()
        if trainer.is_global_zero:
            torch.save(batch["micro_batches"][worst], self.folder / f"{name}.pt")
            report = {"step": start, "micro_batch": worst, "micro_batch_losses": losses, "epoch_and_row_ids": rows}
            (self.folder / f"{name}.json").write_text(strict_json(report, indent=2))
        files = f"{self.folder / name}.pt and .json"
        return f"The worst micro-batch of that step (number {worst}) and its row ids are in {files}."

    def micro_batch_losses(self, module: Objective, micro_batches: list[dict[str, torch.Tensor]]) -> list[float]:
        """Returns each micro-batch's mean loss, computed in the training precision."""
        losses = []
        precision: Any = module.trainer.precision_plugin
        with torch.no_grad(), precision.forward_context():
            for micro_batch in micro_batches:
                parts = module.micro_batch_loss({k: v.to(module.device) for k, v in micro_batch.items()})
                losses.append(float(parts.loss_sum / parts.n_tokens.clamp(min=1)))
        return losses


class EndsEarly(pl.Callback):
    """A callback that writes {"step", "lr", "loss", "time"} of each step to `path`, and ends the run before it
    validates or saves.

    Args:
        path: a file of JSON lines, written by rank 0.
        steps: the last step.
        diverged: ends the run if the smoothed loss exceeds its minimum by this factor, or is not finite; None: never.
        smoothing: the smoothing factor of the loss, as in `Smoothed`.
        seconds: ends the run this long after the first step, once `fewest` steps are done; None: after `steps` only.
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

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: Objective, *_: Any, **__: Any) -> None:
        numbers = pl_module.step_means()
        loss, step = numbers["train/loss"], trainer.global_step
        if trainer.is_global_zero:
            with self.path.open("a", encoding="utf-8") as file:
                file.write(json.dumps({"step": step, "lr": numbers["lr"], "loss": loss, "time": time.time()}) + "\n")
        if step >= self.steps or self._has_diverged(loss) or self._has_taken_long(step):
            trainer.should_stop = True
            raise StopIteration  # ends Lightning's loop; the callbacks that save come after this one

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
