"""Context parallelism: a group of ranks shares each row, and every rank holds a slice of its tokens in all layers.

Only attention looks at other tokens. Before it, the ranks of a group exchange slices of all heads for whole rows of
some heads, and after it back (Ulysses: Jacobs et al. 2023, arXiv:2309.14509). Each rank attends over whole rows with
its share of the heads, so documents, windows and kernels are the same as on one device. In sums over ranks, the tokens
of a slice count like rows of another rank.
"""

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed._functional_collectives import all_to_all_single_autograd
from torch.nn import functional as F
from transformers import PreTrainedModel

from lmtrain.errors import UserError
from lmtrain.losses.cross_entropy import IGNORE_INDEX
from lmtrain.models import rotary

CONTEXT = "lmtrain_context"  # attribute of attention modules
KEY = "trainer.fsdp.context_parallel_size"


class Context:
    """This rank's position in its context-parallel group.

    Args:
        rank: number of the slice it holds, from the start of the row.
        size: number of ranks in the group.
        group: the process group, used to exchange tensors.
    """

    def __init__(self, rank: int, size: int, group: ProcessGroup) -> None:
        self.rank, self.size, self.group = rank, size, group

    def mark(self, model: nn.Module) -> None:
        """Stores this object on all modules of a model, where attention layers read it."""
        for module in model.modules():
            setattr(module, CONTEXT, self)

    def slice_of(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        """Returns this rank's slice of a micro-batch, [B, T / size] of [B, T]; `cu_seqlens` still describes whole rows.

        Labels are shifted already, so the last token of a slice predicts the first of the next. Rows whose length
        `size` does not divide are padded further. `seen` is counted on the first rank only.
        """
        rows, length = batch["input_ids"].shape
        more = -length % self.size
        positions = batch.get("position_ids", torch.arange(length).expand(rows, length))
        ids, positions = (F.pad(x, (0, more)) for x in (batch["input_ids"], positions))
        labels = F.pad(batch["labels"], (0, more), value=IGNORE_INDEX)
        own = {"input_ids": ids, "labels": labels, "position_ids": positions}
        own = {name: x.chunk(self.size, dim=1)[self.rank].contiguous() for name, x in own.items()}
        if "learned" in batch:
            own["learned"] = (own["labels"].flatten() != IGNORE_INDEX).nonzero()[:, 0]
        if "seen" in batch:
            own["seen"] = batch["seen"] * int(self.rank == 0)
        return {name: x for name, x in {**batch, **own}.items() if name != "real"}  # mixtures of experts are refused

    def heads_for_tokens(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Exchanges a slice with all heads, [B, H, T / size, D], for whole rows with some heads, [B, H / size, T, D].

        Keys and values may have fewer heads; these are repeated as often as needed for `size` to divide their number.
        """
        times = math.lcm(key.shape[1], self.size) // key.shape[1]
        if times > 1:
            key, value = (x.repeat_interleave(times, dim=1) for x in (key, value))
        return self.exchanged(query), self.exchanged(key), self.exchanged(value)

    def exchanged(self, x: Tensor) -> Tensor:
        """Sends part i of dimension 1 to rank i, and concatenates the ranks' parts in dimension 2.

        This also turns attention's output for whole rows, [B, T, H / size, D], into the slice's, [B, T / size, H, D].
        """
        return joined(all_to_all_single_autograd(parted(x, 1, self.size), None, None, self.group), 2)


def parted(x: Tensor, dim: int, size: int) -> Tensor:
    """Splits `x` into `size` equal parts along `dim` and stacks them: [size, ...]."""
    return x.unflatten(dim, (size, -1)).movedim(dim, 0).contiguous()


def joined(parts: Tensor, dim: int) -> Tensor:
    """Concatenates parts [size, ...] along their dimension `dim`."""
    return parts.movedim(0, dim).flatten(dim, dim + 1)


def check(model: PreTrainedModel, size: int) -> None:
    """Raises UserError if `size` devices can't share the model's rows; reads no weights."""
    config: Any = model.config.get_text_config()
    family = config.model_type
    reason = getattr(model, "unpacked_because", None)
    if getattr(model, "mixers", None):
        reason = "it mixes tokens outside of attention"
    if reason is not None:
        chosen = "model.attention=auto, or " if reason.startswith("model.attention=") else ""
        needs = "it needs a model that mixes the tokens of a row only in attention and by lmtrain's code"
        raise UserError(f"{KEY}={size}: {needs}, which {family} doesn't ({reason}): set {chosen}{KEY}=1")
    if config.num_attention_heads % size:
        fits = [d for d in range(2, size) if config.num_attention_heads % d == 0]
        found = f"{KEY}={size} does not divide the {config.num_attention_heads} attention heads of {family}"
        raise UserError(f"{found}: set it to {fits[-1] if fits else 1}")
    if rotary.limit(model) is not None:
        reason = "its rotary embedding depends on the length of a row"
    if getattr(config, "num_experts_per_tok", None):
        reason = "the balance of its experts is computed over whole rows"
    if reason is not None:
        raise UserError(f"{KEY}={size}: each device has a slice of a row, but of {family}, {reason}: set {KEY}=1")
