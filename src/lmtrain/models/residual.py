"""The layers that write into the residual stream: their initial weights, and dropout of what they write."""

from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from lmtrain.errors import UserError
from lmtrain.models.probe import DROPOUTS

# The matrices that write into the residual stream, by their names in transformers' families: GPT-2's; Llama's and its
# descendants', with stacked experts; OPT's and LFM2's attention; the feed-forward layers of nanochat and LFM2.
RESIDUAL_PROJECTIONS = (
    *("c_proj.weight", "o_proj.weight", "down_proj.weight", "experts.down_proj"),
    *("out_proj.weight", "fc2.weight", "feed_forward.w2.weight"),
)


@torch.no_grad()
def init_residual_projections(model: PreTrainedModel) -> None:
    """Draws the residual projections from N(0, initializer_range / sqrt(2 L)), using the global random generator.

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


def add_dropout(model: PreTrainedModel, share: float) -> None:
    """Adds dropout to the outputs of attention, convolutions and feed-forward layers, which enter the residual stream.

    Only for families that have no dropout of their own, such as LFM2. The added modules have no weights, so that
    checkpoints and exports are the same.
    """
    if share == 0 or any(hasattr(model.config.get_text_config(), name) for name in DROPOUTS):
        return
    names = [n.removesuffix(".weight") for n, _ in model.named_parameters() if n.endswith(RESIDUAL_PROJECTIONS)]
    if not names:
        raise UserError(f"model.dropout={share}: {model.config.model_type} has no dropout, and no layers to add it to")
    for name in names:
        module = model.get_submodule(name.rpartition(".")[0])
        module.add_module("residual_dropout", nn.Dropout(share))
        module.register_forward_hook(_drop)


def _drop(module: Any, _: Any, output: Any) -> Any:
    """Applies dropout to a module's output, or to the first of its outputs."""
    if isinstance(output, tuple):
        return (module.residual_dropout(output[0]), *output[1:])
    return module.residual_dropout(output)
