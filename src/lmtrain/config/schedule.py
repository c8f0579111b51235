"""The keys under `schedule` of each learning-rate schedule, and their ranges. Imports no torch."""

from dataclasses import dataclass
from typing import Annotated

from lmtrain.config.constraints import RATE, above_zero, at_least, choice, up_to_one
from lmtrain.config.schema import ScheduleConfig
from lmtrain.errors import UserError


@dataclass(kw_only=True)
class ToFloorConfig(ScheduleConfig):
    """Falls to a floor, which it reaches where the run ends."""

    min_lr_ratio: Annotated[float, RATE, up_to_one]


@dataclass(kw_only=True)
class CosineRestartsConfig(ToFloorConfig):
    num_cycles: Annotated[int, RATE, at_least(1)]


@dataclass(kw_only=True)
class PolynomialConfig(ToFloorConfig):
    power: Annotated[float, RATE, above_zero]


@dataclass(kw_only=True)
class WarmupStableDecayConfig(ToFloorConfig):
    decay_ratio: Annotated[float, RATE, above_zero, up_to_one]
    decay_shape: Annotated[str, RATE, choice("linear", "cosine", "sqrt")]


@dataclass(kw_only=True)
class RangeTestConfig(ScheduleConfig):
    """Rises by one factor a step to the full rate, for `lmtrain.tune`."""

    min_lr_ratio: Annotated[float, RATE, above_zero, up_to_one]


@dataclass(kw_only=True)
class InverseSqrtConfig(ScheduleConfig):
    timescale: Annotated[int, RATE, at_least(1)]


# schedule.name -> its keys; `optim.schedules.lr_factor` computes them.
OWN: dict[str, type[ScheduleConfig]] = {
    "constant": ScheduleConfig,
    "linear": ToFloorConfig,
    "cosine": ToFloorConfig,
    "cosine_restarts": CosineRestartsConfig,
    "polynomial": PolynomialConfig,
    "inverse_sqrt": InverseSqrtConfig,
    "wsd": WarmupStableDecayConfig,
    "range_test": RangeTestConfig,
}


def check_schedule(schedule: ScheduleConfig) -> None:
    """Raises UserError where the warmup is said twice."""
    steps, ratio = schedule.warmup_steps, schedule.warmup_ratio
    if steps is not None and ratio is not None:
        raise UserError(
            f"schedule.warmup_steps={steps} and schedule.warmup_ratio={ratio} both set the warmup: "
            f"make one of them null"
        )
    if schedule.name == "range_test" and (steps or ratio):
        raise UserError("schedule.name=range_test has no warmup: schedule.warmup_steps=0 and no warmup_ratio")
