"""The results of an objective's micro-batches and steps."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple, TypeVar

from torch import Tensor

from lmtrain.config.schema import Config, ObjectiveConfig
from lmtrain.errors import UserError
from lmtrain.models.documents import Inputs, Prefixes
from lmtrain.models.language_model import LogProbs

Options = TypeVar("Options", bound=ObjectiveConfig)


def options_of(config: Config, options: type[Options]) -> Options:
    """Returns config.objective; raises UserError if it lacks the keys that a built-in objective reads, `options`."""
    if isinstance(config.objective, options):
        return config.objective
    needed = f"{options.__module__}.{options.__qualname__}"
    raise UserError(f"objective._target_={config.objective._target_}: its Options must derive from {needed}")


class LossParts(NamedTuple):
    """The results of one micro-batch, as sums rather than means, so that the parts of a step add up."""

    loss_sum: Tensor  # differentiable, summed over trained tokens
    n_tokens: Tensor  # int64, trained tokens, or the pairs or answers that the loss is averaged over
    sums: dict[str, Tensor]  # detached sums over the same tokens, divided by the step's count when reported


class StepResult(NamedTuple):
    """The results of a finished optimizer step, still on the device: reading a value waits for the device."""

    step: int  # number of optimizer steps done, including this one
    rows: str  # checksum of the rows it trained on
    lr: float
    grad_norm: Tensor  # global L2 norm before clipping
    n_tokens: Tensor  # trained tokens of the step, over all ranks
    seen: Tensor  # tokens the model processed in the step, without padding, over all ranks
    sums: dict[str, Tensor]  # this rank's sums


def of_rows(losses: Tensor, numbers: dict[str, Tensor], n: Tensor) -> LossParts:
    """Builds the LossParts of a micro-batch of `n` rows from the loss and other numbers of each row, [rows] each.

    An empty micro-batch has n = 0 and one dummy row, whose weight is 0.
    """
    real = (n > 0).to(losses.dtype)
    loss_sum = losses.sum() * real
    sums = {name: value.detach().sum() * real for name, value in numbers.items()}
    return LossParts(loss_sum, n, {"loss": loss_sum.detach(), **sums})


def with_routers(parts: LossParts, forward: LogProbs) -> LossParts:
    """Adds the router losses of a micro-batch's forward pass, weighted as its other numbers are."""
    n = parts.n_tokens
    sums = parts.sums | {name: value * n for name, value in forward.aux.items()}
    loss_sum = parts.loss_sum if forward.router_loss is None else parts.loss_sum + forward.router_loss * n
    return LossParts(loss_sum, n, sums)


def inputs_of(batch: dict[str, Tensor]) -> Inputs:
    """Returns the rows of a micro-batch, padded or of documents, as a LanguageModel reads them."""
    prefixes = Prefixes(batch["prefix_lengths"], batch["kv_index"], batch["cu_kv"]) if "kv_index" in batch else None
    # Padded rows have neither positions nor documents, and windows of text have no padding.
    optional = (batch.get("position_ids"), batch.get("cu_seqlens"), prefixes, batch.get("row_lengths"))
    return Inputs(batch["input_ids"], *optional, batch.get("real"))


def add_sums(total: dict[str, Tensor], part: dict[str, Tensor]) -> None:
    """Adds the values of `part` to those of `total`, in place."""
    for name, value in part.items():
        total[name] = total[name] + value if name in total else value


def means_over(sums: Mapping[str, Any], count: Any, own: Mapping[str, Any] = MappingProxyType({})) -> dict[str, Any]:
    """Divides sums, numbers or 0-dim tensors, by `count`, which counts as 1 if it is less, or by their `own` counts.

    A mean over an own count of 0 is left out; of a tensor it is NaN.
    """
    at_least_one = count.clamp(min=1) if isinstance(count, Tensor) else max(count, 1)
    means = {name: value / at_least_one for name, value in sums.items() if name not in own}
    return means | {name: sums[name] / n for name, n in own.items() if name in sums and (isinstance(n, Tensor) or n)}
