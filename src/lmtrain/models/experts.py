"""A mixture's experts under autocast: transformers' grouped matrix product, in half precision.

transformers sorts tokens by expert and multiplies all experts in one grouped product, which autocast doesn't know: with
fp32 parameters it would run in fp32, at a quarter of the speed or less. Here its weights are cast first.
"""

from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS, grouped_mm_experts_forward

NAME = "lmtrain"


class _Cast:
    """An experts module whose parameters come in another dtype."""

    def __init__(self, experts: nn.Module, dtype: torch.dtype) -> None:
        self.experts, self.dtype = experts, dtype

    def __getattr__(self, name: str) -> Any:
        value = getattr(self.experts, name)
        return value.to(self.dtype) if isinstance(value, nn.Parameter) else value


def experts_forward(experts: nn.Module, hidden: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """transformers' experts interface: hidden [N, D], top_k_index and top_k_weights [N, k]; returns [N, D]."""
    device = hidden.device.type
    if not torch.is_autocast_enabled(device):
        return grouped_mm_experts_forward(experts, hidden, top_k_index, top_k_weights)
    cast: Any = _Cast(experts, torch.get_autocast_dtype(device))
    return grouped_mm_experts_forward(cast, hidden, top_k_index, top_k_weights)


ALL_EXPERTS_FUNCTIONS.register(NAME, experts_forward)


def use_experts(model: PreTrainedModel) -> None:
    """Puts `experts_forward` in, where the model has experts in transformers' grouped layout."""
    if any(hasattr(m, "_apply_gate") and hasattr(m, "has_gate") for m in model.modules()):
        model.set_experts_implementation(NAME)
