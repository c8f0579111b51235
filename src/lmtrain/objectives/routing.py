"""The micro-batches of a step, each with what its routers' losses need to know of the whole step."""

from collections.abc import Iterator
from typing import Any, Protocol

import lightning.pytorch as pl
import torch
from torch import Tensor

from lmtrain.distributed.data_parallel import total
from lmtrain.models.language_model import LanguageModel
from lmtrain.models.routers import StepRouting

Batch = dict[str, Tensor]


class Trains(Protocol):
    """The part of an objective that is asked here."""

    model: LanguageModel

    @property
    def trainer(self) -> pl.Trainer: ...
    def micro_batch_loss(self, batch: Batch) -> Any: ...
    def count_tokens(self, batch: Batch) -> Tensor: ...
    def seed_step(self, step: int) -> None: ...


def routed(objective: Trains, step: int, micro_batches: list[Batch], units: Tensor) -> Iterator[Batch]:
    """The micro-batches, one by one, to be trained in this order.

    With router.scope=step the gradient of each needs to know how often the tokens of all chose each choice, so all are
    read once before, without gradients; the generators are then put back, so that they are read alike. A step of one
    micro-batch is read once: its routers' totals are summed over ranks in its forward.

    Args:
        units: of the step and all ranks, what its sums are divided by, 0-dim.
    """
    losses = objective.model.router_losses
    losses.chosen = {}
    if not losses.of_steps:
        yield from micro_batches
        return
    parts = [objective.count_tokens(batch) for batch in micro_batches]
    routing = losses.step = StepRouting(units, parts[0], lambda sums: total(objective.trainer, sums))
    try:
        if len(micro_batches) > 1:
            with torch.no_grad():
                for batch, part in zip(micro_batches, parts, strict=True):
                    routing.part = part
                    objective.micro_batch_loss(batch)
            routing.finish()
            objective.seed_step(step)
        for batch, part in zip(micro_batches, parts, strict=True):
            routing.part = part
            yield batch
    finally:
        losses.step = None
