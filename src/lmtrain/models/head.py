"""What the loss multiplies hidden states with: the output embedding, adapters on it included."""

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel


def output_head(model: PreTrainedModel, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
    """(hidden [..., D'], weight [V, D'], bias [V] or None) whose `hidden @ weight.T + bias` are the model's logits.

    D' is the model's width D, so `hidden` comes back as it went in, unless LoRA adapts the output layer: its logits are
    W h + s B A dropout(h), one product of [h, A dropout(h)] with [W, s B]. A trained copy of the layer
    (peft.modules_to_save) and single trained rows (new tokens) come through peft's own `weight`.

    Args:
        hidden: last hidden states, [..., D].
    """
    head = model.get_output_embeddings()
    bias = getattr(head, "bias", None)
    if not isinstance(getattr(head, "lora_A", None), nn.ModuleDict) or head.disable_adapters:
        return hidden, head.weight, bias
    inputs, weights = [hidden], [head.weight]
    for name in head.active_adapters:
        lora_a = head.lora_A[name]
        inputs.append(lora_a(head.lora_dropout[name](hidden.to(lora_a.weight.dtype))))
        weights.append(head.scaling[name] * head.lora_B[name].weight)
    return torch.cat(inputs, dim=-1), torch.cat(weights, dim=1), bias  # [..., D + r], [V, D + r]
