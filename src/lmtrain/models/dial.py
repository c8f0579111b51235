"""The best depth of model=dial for a time budget, by a scaling law fitted to runs (benchmarks/dial.py).

It was fitted on Python source: on other text the bits per byte differ, the best depth hardly does.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from omegaconf import OmegaConf

from lmtrain.config.defaults import conf_dir
from lmtrain.config.interpolations import resolved
from lmtrain.config.keys import flat
from lmtrain.config.schema import Config

NAME = "dial"
KEY = "model.depth"
LAYERS = "model.num_hidden_layers"  # follows from model.depth, and may be set instead of it
DEPTHS = (*range(1, 9), *range(10, 33, 2))  # above 8 even ones: widths of heads that 8 divides, as kernels ask for
# Bits per byte = E + ((WEIGHTS / N) ** (ALPHA / BETA) + TOKENS / D) ** BETA, for N weights of the layers and D tokens:
# the form of Kaplan et al. 2020 (arXiv:2001.08361) with a floor, as that of Hoffmann et al. 2022 (arXiv:2203.15556). E
# is below what large models reach (GPT-3: 0.72 on the Pile). With ALPHA the best size for 1e18 FLOPs is near that of
# nanochat's sweep, and N and D grow alike from there, as by Hoffmann et al.; the rest is fitted.
E, ALPHA, BETA, WEIGHTS, TOKENS = 0.5, 0.2, 0.2104, 1.284e5, 2.53e6
# After some millions of tokens, fewer if it is larger, a model of code learns faster for a while, as if it began
# to copy from its context: it gains a share of COPIES_LESS in all, and half of that by COPIES_AFTER tokens with a
# million weights. WITHIN is the width, in log(tokens).
COPIES_LESS, COPIES_AFTER, COPIES_SOONER, WITHIN = 0.136, 2.95e6, 0.6, 0.56
# Repeated tokens count as in Muennighoff et al. 2023 (arXiv:2305.16264), but for models as small as those fitted all
# repeats together are worth 1.3 epochs, not 15.
WORN = 1.3
# Of those tokens; those of another vocabulary are 1 + MOST * (1 - (1,024 / vocabulary) ** SOONER) times as long, and at
# least a character, of which those have 2.7.
VOCABULARY, MOST, SOONER, CHARACTER = 1024, 0.83, 0.36, 0.37
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
# out of the fit (benchmarks/RESULTS.md). After LATEST of the steps it is too late for a forecast. In the fitted runs v2
# was lower than v1 by a share within FALLS; on a repetitive text it falls faster.
FIRST, SECOND, LATEST, FALLS = 0.475, 0.665, 0.9, (0.01, 0.09)
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
    """Returns how many new tokens are worth as much as `tokens`, `unique` of them distinct (Muennighoff et al.)."""
    if tokens <= unique:
        return tokens
    return unique * (1 + WORN * (1 - math.exp(-(tokens / unique - 1) / WORN)))


def expected(depth: int, tokens: float, unique: float = math.inf) -> float:
    """Returns the expected bits per byte of held-out Python source after these tokens, `unique` of them distinct."""
    size = weights(depth)
    loss = E + ((WEIGHTS / size) ** (ALPHA / BETA) + TOKENS / max(1.0, worth(tokens, unique))) ** BETA
    after = COPIES_AFTER * (1e6 / size) ** COPIES_SOONER
    return loss * (1 - COPIES_LESS / (1 + (after / max(1.0, tokens)) ** (1 / WITHIN)))


class Shape(NamedTuple):
    """What decides the time of a step."""

    depth: int
    vocabulary: int
    tokens: int  # per step

    @property
    def flops(self) -> float:
        """FLOPs per step, without attention: with rows that grow with the width, its share stays the same."""
        return 6.0 * self.tokens * (weights(self.depth) + self.vocabulary * 32 * self.depth)


@functools.cache
def recipe(depth: int) -> dict[str, Any]:
    """Returns the values by dotted keys that the rules of model=dial and experiment=dial give at a depth."""
    model, rest = (OmegaConf.load(conf_dir() / group / f"{NAME}.yaml") for group in ("model", "experiment"))
    found = flat(resolved(OmegaConf.merge(rest, {"model": model}, {"model": {"depth": depth}})))  # type: ignore[arg-type]
    return {key: value for key, value in found if not isinstance(value, dict) and key not in (KEY, "defaults")}


def longer(vocabulary: int) -> float:
    """Returns the characters of a token relative to a vocabulary of 1,024 (within 1 % from 1,536 to 32,768)."""
    return max(CHARACTER, 1 + MOST * (1 - (VOCABULARY / vocabulary) ** SOONER))


class Speed(NamedTuple):
    """A machine's seconds for a layer of a step, however small, and for a FLOP."""

    layer: float
    flop: float

    @classmethod
    def of(cls, measured: Sequence[tuple[Shape, float]]) -> "Speed":
        """Returns the speed at which the two deepest of the measured shapes take their seconds per step."""
        *others, (deep, seconds) = sorted(measured)
        flop = seconds / deep.flops
        if others:
            shallow, fewer = others[-1]
            per_layer = deep.flops / deep.depth - shallow.flops / shallow.depth
            flop = min(flop, max(0.0, (seconds / deep.depth - fewer / shallow.depth) / per_layer))
        return cls((seconds - flop * deep.flops) / deep.depth, flop)

    def step(self, shape: Shape) -> float:
        """Returns the seconds of a step."""
        return self.layer * shape.depth + self.flop * shape.flops


def best_depth(seconds: float, speed: Speed, shape: Callable[[int], Shape], unique: float) -> int:
    """Returns the depth with the least expected loss.

    Args:
        seconds: training time.
        shape: the shape at a depth.
        unique: number of tokens of the text, with a vocabulary of 1,024.
    """

    def loss(depth: int) -> float:
        at = shape(depth)
        return expected(depth, seconds / speed.step(at) * at.tokens * longer(at.vocabulary), unique)

    return min(fed_by(unique), key=loss)


def forecast(scores: Sequence[tuple[int, float]], steps: int, *, decayed: bool) -> float:
    """Forecasts a run's final bits per byte from its validations.

    Args:
        scores: (step, bits per byte) of at least two validations, sorted by step.
        steps: number of steps of the whole run.
        decayed: whether there is a weight decay.
    """
    first, second = (_read(scores, share * steps) for share in (FIRST, SECOND))
    return second * math.exp(LEVEL + DECAYED * decayed - SLOPE * math.log(first / second))


def fall(scores: Sequence[tuple[int, float]], steps: int) -> float:
    """Returns the share by which bits per byte fell from FIRST to SECOND; a forecast holds if it is within FALLS."""
    return 1 - _read(scores, SECOND * steps) / _read(scores, FIRST * steps)


def _read(scores: Sequence[tuple[int, float]], step: float) -> float:
    """Returns the curve's value at a step, on a line in log(step) and log(bits) through the two nearest validations."""
    after = next((i for i, (there, _) in enumerate(scores) if there >= step), len(scores) - 1)
    (left, more), (right, less) = scores[max(0, after - 1) :][:2]
    return more * (less / more) ** (math.log(step / left) / math.log(right / left))
