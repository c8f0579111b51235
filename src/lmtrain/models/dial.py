"""The best depth of model=dial for a time budget, by a scaling law fitted to runs (benchmarks/dial.py).

The law has the form of Hoffmann et al. 2022 (arXiv:2203.15556); repeated tokens count as in Muennighoff et al. 2023
(arXiv:2305.16264). It was fitted on Python source: on other text the bits per byte differ, the best depth hardly does.
"""

import math
from collections.abc import Sequence

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
# Coefficients of `forecast`, fitted to runs of experiment=dial with at most LONGEST steps and SEEN epochs, its relative
# error for runs that are left out of the fit (benchmarks/RESULTS.md; longer runs end well above it), and the fractions
# of the steps at which it reads the curve: the third of ten validations is at 0.286.
_FORECAST = (0.237, 0.601, 2.718, 0.0352)
READ_AT = (0.095, 0.19, 0.285)
SPREAD, LONGEST, SEEN = 0.06, 3000, 3


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


def forecast(scores: Sequence[tuple[int, float]], steps: int) -> float:
    """Forecasts a run's final bits per byte, from validations at the full learning rate.

    With v1, v2, v3 at the fractions `READ_AT` of the steps, log(end / v3) = c - a log(v1 / v2) - b log(v2 / v3) -
    d log(steps): the steeper the curve still is and the longer the run is, the more it gains, also from the decay of
    the learning rate.

    Args:
        scores: (step, bits per byte) of at least two validations, sorted by step.
        steps: number of steps of the whole run.
    """
    first, second, third = (_read(scores, share * steps) for share in READ_AT)
    level, early, late, longer = _FORECAST
    return third * math.exp(
        level - early * math.log(first / second) - late * math.log(second / third) - longer * math.log(steps)
    )


def _read(scores: Sequence[tuple[int, float]], step: float) -> float:
    """Returns the curve's value at a step, on a line in log(step) and log(bits) through the two nearest validations."""
    after = next((i for i, (there, _) in enumerate(scores) if there >= step), len(scores) - 1)
    (left, more), (right, less) = scores[max(0, after - 1) :][:2]
    return more * (less / more) ** (math.log(step / left) / math.log(right / left))
