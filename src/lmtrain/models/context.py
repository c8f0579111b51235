"""Context parallelism: a group of ranks shares each row, every rank holds a slice of its tokens in all layers.

Attention alone looks at other tokens. Before it the ranks of a group exchange slices for heads, after it back (Ulysses:
Jacobs et al. 2023, arXiv:2309.14509): each attends over whole rows with its share of the heads, so that documents,
windows and kernels are those of one device. The tokens of a slice count as the rows of another rank do.
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

CONTEXT = "lmtrain_context"  # attribute of modules that attend
KEY = "trainer.fsdp.context_parallel_size"
# Rotary frequencies that follow the longest position of a micro-batch, which a slice doesn't know.
_LENGTH_DEPENDENT = ("dynamic", "longrope")


class Context:
    """This rank's place in its group.

    Args:
        rank: number of the slice it holds, from the start of the row.
        size: ranks of the group.
        group: what they exchange through.
    """

    def __init__(self, rank: int, size: int, group: ProcessGroup) -> None:
        self.rank, self.size, self.group = rank, size, group

    def mark(self, model: nn.Module) -> None:
        """Lets the attention layers of a model know it."""
        for module in model.modules():
            setattr(module, CONTEXT, self)

    def slice_of(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        """This rank's slice of a micro-batch: [B, T] becomes [B, T / size]; `cu_seqlens` stays that of whole rows.

        Labels are shifted already, so the last token of a slice predicts the first of the next. Padded rows of a length
        that `size` does not divide are padded on. What is `seen` counts at the first rank.
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
        return {**batch, **own}

    def heads_for_tokens(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """A slice's [B, H, T / size, D] of all heads become whole rows' [B, H / size, T, D] of some.

        Keys and values come with fewer heads; where those don't divide by `size` they are repeated as far as they must.
        """
        times = math.lcm(key.shape[1], self.size) // key.shape[1]
        if times > 1:
            key, value = (x.repeat_interleave(times, dim=1) for x in (key, value))
        query, key, value = (joined(self._exchange(parted(x, 1, self.size)), 2) for x in (query, key, value))
        return query, key, value

    def tokens_for_heads(self, out: Tensor) -> Tensor:
        """What whole rows' attention gave, [B, T, H / size, D], becomes the slice's [B, T / size, H, D]."""
        return joined(self._exchange(parted(out, 1, self.size)), 2)

    def _exchange(self, parts: Tensor) -> Tensor:
        """Part i of [size, ...] goes to rank i; the i-th of what comes is rank i's."""
        return all_to_all_single_autograd(parts, None, None, self.group)


def parted(x: Tensor, dim: int, size: int) -> Tensor:
    """`size` equal parts of `x` along `dim`, stacked: [size, ...]."""
    return x.unflatten(dim, (size, -1)).movedim(dim, 0).contiguous()


def joined(parts: Tensor, dim: int) -> Tensor:
    """Parts [size, ...] put one after the other along `dim` of theirs."""
    return parts.movedim(0, dim).flatten(dim, dim + 1)


def check(model: PreTrainedModel, size: int) -> None:
    """Raises UserError for a model whose rows can't be shared by `size` devices; only its config is looked at."""
    config: Any = model.config.get_text_config()
    family, instead = config.model_type, f"set {KEY}=1"
    reason = getattr(model, "unpacked_because", None)
    if reason is not None:
        chosen = "model.attention=auto, or " if reason.startswith("model.attention=") else ""
        raise UserError(
            f"{KEY}={size}: attention has to be all that mixes the tokens of {family}'s rows, by lmtrain's code "
            f"({reason}): {instead if not chosen else f'set {chosen}{instead[4:]}'}"
        )
    if config.num_attention_heads % size:
        fits = [d for d in range(2, size) if config.num_attention_heads % d == 0]
        raise UserError(
            f"{KEY}={size} does not divide the {config.num_attention_heads} attention heads of {family}, which the "
            f"devices of a group share out: set it to {fits[-1] if fits else 1}"
        )
    ropes = {str(getattr(module, "rope_type", None)) for module in model.modules()}
    if any(word in rope for rope in ropes for word in _LENGTH_DEPENDENT):
        raise UserError(
            f"{KEY}={size}: {family}'s rotary embedding depends on the length of a row (dynamic or longrope), of which "
            f"a device has a slice: {instead}"
        )
    if getattr(config, "num_experts_per_tok", None):
        raise UserError(
            f"{KEY}={size}: the balance of {family}'s experts is computed from the tokens of whole rows, of which a "
            f"device has a slice: {instead}"
        )
