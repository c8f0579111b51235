"""Router losses in a training step: statistics of the whole step, and the settings that a resumed run must keep."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from lmtrain.distributed.devices import total
from lmtrain.models.routers import StepRouting
from lmtrain.objectives.parts import RECOMPUTED, Definition

Batch = dict[str, Tensor]

_LOOP = {"plain loop": f"{RECOMPUTED}::test_routers"}
_LOSSES = "tests/losses/test_router_losses.py"
_TOKENS = (
    "tokens of a micro-batch (router.scope=step: of the step), then micro-batches by their trained tokens or pairs"
)
# Keyed by RouterLosses.names(). A token makes k of C choices; router.over_layers says how layers are combined.
ROUTERS = {
    "router/load_balance": Definition(
        "1 where even",
        _TOKENS,
        "C sum_i f_i P_i / k: f_i tokens that choose i / tokens, P_i mean probability of i; mean over layers, or joint",
        {"transformers' load_balancing_loss_func": f"{_LOSSES}::test_joint_layers_are_transformers", **_LOOP},
    ),
    "router/deviation": Definition(
        "share squared", _TOKENS, "sum_i (P_i - 1 / C)^2; sum or mean over layers, or joint",
        {"closed form": f"{_LOSSES}::test_deviation_is_its_closed_form", **_LOOP},
    ),
    "router/z_loss": Definition(
        "nats squared", _TOKENS, "logsumexp(router logits)^2; sum or mean over layers, or joint",
        {"torch": f"{_LOSSES}::test_z_loss_is_st_moes", **_LOOP},
    ),
    "router/entropy": Definition(
        "1 where even", _TOKENS, "-sum_i q_i log q_i / log C, q_i = f_i / k; mean over layers", _LOOP
    ),
    "router/dead": Definition("share", _TOKENS, "choices that no token made / C; mean over layers", _LOOP),
}  # fmt: skip


def hold_to(objective: Any, began: dict[str, Any], wanted: str) -> None:
    """Keeps what router.over_layers=auto meant when a run began, read from the fingerprint of its checkpoint.

    wanted: router.over_layers of the config.
    """
    form = began.get("keys", {}).get("router.over_layers", "sum")  # what auto meant in earlier versions
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
