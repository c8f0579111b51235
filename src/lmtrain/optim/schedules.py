"""Learning-rate schedules as pure functions of the step: no state to save or restore. Imports no torch.

One convention for all of them, with T = total_steps and w = warmup steps:

- Steps are counted from 0; `step` is the one about to be taken, so a run takes the steps 0 ... T-1.
- Warmup is linear, (step + 1) / (w + 1): the first step already learns and step w is the first at the full rate.
- Decay runs from 1 at step w to the floor at step T. The last step taken, T-1, is therefore slightly above the
  floor: with a floor of 0, no step is spent at a learning rate of 0. From step T on the factor stays at the floor.

The module also has the range test (Smith 2017, arXiv:1506.01186), which suggests a rate from a curve of losses.

nanoGPT and transformers also end the decay at T; transformers' warmup, step / w, spends its first step at 0.
"""

import functools
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import ClassVar, NamedTuple

from lmtrain.config import options
from lmtrain.config.schema import ScheduleConfig
from lmtrain.config.targets import building, find_class
from lmtrain.errors import UserError

# Map the fraction of the decay done, from 0 to 1, to the share of the learning rate that is left, from 1 to 0.
DECAY_SHAPES: dict[str, Callable[[float], float]] = {
    "linear": lambda progress: 1 - progress,
    "cosine": lambda progress: 0.5 * (1 + math.cos(math.pi * progress)),
    "sqrt": lambda progress: 1 - math.sqrt(progress),
}


class LRSchedule(ABC):
    """Base class of custom schedules, named by `schedule._target_`; the keys beside it are the fields of its `Options`.

    class Stairs(LRSchedule):
        Options = StairsOptions  # a dataclass derived from lmtrain.config.schema.ScheduleConfig, with `every`

        def factor(self, step, total_steps):
            return 0.5 ** (step // self.options.every)
    """

    Options: ClassVar[type[ScheduleConfig]] = ScheduleConfig

    def __init__(self, options: ScheduleConfig) -> None:
        self.options = options

    @abstractmethod
    def factor(self, step: int, total_steps: int) -> float:
        """Returns the factor of every group's base learning rate, 0 or more.

        It must depend on its arguments only: no state is saved, and a resumed run starts at a later step.

        Args:
            step: the step about to be taken, counted from 0 at the end of lmtrain's warmup.
            total_steps: steps of the run after the warmup; a run that was extended goes on past it.
        """


def build_schedule(
    cfg: ScheduleConfig, total_steps: int, allow_target: Sequence[str] = ()
) -> Callable[[int, int], float]:
    """Returns the schedule as a function of the step about to be taken and the number of steps of the run.

    Args:
        total_steps: of this run; used to test a custom schedule.
        allow_target: run.allow_target, the packages from which `cfg._target_` may name a class.

    Raises:
        UserError: the class is not a schedule, raises, returns no valid factor, or depends on more than the step.
    """
    if cfg._target_ is None:
        return functools.partial(lr_factor, cfg)
    cls = find_class(cfg._target_, "schedule", LRSchedule, allow_target)  # type: ignore[type-abstract]
    with building("schedule", cfg._target_):
        own = cls(cfg)
    schedule = functools.partial(_own_factor, own)
    first, _, again = (schedule(step, total_steps) for step in (total_steps - 1, 0, total_steps - 1))
    if first != again:
        found = f"{cfg._target_} gives {first:g} for step {total_steps - 1} and {again:g} when asked again"
        raise UserError(f"schedule: {found}: its factor must depend on its arguments only, for an exact resume")
    return schedule


def _own_factor(own: LRSchedule, step: int, total_steps: int) -> float:
    target, warmup = str(own.options._target_), warmup_steps(own.options, total_steps)
    if step < warmup:
        return (step + 1) / (warmup + 1)
    with building("schedule", target):
        value = own.factor(step - warmup, total_steps - warmup)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
        raise UserError(f"schedule: {target} gives {value!r} for step {step}: a number from 0 up is needed")
    return float(value)


def lr_factor(schedule: ScheduleConfig, step: int, total_steps: int) -> float:
    """Returns the factor of every group's base learning rate at optimizer step `step`, in [0, 1].

    Args:
        step: the step about to be taken, from 0.
        total_steps: optimizer steps of the whole run.

    Sources: cosine and restarts, Loshchilov & Hutter 2017 (arXiv:1608.03983); inverse square root, Vaswani et al.
    2017 (arXiv:1706.03762) with a timescale independent of the warmup; warmup-stable-decay, Hu et al. 2024
    (arXiv:2404.06395), its `sqrt` shape from Hägele et al. 2024 (arXiv:2405.18392). `range_test` rises geometrically
    from the floor at step 0 to 1 at step T-1, without a warmup (Smith 2017, arXiv:1506.01186).
    """
    if isinstance(schedule, options.RangeTestConfig):
        return schedule.min_lr_ratio ** (1 - min(1.0, step / max(1, total_steps - 1)))
    if isinstance(schedule, options.ToFloorConfig) and step >= total_steps:
        return schedule.min_lr_ratio
    warmup = warmup_steps(schedule, total_steps)
    if step < warmup:
        return (step + 1) / (warmup + 1)
    if isinstance(schedule, options.InverseSqrtConfig):
        return math.sqrt(schedule.timescale / (schedule.timescale + step - warmup))
    if not isinstance(schedule, options.ToFloorConfig):
        return 1.0
    start, floor = warmup, schedule.min_lr_ratio
    if isinstance(schedule, options.WarmupStableDecayConfig):
        decay_from = schedule.decay_from
        if decay_from is None:
            decay_from = total_steps - _share(schedule.decay_ratio, total_steps)
        start = max(warmup, decay_from)
        if step < start:
            return 1.0
    return floor + (1 - floor) * _decay(schedule, (step - start) / (total_steps - start))


def warmup_steps(schedule: ScheduleConfig, total_steps: int) -> int:
    """Returns the number of warmup steps: `warmup_steps`, or `warmup_ratio` of the run, rounded up; else 0."""
    if schedule.warmup_ratio is None:
        return schedule.warmup_steps or 0
    return _share(schedule.warmup_ratio, total_steps)


def _decay(schedule: options.ToFloorConfig, progress: float) -> float:
    """Returns the share of the learning rate above the floor that is left after `progress` (0 up to 1) of the decay."""
    if isinstance(schedule, options.PolynomialConfig):
        return (1 - progress) ** schedule.power
    if isinstance(schedule, options.CosineRestartsConfig):
        return DECAY_SHAPES["cosine"](progress * schedule.num_cycles % 1)
    if isinstance(schedule, options.WarmupStableDecayConfig):
        return DECAY_SHAPES[schedule.decay_shape](progress)
    return DECAY_SHAPES[schedule.name](progress)


def _share(ratio: float, total_steps: int) -> int:
    """Returns a share of the run in steps, rounded up; 0.1 of 30 is 3 although 0.1 * 30 is slightly more in fp64."""
    return math.ceil(round(ratio * total_steps, 6))


_FEWEST, _APART = 10, 2  # minimum steps of a curve; steps to either side over which its slope is taken


class Smoothed:
    """The exponential moving average of a series, with bias correction at its start (as for Adam's moments)."""

    def __init__(self, memory: float) -> None:
        self.memory = memory
        self.sum = 0.0
        self.count = 0

    def add(self, value: float) -> float:
        """Adds `value`; returns the average with it."""
        self.count += 1
        self.sum = self.memory * self.sum + (1 - self.memory) * value
        return self.sum / (1 - self.memory**self.count)


class Suggestion(NamedTuple):
    """lr: the suggested rate; steepest: where the loss falls fastest; lowest: where it stops falling."""

    lr: float
    steepest: float
    lowest: float
    smoothed: list[float]  # the losses the three were derived from, one per rate


def suggest(rates: Sequence[float], losses: Sequence[float], smoothing: float) -> Suggestion | None:
    """Returns the rate that a range test suggests, or None if the loss never fell or too few losses are finite.

    It is the geometric mean of the rate at which the smoothed loss falls fastest, which is slow but safe, and the one
    at which it stops falling, which is too fast for a whole run.

    Args:
        rates: ascending, a constant factor apart.
        losses: of the steps at these rates; the first one that is not finite and all after it are ignored.
    """
    finite = next((i for i, loss in enumerate(losses) if not math.isfinite(loss)), len(losses))
    average = Smoothed(smoothing)
    smoothed = [average.add(loss) for loss in losses[:finite]]
    if len(smoothed) < _FEWEST:
        return None
    lowest = min(range(len(smoothed)), key=smoothed.__getitem__)
    # Slopes are taken over several steps, as neighbouring smoothed losses are nearly equal.
    slopes = {i: smoothed[i + _APART] - smoothed[i - _APART] for i in range(_APART, lowest - _APART + 1)}
    if not slopes:
        return None
    steepest = min(slopes, key=slopes.__getitem__)  # where it falls, as the last slope ends at the first lowest loss
    return Suggestion(math.sqrt(rates[steepest] * rates[lowest]), rates[steepest], rates[lowest], smoothed)
