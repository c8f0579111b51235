"""Faulty rewards, and rewards that are functions."""

import math
import time
from collections.abc import Sequence
from typing import Any

from lmtrain.rewards.base import Reward

SEEN: list[Any] = []  # what the functions below were called with


class Text(Reward):
    def __call__(self, prompts: Sequence[Any], completions: Sequence[str], **columns: Sequence[Any]) -> Any:
        return ["good"] * len(completions)


class Few(Reward):
    def __call__(self, prompts: Sequence[Any], completions: Sequence[str], **columns: Sequence[Any]) -> Any:
        return [1.0]


class Raises(Reward):
    def __call__(self, prompts: Sequence[Any], completions: Sequence[str], **columns: Sequence[Any]) -> Any:
        raise ZeroDivisionError("oh dear")


class Sleeps(Reward):
    def __call__(self, prompts: Sequence[Any], completions: Sequence[str], **columns: Sequence[Any]) -> Any:
        time.sleep(600)


class NaNs(Reward):
    def __call__(self, prompts: Sequence[Any], completions: Sequence[str], **columns: Sequence[Any]) -> Any:
        return [math.nan if i == 1 else 0.5 for i in range(len(completions))]


class NoValidation(Reward):
    """Fails where prompts have a single completion each, as in a validation."""

    def __call__(self, prompts: Sequence[Any], completions: Sequence[str], **columns: Sequence[Any]) -> Any:
        if len(set(prompts)) == len(prompts):
            raise ValueError("no group")
        return [float(len(completion)) for completion in completions]


def short(completions: Sequence[Any], **columns: Sequence[Any]) -> list[float]:
    """Has TRL's signature."""
    SEEN.append((completions, columns))
    return [-float(len(ids)) for ids in columns["completion_ids"]]


def at_most(prompts: Sequence[Any], completions: Sequence[Any], answer: Sequence[Any], most: int = 3) -> list[float]:
    return [float(most + 0 * a) for a in answer]


def lacking(completions: Sequence[Any], solution: Sequence[Any]) -> list[float]:
    return [0.0 for _ in solution]


def deaf(prompts: Sequence[Any]) -> list[float]:
    return [0.0 for _ in prompts]


def early_letters(completions: Sequence[str], wanted: Sequence[int], **columns: Sequence[Any]) -> list[float]:
    """Rewards the share of characters before "p", or if `wanted` is -1 punishes it."""
    return [w * sum(c < "p" for c in text) / max(1, len(text)) for text, w in zip(completions, wanted, strict=True)]
