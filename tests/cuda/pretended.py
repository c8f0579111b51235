"""A CUDA device that isn't there: torch.cuda's answers about it, and the attention kernels CUDA would use."""

import contextlib
from typing import Any
from unittest import mock

import torch

aten = torch.ops.aten


class _Generator:
    def manual_seed(self, seed: int) -> None: ...


class _Properties:
    """The properties of an H100 or H200, except for their memory."""

    name, total_memory, gcnArchName = "no device", 80 * 2**30, ""
    major, minor, warp_size, multi_processor_count = 9, 0, 32, 132
    regs_per_multiprocessor, max_threads_per_multi_processor, max_threads_per_block = 65536, 2048, 1024
    shared_memory_per_block, shared_memory_per_block_optin, L2_cache_size = 48 * 2**10, 227 * 2**10, 50 * 2**20


def pretend(capability: tuple[int, int] = (9, 0)) -> contextlib.ExitStack:
    """Patches torch.cuda's answers to what lmtrain, Lightning and torch ask about the device."""
    answers: dict[str, Any] = {
        "is_available": lambda: True,
        "device_count": lambda: 2,
        "current_device": lambda: 0,
        "set_device": lambda device: None,
        "get_device_name": lambda device=None: "no device",
        "get_device_capability": lambda device=None: capability,
        "get_device_properties": lambda device=None: _Properties,
        "is_bf16_supported": lambda including_emulation=True: capability >= (8, 0),
        "empty_cache": lambda: None,
        "max_memory_allocated": lambda device=None: 0,
        "default_generators": [_Generator()],
    }
    stack = contextlib.ExitStack()
    for name, answer in answers.items():
        stack.enter_context(mock.patch.object(torch.cuda, name, answer))
    return stack


def fused_attention(
    query: Any, key: Any, value: Any, attn_mask: Any = None, dropout_p: float = 0.0, is_causal: bool = False,
    scale: Any = None, enable_gqa: bool = False,
) -> Any:  # fmt: skip
    """Calls the kernel that CUDA takes: flash attention for half precision without a mask, else memory-efficient."""
    half = query.dtype in (torch.bfloat16, torch.float16)
    assert query.dtype == key.dtype == value.dtype
    if half and attn_mask is None:
        return aten._scaled_dot_product_flash_attention(query, key, value, dropout_p, is_causal, scale=scale)[0]
    assert not half or dropout_p, "flash attention could do this without a mask of [T, T]"
    assert not enable_gqa, "the memory-efficient kernel has no grouped heads: CUDA would compute all of [T, T]"
    if attn_mask is not None:
        assert not dropout_p or attn_mask.dtype == query.dtype, "torch would make what is added in every layer"
        attn_mask = torch.zeros_like(attn_mask, dtype=query.dtype).expand(*query.shape[:3], key.shape[2])
    return aten._scaled_dot_product_efficient_attention(
        query, key, value, attn_mask, torch.is_grad_enabled(), dropout_p, is_causal, scale=scale
    )[0]
