"""Merges a LoRA adapter into its base model."""

import copy
import re

import torch
from peft import get_peft_model, get_peft_model_state_dict, set_peft_model_state_dict
from torch import Tensor
from transformers import PreTrainedModel

from lmtrain.adapters import quantized
from lmtrain.adapters.memory import attach_memory
from lmtrain.adapters.memory_adapter import memory_of
from lmtrain.adapters.trainable import ATTRIBUTE, NAME, adapter_of
from lmtrain.models.scalar_head import auto_class, has_scalar_head
from lmtrain.models.wrapper import ATTRIBUTE as WRAPPER
from lmtrain.models.wrapper import wrapper_of


@torch.no_grad()
def merged(model: PreTrainedModel) -> PreTrainedModel:
    """Merges the adapter into the base in fp32; an unquantised model is changed in place and can't be trained further.

    A quantised base is dequantised first, since rounding 4-bit weights would lose the small update.
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
    return peft.merge_and_unload(adapter_names=[NAME])


def _dequantized_twin(model: PreTrainedModel) -> PreTrainedModel:
    """Returns a copy of the frozen base, without LoRA but with its memory, in fp32 on the CPU."""
    config = copy.deepcopy(model.config)
    del config.quantization_config
    twin = auto_class(has_scalar_head(model)).from_config(config, dtype=torch.float32)
    settings = memory_of(model)
    if settings is not None:
        attach_memory(twin, settings)
    layers = dict(model.named_modules())
    state: dict[str, Tensor] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        quantised = type(parameter).__name__ in ("Params4bit", "Int8Params")  # a bitsandbytes layer's weight
        plain = re.sub(r"\.(base_layer|original_module|token_adapter)", "", name)
        owner = name.rpartition(".")[0]
        state[plain] = quantized.dequantized(layers[owner]) if quantised else parameter.detach().cpu().float()
    twin.load_state_dict(state, strict=False)
    twin.__dict__[WRAPPER] = wrapper_of(model)
    if hasattr(model, "generation_config"):  # models with a scalar head have none
        twin.generation_config = model.generation_config
    return twin
