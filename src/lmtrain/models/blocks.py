"""The transformer blocks of a model, and recomputing their activations in backward."""

from torch import nn
from transformers import PreTrainedModel

from lmtrain.errors import UserError


def decoder_blocks(model: PreTrainedModel) -> list[nn.Module]:
    """The transformer blocks, in order: the modules transformers itself never splits over devices."""
    names = set(model._no_split_modules or ())
    # By all class names: fully_shard makes a module's class a subclass of what it was.
    return [m for m in model.modules() if any(cls.__name__ in names for cls in type(m).__mro__)]


def enable_activation_checkpointing(model: PreTrainedModel) -> None:
    """Keeps only each block's input and recomputes the rest in backward (Chen et al. 2016)."""
    if not model.supports_gradient_checkpointing:
        raise UserError(
            f"{type(model).__name__} has no activation checkpointing: set trainer.activation_checkpointing=false"
        )
    # Its name since transformers 5.18, and the one before.
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    # The reentrant kind loses gradients where a block's input needs none, as under LoRA.
    enable({"use_reentrant": False})
