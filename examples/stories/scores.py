"""A metric and a reward for stories that contradict nothing."""

from collections.abc import Sequence
from typing import Any

from torchmetrics import MeanMetric

from examples.stories.world import consistent_share
from lmtrain.rewards.base import Reward


class Consistency(MeanMetric):
    """The share of sentences that contradict nothing told before, in stories that continue the prompts' openings."""

    takes_prompts = True  # `update` gets the openings too

    def update(self, preds: list[str], target: list[str], prompts: list[str]) -> None:  # type: ignore[override]
        for text, opening in zip(preds, prompts, strict=True):
            super().update(consistent_share(text, opening))


class Consistent(Reward):
    """The same share of a completion's sentences, as a reward; the prompt is the story's opening."""

    def __call__(self, prompts: Sequence[Any], completions: Sequence[str], **columns: Sequence[Any]) -> list[float]:
        return [consistent_share(text, str(opening)) for text, opening in zip(completions, prompts, strict=True)]
