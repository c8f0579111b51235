"""What trainer.precision=fp8 goes with, and what Lightning is told of it. Imports no torch."""

from lmtrain.config.schema import Config
from lmtrain.errors import UserError

FP8 = "fp8"
_NOT_TRIED = ("fsdp_tp", "deepspeed")


def outside_fp8(precision: str) -> str:
    """What all is computed in but the layers that trainer.precision=fp8 has in 8 bits; others are what they are."""
    return "bf16-mixed" if precision == FP8 else precision


def check_fp8(c: Config) -> None:
    """Raises UserError for a setting that trainer.precision=fp8 can't work with, or was never tried with."""
    if c.trainer.precision != FP8:
        return
    key, instead = "trainer.precision=fp8", "set trainer.precision=bf16-mixed"
    if c.trainer.strategy in _NOT_TRIED:
        raise UserError(
            f"{key} does not go with trainer.strategy={c.trainer.strategy}: set trainer.strategy=fsdp or ddp, or "
            f"{instead}"
        )
    if c.peft.quantization is not None:
        raise UserError(
            f"{key} does not go with peft.quantization={c.peft.quantization}, whose layers multiply in their own way: "
            f"{instead}, or peft=lora"
        )
    if hasattr(c.objective, "reference"):
        raise UserError(
            f"{key} does not go with objective={c.objective.name}: what it learns from are small differences of "
            f"log-probabilities, which 8 bits blur: {instead}"
        )
