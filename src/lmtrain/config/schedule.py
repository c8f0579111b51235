"""The keys under `schedule` of each learning-rate schedule, and their ranges. Imports no torch."""

from dataclasses import dataclass
from typing import Annotated

from lmtrain.config.constraints import RATE, above_zero, at_least, choice, up_to_one
from lmtrain.config.schema import Schedule
from lmtrain.errors import UserError


@dataclass(kw_only=True)
class ToFloor(Schedule):
    """Falls to a floor, which it reaches where the run ends."""

    min_lr_ratio: Annotated[float, RATE, up_to_one]


@dataclass(kw_only=True)
class CosineRestarts(ToFloor):
    num_cycles: Annotated[int, RATE, at_least(1)]


@dataclass(kw_only=True)
class Polynomial(ToFloor):
    power: Annotated[float, RATE, above_zero]


@dataclass(kw_only=True)
class WarmupStableDecay(ToFloor):
    decay_ratio: Annotated[float, RATE, above_zero, up_to_one]
    decay_shape: Annotated[str, RATE, choice("linear", "cosine", "sqrt")]


@dataclass(kw_only=True)
class RangeTest(Schedule):
    """Rises by one factor a step to the full rate, for `lmtrain.tune`."""

    min_lr_ratio: Annotated[float, RATE, above_zero, up_to_one]


@dataclass(kw_only=True)
class InverseSqrt(Schedule):
    timescale: Annotated[int, RATE, at_least(1)]


# schedule.name -> its keys; `optim.schedules.lr_factor` computes them.
OWN: dict[str, type[Schedule]] = {
    "constant": Schedule,
    "linear": ToFloor,
    "cosine": ToFloor,
    "cosine_restarts": CosineRestarts,
    "polynomial": Polynomial,
    "inverse_sqrt": InverseSqrt,
    "wsd": WarmupStableDecay,
    "range_test": RangeTest,
}


def check_schedule(schedule: Schedule) -> None:
    """Raises UserError where the warmup is said twice."""
    steps, ratio = schedule.warmup_steps, schedule.warmup_ratio
    if steps is not None and ratio is not None:
        raise UserError(
            f"schedule.warmup_steps={steps} and schedule.warmup_ratio={ratio} both set the warmup: "
            f"make one of them null"
        )
    if schedule.name == "range_test" and (steps or ratio):
        raise UserError("schedule.name=range_test has no warmup: schedule.warmup_steps=0 and no warmup_ratio")
