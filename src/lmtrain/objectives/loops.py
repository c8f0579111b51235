"""What Lightning's `trainer.test` and `trainer.predict` run, and what is logged under a Trainer of your own."""

from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor

from lmtrain.distributed.devices import total
from lmtrain.objectives.parts import LossParts, StepResult


class Reported(pl.LightningModule):
    """Mixin of an objective. `test` and `predict` read the rows that are validated on, or a loader of the caller's."""

    val_sums: dict[int, dict[str, Tensor]]
    last_step: StepResult | None

    def micro_batch_loss(self, batch: dict[str, Tensor]) -> LossParts:
        raise NotImplementedError

    def look_ahead(self, micro_batches: list[dict[str, Tensor]], n_tokens: Tensor) -> None:
        """Called before the losses of a step, with all micro-batches of this rank: for what a loss needs of them all.

        Every rank calls it. What it does must draw nothing from a generator.

        Args:
            n_tokens: what the step's sums are divided by, of all ranks, 0-dim.
        """

    def means_of(self, sums: dict[str, Any], n_tokens: Any) -> dict[str, Any]:
        """What is reported of a step or a validation, from its sums over all ranks and what they are divided by.

        All are numbers, or all 0-dim tensors, which must not be waited for.
        """
        count = n_tokens.clamp(min=1) if isinstance(n_tokens, Tensor) else max(n_tokens, 1)
        return {name: value / count for name, value in sums.items()}

    def count_tokens(self, batch: dict[str, Tensor]) -> Tensor:
        raise NotImplementedError

    def validation_means(self, loader: int = 0) -> dict[str, float]:
        raise NotImplementedError

    def log_means(self, stage: str) -> None:
        """Logs the means of each loader as <stage>/..., of those of data.val_sets as <stage>/<its name>/..."""
        names = list(getattr(getattr(self.trainer, "datamodule", None), "val_sets", {}))
        for loader in sorted(self.val_sums):
            name = names[loader] if loader < len(names) else str(loader or "")
            prefix = f"{stage}/{name}/" if name else f"{stage}/"
            means = {f"{prefix}{key}": value for key, value in self.validation_means(loader).items()}
            self.log_dict(means, add_dataloader_idx=False)

    def step_means(self) -> dict[str, float]:
        """train/loss and the rest of the last step, lr and grad_norm: every rank must call it."""
        return {name: float(value) for name, value in self.step_tensors().items()}

    def step_tensors(self) -> dict[str, Tensor]:
        """As `step_means`, 0-dim, on the device."""
        last = self.last_step
        assert last is not None
        names = sorted(last.sums)
        sums = total(self.trainer, torch.stack([last.sums[n].double() for n in names]))
        found = self.means_of(dict(zip(names, sums, strict=True)), last.n_tokens)
        means = {f"train/{name}": mean for name, mean in found.items()}
        return {**means, "lr": torch.tensor(last.lr, dtype=torch.float64), "grad_norm": last.grad_norm}

    def test_step(self, batch: dict[str, Tensor], batch_idx: int, dataloader_idx: int = 0) -> None:
        self.validation_step(batch, batch_idx, dataloader_idx)

    def on_test_epoch_start(self) -> None:
        self.val_sums = {}

    def on_test_epoch_end(self) -> None:
        self.log_means("test")

    @torch.no_grad()
    def predict_step(self, batch: dict[str, Tensor], batch_idx: int, dataloader_idx: int = 0) -> dict[str, Any]:
        """What the model says of a micro-batch: here the means that a validation reports, 0-dim, and `n_tokens`."""
        self.look_ahead([batch], self.count_tokens(batch))
        parts = self.micro_batch_loss(batch)
        return self.means_of(parts.sums, parts.n_tokens) | {"n_tokens": parts.n_tokens}
