"""The keys under `optimizer` of each optimizer. Imports no torch."""

from dataclasses import dataclass
from typing import Annotated, Any

from lmtrain.config.constraints import TRAJECTORY
from lmtrain.config.schema import OptimizerConfig
from lmtrain.errors import UserError


def two_betas(key: str, value: Any) -> None:
    if (
        not isinstance(value, list | tuple)
        or len(value) != 2
        or not all(isinstance(beta, int | float) and 0 <= beta < 1 for beta in value)
    ):
        raise UserError(f"{key}={value}: two numbers are needed, from 0 up to (not including) 1: [0.9,0.95]")


@dataclass(kw_only=True)
class LionConfig(OptimizerConfig):
    betas: Annotated[Any, TRAJECTORY, two_betas]


@dataclass(kw_only=True)
class AdamWConfig(OptimizerConfig):
    betas: Annotated[Any, TRAJECTORY, two_betas]
    eps: Annotated[float, TRAJECTORY]


@dataclass(kw_only=True)
class AdamW8bitConfig(OptimizerConfig):
    betas: Annotated[Any, TRAJECTORY, two_betas]
    eps: Annotated[float, TRAJECTORY]
    full_state_pattern: Annotated[str, TRAJECTORY]


@dataclass(kw_only=True)
class AdafactorConfig(OptimizerConfig):
    beta2_decay: Annotated[float, TRAJECTORY]
    eps: Annotated[float, TRAJECTORY]
    min_parameter_rms: Annotated[float, TRAJECTORY]
    clip_threshold: Annotated[float, TRAJECTORY]


@dataclass(kw_only=True)
class MuonConfig(AdamWConfig):
    """With those of the AdamW that takes all that is no hidden matrix."""

    momentum: Annotated[float, TRAJECTORY]
    nesterov: Annotated[bool, TRAJECTORY]
    ns_steps: Annotated[int, TRAJECTORY]
    adamw_pattern: Annotated[str, TRAJECTORY]


# optimizer.name -> its keys; `optim.optimizers` builds them.
OWN: dict[str, type[OptimizerConfig]] = {
    "adamw": AdamWConfig,
    "adamw_8bit": AdamW8bitConfig,
    "adafactor": AdafactorConfig,
    "lion": LionConfig,
    "muon": MuonConfig,
}
