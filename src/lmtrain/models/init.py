"""Initial weights of a model trained from scratch."""

import torch
from torch import nn

# The matrices that write into the residual stream, by the names Llama's descendants give them in transformers.
RESIDUAL_PROJECTIONS = ("o_proj.weight", "down_proj.weight", "experts.down_proj")


@torch.no_grad()
def scale_residual_projections(model: nn.Module, num_hidden_layers: int) -> None:
    """Divides the residual projections by sqrt(2 L), in place.

    Two of them per layer add to the residual stream, so its variance would grow with depth (Radford et al. 2019,
    section 2.3). transformers does this for GPT-2 but draws all of a Llama's matrices from N(0, initializer_range);
    Megatron-LM (Shoeybi et al. 2019, section 4.1) and the Llama-shaped OLMo and TinyLlama scale them as GPT-2 does.
    """
    for name, parameter in model.named_parameters():
        if name.endswith(RESIDUAL_PROJECTIONS):
            parameter.mul_((2 * num_hidden_layers) ** -0.5)
