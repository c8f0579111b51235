"""The best depth of model=dial for a time budget, by a scaling law fitted to runs (benchmarks/dial.py).

The law has the form of Hoffmann et al. 2022 (arXiv:2203.15556); repeated tokens count as in Muennighoff et al. 2023
(arXiv:2305.16264). It was fitted on Python source: on other text the bits per byte differ, the best depth hardly does.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

from lmtrain.config.schema import Config

NAME = "dial"
KEY = "model.depth"
LAYERS = "model.num_hidden_layers"  # follows from model.depth, and may be set instead of it
DEPTHS = range(1, 17)
# Bits per byte = E + A / weights ** ALPHA + B / tokens ** BETA.
E, A, ALPHA, B, BETA = 1.067, 87.22, 0.5, 512.5, 0.5
_TOKEN, _WEIGHT = 19.0, 8.5e-5  # training time of a token, in relative units: a constant part, and a part per weight
_WORN = 15.4  # epochs after which a repeated token is worth little (R* of Muennighoff et al.)
# Without weight decay a model memorizes a text after FED * (tokens of the text) / (weights of the layers) epochs; one
# with more weights than FED per token does as soon as it sees the text again. Muon's weight decay against that is
# large, as Kim et al. 2025 (arXiv:2509.14786) found for repeated text; with fewer epochs none is better
# (benchmarks/RESULTS.md).
FED, WEIGHT_DECAY = 2, 1.0
LR_DECAY = (0.6, "linear")  # schedule.decay_ratio and decay_shape of the runs that a forecast was fitted to


class CurveReading(NamedTuple):
    """Where a forecast reads the curve of a run, and what it makes of it, as fitted to runs of experiment=dial.

    With v1, v2, v3 the bits per byte at the fractions `at` of the steps, log(end / v3) = level - early log(v1 / v2) -
    late log(v2 / v3) - longer log(steps), and `decayed` in addition if the optimizer has WEIGHT_DECAY: the steeper the
    curve still is and the longer the run, the more it gains.
    """

    at: tuple[float, float, float]
    level: float
    early: float
    late: float
    longer: float
    decayed: float
    spread: float  # largest relative error for runs left out of the fit (benchmarks/RESULTS.md)
    until: float  # fraction of the steps after which it is too late for a forecast
    longest: float = math.inf  # steps, and epochs, of the longest runs that it holds for
    seen: float = math.inf


# The first is made at the full learning rate, where the curve is noisy, the second when the learning rate has begun to
# decay; both don't hold for long runs, which memorize. The third holds for all runs measured, up to 24 epochs.
READINGS = (
    CurveReading((0.095, 0.19, 0.285), 0.237, 0.601, 2.718, 0.0352, 0.0, 0.06, 0.42, longest=2000, seen=3),
    CurveReading((0.19, 0.285, 0.475), 0.1472, 1.3893, 1.1046, 0.0201, 0.0, 0.02, 0.6, longest=2000, seen=3),
    CurveReading((0.475, 0.57, 0.665), 0.0296, 1.7901, 0.7751, 0.0027, -0.053, 0.04, 0.8),
)


def is_measured(config: Config) -> bool:
    """Returns whether WEIGHT_DECAY was measured for this model and optimizer."""
    return config.model.name == NAME and config.optimizer.name == "muon"


def weights(depth: int) -> int:
    """Returns the layers' weights: attention or convolution 4 x width^2, feed-forward 8 x width^2, width 32 x depth."""
    return 12 * (32 * depth) ** 2 * depth


def fed_by(tokens: float) -> list[int]:
    """Returns the depths with at most FED layer weights per token of the text, or the smallest if there is none."""
    return [depth for depth in DEPTHS if fresh_epochs(depth, tokens) >= 1] or [DEPTHS[0]]


def fresh_epochs(depth: int, unique: float) -> float:
    """Returns the epochs over a text of `unique` tokens after which a model of this depth memorizes it."""
    return FED * unique / weights(depth)


def worth(tokens: float, unique: float) -> float:
    """Returns how many new tokens are worth as much as `tokens` tokens, of which only `unique` are distinct."""
    if tokens <= unique:
        return tokens
    return unique * (1 + _WORN * (1 - math.exp(-(tokens / unique - 1) / _WORN)))


def expected(depth: int, tokens: float) -> float:
    """Returns the expected bits per byte of held-out Python source after training on `tokens` new tokens."""
    return E + A / weights(depth) ** ALPHA + B / max(1.0, tokens) ** BETA


def cost(depth: int) -> float:
    """Returns the training time of a token, in units that are the same for all depths."""
    return _TOKEN + _WEIGHT * weights(depth)


def best_depth(seconds: float, depth: int, token_seconds: float, unique: float) -> int:
    """Returns the depth with the least expected loss.

    Args:
        seconds: training time.
        depth: the depth at which a token was measured to take `token_seconds`.
        unique: number of tokens of the text.
    """
    unit = token_seconds / cost(depth)
    return min(fed_by(unique), key=lambda d: expected(d, worth(seconds / (unit * cost(d)), unique)))


def forecast(reading: CurveReading, scores: Sequence[tuple[int, float]], steps: int, *, decayed: bool = False) -> float:
    """Forecasts a run's final bits per byte from its first validations.

    Args:
        scores: (step, bits per byte) of at least two validations, sorted by step.
        steps: number of steps of the whole run.
        decayed: whether the optimizer has WEIGHT_DECAY.
    """
    first, second, third = (_read(scores, share * steps) for share in reading.at)
    gain = reading.level + reading.decayed * decayed - reading.longer * math.log(steps)
    return third * math.exp(gain - reading.early * math.log(first / second) - reading.late * math.log(second / third))


def _read(scores: Sequence[tuple[int, float]], step: float) -> float:
    """Returns the curve's value at a step, on a line in log(step) and log(bits) through the two nearest validations."""
    after = next((i for i, (there, _) in enumerate(scores) if there >= step), len(scores) - 1)
    (left, more), (right, less) = scores[max(0, after - 1) :][:2]
    return more * (less / more) ** (math.log(step / left) / math.log(right / left))
