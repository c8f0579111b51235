"""Router losses in a training step: statistics of the whole step, and the settings that a resumed run must keep."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from lmtrain.distributed.devices import total
from lmtrain.models.routers import StepRouting

Batch = dict[str, Tensor]


def hold_to(objective: Any, began: dict[str, Any], wanted: str) -> None:
    """Keeps what router.over_layers=auto meant when a run began, read from the fingerprint of its checkpoint.

    wanted: router.over_layers of the config.
    """
    form = began["keys"]["router.over_layers"]
    if wanted == "auto" and form != "mean":
        objective.fingerprint["keys"]["router.over_layers"] = objective.model.router_losses.over_layers = form


def routed(objective: Any, step: int, micro_batches: list[Batch], units: Tensor) -> Iterator[Batch]:
    """Yields the micro-batches one by one, in the order in which they must be trained.

    With router.scope=step the gradient of each depends on how often the tokens of all of them chose each choice. So all
    go through a forward pass without gradients first; the generators are then reset, so that the second pass draws the
    same random numbers. A step of one micro-batch takes one pass: its router totals are summed over ranks in it.

    Args:
        units: what the step's sums are divided by, over all ranks, 0-dim.
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
