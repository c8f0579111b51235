"""The learning-rate range test (Smith 2017, arXiv:1506.01186): which rate the curve of losses suggests."""

import math
from collections.abc import Sequence
from typing import NamedTuple

_FEWEST, _APART = 10, 2  # steps that a curve is made of, and that its slope is taken over to either side


class Smoothed:
    """The exponential moving average of a series, its start corrected (as Adam's moments are)."""

    def __init__(self, memory: float) -> None:
        self.memory, self.sum, self.count = memory, 0.0, 0

    def add(self, value: float) -> float:
        """The average with `value` in it."""
        self.count += 1
        self.sum = self.memory * self.sum + (1 - self.memory) * value
        return self.sum / (1 - self.memory**self.count)


class Suggestion(NamedTuple):
    """lr: the suggested rate; steepest: where the loss falls fastest; lowest: where it ends to fall."""

    lr: float
    steepest: float
    lowest: float
    smoothed: list[float]  # the losses the three were read from, one a rate


def suggest(rates: Sequence[float], losses: Sequence[float], smoothing: float) -> Suggestion | None:
    """The rate that a range test suggests; None where the loss never fell.

    Between the rate at which the smoothed loss falls fastest, which is slow but safe, and the one where it ends to
    fall, which is too fast for a whole run: their geometric mean.

    Args:
        rates: ascending, a constant factor apart.
        losses: of the steps at these rates; the first one that is not finite and what follows are left out.
    """
    finite = next((i for i, loss in enumerate(losses) if not math.isfinite(loss)), len(losses))
    average = Smoothed(smoothing)
    smoothed = [average.add(loss) for loss in losses[:finite]]
    if len(smoothed) < _FEWEST:
        return None
    lowest = min(range(len(smoothed)), key=smoothed.__getitem__)
    # Over several steps, as neighbours are nearly equal where the loss is smoothed.
    slopes = {i: smoothed[i + _APART] - smoothed[i - _APART] for i in range(_APART, lowest - _APART + 1)}
    steepest = min(slopes, key=slopes.__getitem__, default=None)
    if steepest is None or slopes[steepest] >= 0:
        return None
    return Suggestion(math.sqrt(rates[steepest] * rates[lowest]), rates[steepest], rates[lowest], smoothed)
