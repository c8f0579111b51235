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
FED = 1.25  # at most so many weights of the layers per token of the text; larger models memorize it
# Text that is seen more than once is memorized without weight decay. With it, weights are an average of the updates of
# the last 1 / (learning rate x weight decay) steps (Wang & Aitchison 2024, arXiv:2405.13698), and in our runs so many
# epochs of them are best (benchmarks/RESULTS.md), up to the largest weight decay that was measured to help.
DECAY_EPOCHS, MOST_DECAY = 1.2, 1.0
# For more than so many epochs that is not enough, and dropout helps too (Xue et al. 2023, arXiv:2305.13230).
FEW_EPOCHS, DROPOUT = 8, 0.1
LR_DECAY = (0.6, "linear")  # schedule.decay_ratio and decay_shape of the runs that a forecast was fitted to


# A forecast of the final bits per byte reads the curve at two fractions of the steps, between which the learning rate
# falls. With v1 and v2 the bits per byte there, log(end / v2) = LEVEL - SLOPE log(v1 / v2), and DECAYED in addition
# with weight decay, as fitted to runs of experiment=dial. SPREAD is relative, and larger than the errors for runs left
# out of the fit (benchmarks/RESULTS.md). After LATEST of the steps it is too late for a forecast.
FIRST, SECOND, LATEST = 0.475, 0.665, 0.9
LEVEL, SLOPE, DECAYED, SPREAD = -0.0201, 0.732, -0.0124, 0.04


def is_measured(config: Config) -> bool:
    """Returns whether `regularization` was measured for this model and optimizer."""
    return config.model.name == NAME and config.optimizer.name == "muon"


def weights(depth: int) -> int:
    """Returns the layers' weights: attention or convolution 4 x width^2, feed-forward 8 x width^2, width 32 x depth."""
    return 12 * (32 * depth) ** 2 * depth


def fed_by(tokens: float) -> list[int]:
    """Returns the depths with at most FED layer weights per token of the text, or the smallest if there is none."""
    return [depth for depth in DEPTHS if weights(depth) <= FED * tokens] or [DEPTHS[0]]


def weight_decay(lr: float, epoch_steps: float) -> float:
    """Returns Muon's weight decay for text that is seen more than once, to two digits.

    Args:
        lr: Muon's highest learning rate.
        epoch_steps: steps in which the text is seen once.
    """
    return min(MOST_DECAY, float(f"{1 / (lr * DECAY_EPOCHS * epoch_steps):.2g}"))


def dropout(epochs: float) -> float:
    """Returns the dropout for text that is seen so many times."""
    return DROPOUT if epochs > FEW_EPOCHS else 0.0


def regularization(lr: float, steps: int, epochs: float) -> dict[str, float]:
    """Returns the weight decay and the dropout, by their keys, for text that is seen `epochs` times in `steps` steps.

    Args:
        lr: Muon's highest learning rate.
    """
    if epochs <= 1:
        return {}
    return {"optimizer.weight_decay": weight_decay(lr, steps / epochs), "model.dropout": dropout(epochs)}


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


def forecast(scores: Sequence[tuple[int, float]], steps: int, *, decayed: bool) -> float:
    """Forecasts a run's final bits per byte from its validations.

    Args:
        scores: (step, bits per byte) of at least two validations, sorted by step.
        steps: number of steps of the whole run.
        decayed: whether there is a weight decay.
    """
    first, second = (_read(scores, share * steps) for share in (FIRST, SECOND))
    return second * math.exp(LEVEL + DECAYED * decayed - SLOPE * math.log(first / second))


def _read(scores: Sequence[tuple[int, float]], step: float) -> float:
    """Returns the curve's value at a step, on a line in log(step) and log(bits) through the two nearest validations."""
    after = next((i for i, (there, _) in enumerate(scores) if there >= step), len(scores) - 1)
    (left, more), (right, less) = scores[max(0, after - 1) :][:2]
    return more * (less / more) ** (math.log(step / left) / math.log(right / left))
