"""An adapter merged into its base: one plain transformers model with the same logits."""

import copy

import torch
from peft import get_peft_model, get_peft_model_state_dict, set_peft_model_state_dict
from torch import Tensor, nn
from transformers import PreTrainedModel

from lmtrain.adapters import quantized
from lmtrain.adapters.memory import attach_memory
from lmtrain.adapters.memory_adapter import memory_of
from lmtrain.adapters.trainable import ATTRIBUTE, NAME, adapter_of
from lmtrain.models.scalar_head import auto_class, has_scalar_head


@torch.no_grad()
def merged(model: PreTrainedModel) -> PreTrainedModel:
    """The base with the adapter added in fp32. A model that isn't quantised is itself merged: not to be trained on.

    Added into 4-bit weights, the small update would be rounded away; so a quantised base is dequantised first.
    """
    adapter = adapter_of(model)
    if adapter is None:
        return _dequantized_twin(model) if quantized.is_quantized(model) else model
    if quantized.is_quantized(model):
        twin = _dequantized_twin(model)
        peft = get_peft_model(twin, copy.deepcopy(adapter.config))
        set_peft_model_state_dict(peft, get_peft_model_state_dict(adapter.peft, save_embedding_layers=False))
    else:
        twin, peft = model.float(), adapter.peft
    twin.__dict__.pop(ATTRIBUTE, None)
    plain = peft.merge_and_unload(adapter_names=[NAME])
    plain._hf_peft_config_loaded = False
    return plain


def _dequantized_twin(model: PreTrainedModel) -> PreTrainedModel:
    """The frozen base, without LoRA, in fp32 on the CPU; a memory stays in it."""
    config = copy.deepcopy(model.config)
    del config.quantization_config
    twin = auto_class(has_scalar_head(model)).from_config(config, dtype=torch.float32)
    settings = memory_of(model)
    if settings is not None:
        attach_memory(twin, settings)
    layers = dict(model.named_modules())
    state: dict[str, Tensor] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        owner, _, kind = name.rpartition(".")
        plain = name
        for wrapper in (".base_layer", ".original_module", ".token_adapter"):
            plain = plain.replace(wrapper, "")
        quantised = kind == "weight" and _is_bitsandbytes(layers[owner])
        state[plain] = quantized.dequantized(layers[owner]) if quantised else parameter.detach().cpu().float()
    own = twin.state_dict()
    twin.load_state_dict({name: state[name] for name in own if name in state}, strict=False)
    if hasattr(model, "generation_config"):  # of a scalar head there is none
        twin.generation_config = model.generation_config
    return twin


def _is_bitsandbytes(module: nn.Module) -> bool:
    return type(module.weight).__name__ in ("Params4bit", "Int8Params")
