"""What an objective makes of a micro-batch, and of a step; what a number of a record means."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

from torch import Tensor

from lmtrain.models.language_model import LogProbs

# Where numbers of real runs are compared with plain loops over the raw rows.
RECOMPUTED = "tests/parity/test_recomputed.py"


class Definition(NamedTuple):
    """What a number of metrics.jsonl or summary.json means. It stands beside what produces the number, under its name.

    Means are over all micro-batches and ranks of the step, of a validation over all its rows: `over` says of what.
    docs/metrics.md is made of all definitions (docs/metrics.py).
    """

    unit: str
    over: str  # what it is a mean or a sum of
    formula: str
    compared: Mapping[str, str] = MappingProxyType({})  # with which library or plain loop, by which test


class LossParts(NamedTuple):
    """What an objective makes of a micro-batch; sums, not means, so that parts of a step add up."""

    loss_sum: Tensor  # differentiable, summed over trained tokens
    n_tokens: Tensor  # int64, trained tokens (the objective's unit of weight)
    sums: dict[str, Tensor]  # detached sums over the same tokens, reported divided by the step's count


class StepResult(NamedTuple):
    """A finished optimizer step, still on the device: reading a value waits for it."""

    step: int  # optimizer steps done, this one included
    rows: str  # checksum of the rows it trained on
    lr: float
    grad_norm: Tensor  # global L2 norm before clipping
    n_tokens: Tensor  # trained tokens of the step, all ranks
    seen: Tensor  # tokens the model read in it, without padding, all ranks
    sums: dict[str, Tensor]  # this rank's sums


def with_routers(loss_sum: Tensor, n: Tensor, sums: dict[str, Tensor], forward: LogProbs) -> LossParts:
    """Loss and sums of a micro-batch of weight `n` with those of the routers in its forward."""
    sums = sums | {name: value * n for name, value in forward.aux.items()}
    return LossParts(loss_sum if forward.router_loss is None else loss_sum + forward.router_loss * n, n, sums)


def add_sums(total: dict[str, Tensor], part: dict[str, Tensor]) -> None:
    """Adds `part` into `total`, in place, name by name."""
    for name, value in part.items():
        total[name] = total[name] + value if name in total else value
