"""A reward for stories that contradict nothing."""

from collections.abc import Sequence
from typing import Any

from lmtrain.data.sources.story_world import consistent_share
from lmtrain.rewards.base import Reward


class Consistent(Reward):
    """The share of a completion's sentences that contradict nothing told before; the prompt is the story's opening."""

    def __call__(self, prompts: Sequence[Any], completions: Sequence[str], **columns: Sequence[Any]) -> list[float]:
        return [consistent_share(text, str(opening)) for text, opening in zip(completions, prompts, strict=True)]
