"""What goes with which strategy. Imports neither torch nor lightning."""

from lmtrain.errors import UserError
from lmtrain.schema import Config

STRATEGIES = ("auto", "ddp", "fsdp", "deepspeed")


def check_strategy(c: Config) -> None:
    """Raises UserError for the first setting that can't work with trainer.strategy, with what can."""
    strategy = c.trainer.strategy
    if strategy not in ("fsdp", "deepspeed"):
        return
    key = f"trainer.strategy={strategy}"
    precisions = ("auto", "32-true", "bf16-mixed", "bf16-true")
    if c.trainer.precision not in precisions:
        raise UserError(f"trainer.precision={c.trainer.precision} does not go with {key}: set one of {precisions}")
    if c.trainer.accelerator == "mps":
        raise UserError(f"{key} needs CUDA devices (or a CPU): trainer.accelerator=mps has one, so set strategy=auto")
    if c.optimizer.name == "adamw_8bit":
        raise UserError(
            f"optimizer=adamw_8bit does not go with {key}: its blocks of 256 values cross the borders of the parts. "
            f"Set optimizer=adamw: its state is shared out over the devices too"
        )
    if c.peft.quantization is not None:
        raise UserError(
            f"peft.quantization={c.peft.quantization} does not go with {key}: set trainer.strategy=ddp, or peft=lora, "
            f"whose frozen base is shared out over the devices"
        )
    if c.trainer.precision == "bf16-true" and c.peft.method != "none" and c.peft.modules_to_save:
        raise UserError(
            f"peft.modules_to_save with trainer.precision=bf16-true does not go with {key}, which wants all trained "
            f"parameters of a block in one dtype: set trainer.precision=bf16-mixed"
        )
