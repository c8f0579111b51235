"""Initial weights of a model trained from scratch."""

import torch
from transformers import PreTrainedModel

# The matrices that write into the residual stream, by the names GPT-2 and Llama's descendants have in transformers.
RESIDUAL_PROJECTIONS = ("c_proj.weight", "o_proj.weight", "down_proj.weight", "experts.down_proj")


@torch.no_grad()
def init_residual_projections(model: PreTrainedModel) -> None:
    """Draws the residual projections from N(0, initializer_range / sqrt(2 L)), from the global generator.

    Two of them per layer add to the residual stream, so its variance would grow with depth (Radford et al. 2019,
    section 2.3). transformers does this for GPT-2 in some versions only (not in 5.12) and draws all of a Llama's
    matrices from N(0, initializer_range); Megatron-LM (Shoeybi et al. 2019, section 4.1) and the Llama-shaped
    TinyLlama scale them as GPT-2 does. All other weights are transformers' own: N(0, initializer_range), norms 1,
    biases 0.
    """
    config = model.config.get_text_config()
    deviation = getattr(config, "initializer_range", 0.02) / (2 * config.num_hidden_layers) ** 0.5
    for name, parameter in model.named_parameters():
        if name.endswith(RESIDUAL_PROJECTIONS):
            parameter.normal_(0.0, deviation)
