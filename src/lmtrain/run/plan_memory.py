"""The plan's lines on memory: what a device holds by part, and the longest row that would fit."""

import copy

import torch
from transformers import PreTrainedModel

from lmtrain.config.schema import Config
from lmtrain.config.strategies import context_parallel
from lmtrain.models import flops
from lmtrain.models.build import MAX_POSITIONS

_STEP = 256  # tokens that a device has of a row: lengths are told in multiples
_MOST = 2**15  # of them: no row is tried beyond 8 M tokens a device


def gib(value: float) -> str:
    return f"{value / 2**30:.2f} GiB" if value >= 2**28 else f"{value / 2**20:.0f} MiB"


def rows(model: PreTrainedModel, c: Config) -> list[tuple[str, str]]:
    memory = flops.memory_estimate(model, c)
    parts = ", ".join(f"{name} {gib(size)}" for name, size in memory.items())
    found = [("memory", f"about {gib(sum(memory.values()))} a device: {parts}")]
    if context_parallel(c.trainer) > 1 and c.trainer.accelerator == "cuda" and torch.cuda.is_available():
        found.append(("longest row", longest_row_words(model, c, torch.cuda.get_device_properties(0).total_memory)))
    return found


def longest_row_words(model: PreTrainedModel, c: Config, card_bytes: int) -> str:
    """How long rows may be that groups of devices share, and without sharing."""
    room = int(card_bytes * (1 - c.estimate.headroom))
    key, size = "trainer.fsdp.context_parallel_size", context_parallel(c.trainer)
    alone = copy.deepcopy(c)
    alone.trainer.fsdp.context_parallel_size = 1
    tokens, by_itself = longest_row(model, c, room), longest_row(model, alone, room)
    words = (
        f"about {tokens:,} tokens with {key}={size} and {by_itself:,} with 1, by the same estimate, "
        f"{c.estimate.headroom:.0%} of {gib(card_bytes)} left free"
    )
    positions = getattr(model.config.get_text_config(), MAX_POSITIONS, None)
    return words if positions is None or tokens <= positions else f"{words}; the model has {positions:,} positions"


def longest_row(model: PreTrainedModel, c: Config, room: int) -> int:
    """The most tokens of a row, a multiple of 256 on each device, with which the estimate is within `room` bytes."""
    step, tried = _STEP * context_parallel(c.trainer), copy.deepcopy(c)
    low, high = 0, _MOST  # steps that fit, that are too many
    while high - low > 1:
        middle = (low + high) // 2
        tried.data.seq_len = middle * step
        if sum(flops.memory_estimate(model, tried, room).values()) <= room:
            low = middle
        else:
            high = middle
    return low * step
