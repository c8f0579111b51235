"""Learning-rate schedules as closed functions of the step: nothing to save, nothing to restore. Imports no torch.

One convention for all of them, with T = total_steps and w = warmup steps:

- Steps are counted from 0; `step` is the one about to be taken, so a run takes the steps 0 ... T-1.
- Warmup is linear, (step + 1) / (w + 1): the first step already learns and step w is the first at the full rate.
- Decay runs from 1 at step w to the floor at step T. The last step taken, T-1, is therefore one notch above the
  floor: with a floor of 0, no step is spent at a learning rate of 0. From step T on the factor stays at the floor.

nanoGPT and transformers let the decay end at T too; transformers' warmup, step / w, spends its first step at 0.
"""

import math
from collections.abc import Callable

from lmtrain.errors import UserError
from lmtrain.schema import Schedule

# Fraction of the decay done, from 0 to 1, to the share of the learning rate that is left, from 1 to 0.
DECAY_SHAPES: dict[str, Callable[[float], float]] = {
    "linear": lambda progress: 1 - progress,
    "cosine": lambda progress: 0.5 * (1 + math.cos(math.pi * progress)),
    "sqrt": lambda progress: 1 - math.sqrt(progress),
}

# Which keys a schedule reads besides the warmup.
SCHEDULE_KEYS: dict[str, tuple[str, ...]] = {
    "constant": (),
    "linear": ("min_lr_ratio",),
    "cosine": ("min_lr_ratio",),
    "cosine_restarts": ("min_lr_ratio", "num_cycles"),
    "polynomial": ("min_lr_ratio", "power"),
    "inverse_sqrt": ("timescale",),
    "wsd": ("min_lr_ratio", "decay_ratio", "decay_shape"),
}
ENDLESS = ("constant", "inverse_sqrt")  # defined without knowing where the run ends


def lr_factor(schedule: Schedule, step: int, total_steps: int | None) -> float:
    """What multiplies every group's base learning rate at optimizer step `step`, in [0, 1].

    Args:
        step: the step about to be taken, from 0.
        total_steps: optimizer steps of the whole run; None only for constant and inverse_sqrt without warmup_ratio.

    Sources: cosine and restarts, Loshchilov & Hutter 2017 (arXiv:1608.03983); inverse square root, Vaswani et al.
    2017 (arXiv:1706.03762) with the timescale apart from the warmup; warmup-stable-decay, Hu et al. 2024
    (arXiv:2404.06395), its `sqrt` shape from Hägele et al. 2024 (arXiv:2405.18392).

    Raises UserError for an unknown name, a missing or impossible value, or a missing total_steps.
    """
    check_schedule(schedule)
    warmup = warmup_steps(schedule, total_steps)
    if schedule.name in ENDLESS:
        if step < warmup:
            return (step + 1) / (warmup + 1)
        return 1.0 if schedule.name == "constant" else _inverse_sqrt(schedule, step - warmup)

    if total_steps is None:
        raise UserError(f"schedule.name={schedule.name} needs the run's length: set trainer.max_steps")
    floor = _value(schedule, "min_lr_ratio")
    if step >= total_steps:
        return floor
    if step < warmup:
        return (step + 1) / (warmup + 1)
    start = warmup
    if schedule.name == "wsd":
        start = max(warmup, total_steps - _share(_value(schedule, "decay_ratio"), total_steps))
        if step < start:
            return 1.0
    return floor + (1 - floor) * _decay(schedule, (step - start) / (total_steps - start))


def warmup_steps(schedule: Schedule, total_steps: int | None) -> int:
    """Steps below the full rate at the start: `warmup_steps`, or `warmup_ratio` of the run, rounded up; else 0."""
    if schedule.warmup_ratio is None:
        return schedule.warmup_steps or 0
    if schedule.warmup_ratio == 0:
        return 0
    if total_steps is None:
        raise UserError(
            f"schedule.warmup_ratio={schedule.warmup_ratio} needs the run's length: set trainer.max_steps, or "
            f"schedule.warmup_steps instead"
        )
    return _share(schedule.warmup_ratio, total_steps)


def check_schedule(schedule: Schedule) -> None:
    """Raises UserError unless the name is known and each value it needs is there and in range."""
    if schedule.name not in SCHEDULE_KEYS:
        raise UserError(f"schedule.name={schedule.name} is not known (options: {', '.join(SCHEDULE_KEYS)})")
    steps, ratio = schedule.warmup_steps, schedule.warmup_ratio
    if steps is not None and ratio is not None:
        raise UserError(
            f"schedule.warmup_steps={steps} and schedule.warmup_ratio={ratio} both set the warmup: "
            f"make one of them null"
        )
    if steps is not None and steps < 0:
        raise UserError(f"schedule.warmup_steps={steps}: must not be negative")
    if ratio is not None and not 0 <= ratio <= 1:
        raise UserError(f"schedule.warmup_ratio={ratio}: a share of the run from 0 to 1 is needed")
    for key in SCHEDULE_KEYS[schedule.name]:
        value = getattr(schedule, key)
        if value is None:
            raise UserError(f"schedule.name={schedule.name} needs schedule.{key}: choose schedule={schedule.name}")
        in_range, wanted = _RANGES[key]
        if not in_range(value):
            raise UserError(f"schedule.{key}={value}: {wanted} is needed")


_RANGES: dict[str, tuple[Callable[..., bool], str]] = {
    "min_lr_ratio": (lambda v: 0 <= v <= 1, "a share of the peak from 0 to 1"),
    "num_cycles": (lambda v: v >= 1, "a whole number of at least 1"),
    "power": (lambda v: v > 0, "a number above 0"),
    "timescale": (lambda v: v >= 1, "a number of steps of at least 1"),
    "decay_ratio": (lambda v: 0 < v <= 1, "a share of the run above 0 and up to 1"),
    "decay_shape": (lambda v: v in DECAY_SHAPES, " or ".join(DECAY_SHAPES)),
}


def _decay(schedule: Schedule, progress: float) -> float:
    """The share of the learning rate above the floor that is left after `progress` (0 up to 1) of the decay."""
    if schedule.name == "polynomial":
        return (1 - progress) ** _value(schedule, "power")
    if schedule.name == "cosine_restarts":
        return DECAY_SHAPES["cosine"](progress * _value(schedule, "num_cycles") % 1)
    if schedule.name == "wsd":
        return DECAY_SHAPES[str(schedule.decay_shape)](progress)
    return DECAY_SHAPES[schedule.name](progress)


def _inverse_sqrt(schedule: Schedule, steps_after_warmup: int) -> float:
    timescale = _value(schedule, "timescale")
    return math.sqrt(timescale / (timescale + steps_after_warmup))


def _share(ratio: float, total_steps: int) -> int:
    """A share of the run in steps, rounded up; 0.1 of 30 is 3 although 0.1 * 30 is a hair more."""
    return math.ceil(round(ratio * total_steps, 6))


def _value(schedule: Schedule, key: str) -> float:
    """A number that check_schedule has seen to be there."""
    return float(getattr(schedule, key))
