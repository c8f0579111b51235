"""Ends a run after too many skipped updates in a row, and saves the batch for debugging."""

import json
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch

from lmtrain.errors import RunError
from lmtrain.objectives.base import Objective


class BadSteps(pl.Callback):
    """Looks at the guard each step on a CPU, with each logged row on a GPU (reading it waits for the device)."""

    def __init__(self, folder: Path, max_bad_steps: int, log_every_n_steps: int) -> None:
        self.folder, self.max_bad_steps, self.log_every_n_steps = folder, max_bad_steps, log_every_n_steps

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
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
            f"from step {start} on. Its micro-batch {worst} and row ids lie in {self.folder / name}.pt and .json. "
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
