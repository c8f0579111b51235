"""Which depth of model=dial learns most in the time there is, by a law fitted to runs (benchmarks/dial.py).

The form is Hoffmann et al. 2022's (arXiv:2203.15556); tokens that are seen again count as Muennighoff et al. 2023 have
it (arXiv:2305.16264). The law was fitted on Python source: of other text its bits differ, the best depth hardly.
"""

import math
from collections.abc import Sequence

NAME = "dial"
KEY = "model.depth"
LAYERS = "model.num_hidden_layers"  # which follows from it, and may be typed in its place
DEPTHS = range(1, 17)
# Bits per byte = E + A / weights ** ALPHA + B / tokens ** BETA.
E, A, ALPHA, B, BETA = 1.067, 87.22, 0.5, 512.5, 0.5
_TOKEN, _WEIGHT = 19.0, 8.5e-5  # the time of a token, to each other: without weights, and of each
_WORN = 15.4  # passes after which a repeated token is worth little (R* of Muennighoff et al.)
# A text is memorized after _FRESH * (its tokens) / (weights of the layers) epochs. Muon's weight decay against that is
# large, as Kim et al. 2025 (arXiv:2509.14786) found for repeated text; before, none is better (benchmarks/RESULTS.md).
_FRESH, WEIGHT_DECAY = 2.0, 1.0
# Numbers of `forecast`, fitted to runs of experiment=dial that don't memorize (benchmarks/dial.py forecast), at which
# shares of the steps it reads the curve (the third validation of ten stands at 0.286), and how far off it may be.
_FORECAST = (0.241, 0.849, 2.015, 0.036)
READ_AT = (0.095, 0.19, 0.285)
SPREAD = 0.08
FED = 2  # weights of the layers for each token of the text: a model with more that sees it again learns it by heart


def weights(depth: int) -> int:
    """Weights of the layers, width 32 x depth: attention or convolution 4 x width^2, feed-forward 8 x width^2."""
    return 12 * (32 * depth) ** 2 * depth


def fed_by(tokens: float) -> list[int]:
    """The depths that a text of so many tokens feeds, the least one in any case."""
    return [depth for depth in DEPTHS if weights(depth) <= FED * tokens] or [DEPTHS[0]]


def fresh_epochs(depth: int, unique: float) -> float:
    """Returns the epochs over a text of `unique` tokens after which a model of this depth memorizes it."""
    return _FRESH * unique / weights(depth)


def worth(tokens: float, unique: float) -> float:
    """New tokens that are worth as much as `tokens`, of which only `unique` differ."""
    if tokens <= unique:
        return tokens
    return unique * (1 + _WORN * (1 - math.exp(-(tokens / unique - 1) / _WORN)))


def expected(depth: int, tokens: float) -> float:
    """Bits per byte of held-out Python source after so many new tokens."""
    return E + A / weights(depth) ** ALPHA + B / max(1.0, tokens) ** BETA


def cost(depth: int) -> float:
    """The time of a token in training, in units that are the same for all depths."""
    return _TOKEN + _WEIGHT * weights(depth)


def best_depth(seconds: float, depth: int, token_seconds: float, unique: float) -> int:
    """The depth with the least expected loss.

    Args:
        seconds: of training.
        depth: at which a token was measured to take `token_seconds`.
        unique: tokens of the text.
    """
    unit = token_seconds / cost(depth)
    return min(fed_by(unique), key=lambda d: expected(d, worth(seconds / (unit * cost(d)), unique)))


def forecast(scores: Sequence[tuple[int, float]], steps: int) -> float:
    """Bits per byte that a run ends at, by validations at the full rate.

    With v1, v2, v3 after the shares `READ_AT` of the steps, log(end / v3) = c - a log(v1 / v2) - b log(v2 / v3) -
    d log(steps): the steeper the curve still is, and the longer the run goes on, the more it gains, and the more the
    falling rate does.

    Args:
        scores: (step, bits per byte) of two validations or more, by step.
        steps: of the whole run.
    """
    first, second, third = (_read(scores, share * steps) for share in READ_AT)
    level, early, late, longer = _FORECAST
    return third * math.exp(
        level - early * math.log(first / second) - late * math.log(second / third) - longer * math.log(steps)
    )


def _read(scores: Sequence[tuple[int, float]], step: float) -> float:
    """The curve's value at a step, on a line through the validations beside it in log(step) and log(bits)."""
    after = next((i for i, (there, _) in enumerate(scores) if there >= step), len(scores) - 1)
    (left, more), (right, less) = scores[max(0, after - 1) :][:2]
    return more * (less / more) ** (math.log(step / left) / math.log(right / left))
