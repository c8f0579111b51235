"""Per-row scores of a model with bootstrap confidence intervals over rows; paired where two models are compared."""

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np


@dataclass
class Scores:
    """What a model scores on each document, conversation or pair.

    columns: numbers of each row, [rows] each.
    ratios: score to (numerator's column, denominator's column); the score is the ratio of their sums.
    whole: scores over all rows at once, such as BLEU.
    texts: what was written for a row, by name.
    """

    columns: dict[str, np.ndarray]
    ratios: dict[str, tuple[str, str]]
    whole: dict[str, float] = field(default_factory=dict)
    texts: dict[str, list[str]] = field(default_factory=dict)

    def parts(self, score: str) -> tuple[np.ndarray, np.ndarray]:
        return self.columns[self.ratios[score][0]], self.columns[self.ratios[score][1]]

    def value(self, score: str) -> float:
        numerator, denominator = self.parts(score)
        return float(numerator.sum() / denominator.sum())


@dataclass
class Evaluated:
    """A model's scores and what it was scored on."""

    scores: Scores
    data: dict[str, Any]
    settings: dict[str, Any]


class Interval(NamedTuple):
    value: float
    low: float  # of 95 %
    high: float


def interval(scores: Scores, score: str, resamples: int, seed: int, other: Scores | None = None) -> Interval:
    """The score, or its difference `scores - other` on the same rows, with the percentile bootstrap's interval.

    Rows are drawn with replacement, for both models the same ones (Efron and Tibshirani 1993; Koehn 2004).
    """
    pairs = [scores.parts(score)] + ([other.parts(score)] if other is not None else [])
    rows, generator = len(pairs[0][0]), np.random.default_rng(seed)
    drawn = np.empty(resamples)
    for i in range(resamples):
        weights = np.bincount(generator.integers(rows, size=rows), minlength=rows)
        drawn[i] = _difference(pairs, weights)
    low, high = np.nanpercentile(drawn, [2.5, 97.5])
    return Interval(_difference(pairs, np.ones(rows)), float(low), float(high))


def _difference(pairs: list[tuple[np.ndarray, np.ndarray]], weights: np.ndarray) -> float:
    values = [
        float(weights @ numerator) / max(float(weights @ denominator), 1e-300) for numerator, denominator in pairs
    ]
    return values[0] - (values[1] if len(values) > 1 else 0.0)
