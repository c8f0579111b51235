"""Frozen bases stored in 4 bits (Dettmers et al. 2023, arXiv:2305.14314) or 8 (2022, arXiv:2208.07339)."""

import functools
import os
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from lmtrain.config.schema import PeftConfig
from lmtrain.errors import UserError


def loading_options(cfg: PeftConfig, precision: str, accelerator: str) -> dict[str, Any]:
    """Arguments of `from_pretrained` that quantise while loading; none where peft.quantization is null.

    Args:
        precision: trainer.precision; 4-bit weights are multiplied in its compute dtype.
        accelerator: cpu, cuda, ...: weights are quantised where they will be used.
    """
    if cfg.quantization is None:
        return {}
    _require_bitsandbytes(cfg.quantization)
    from transformers import BitsAndBytesConfig

    if cfg.quantization == "int8":
        if accelerator == "cpu" and not multiplies_int8():
            raise UserError(
                "peft.quantization=int8: this CPU's products of 8-bit numbers overflow (it has no VNNI instructions, "
                "and oneDNN saturates sums of 16 bits): set peft.quantization=nf4"
            )
        config = BitsAndBytesConfig(load_in_8bit=True)
    else:
        config = BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type=cfg.quantization,
            bnb_4bit_use_double_quant=bool(cfg.double_quant),
            bnb_4bit_compute_dtype=compute_dtype(precision),
        )
    device = f"cuda:{os.environ.get('LOCAL_RANK', '0')}" if accelerator in ("cuda", "gpu") else accelerator
    return {"quantization_config": config, "device_map": {"": device}}


@functools.cache
def multiplies_int8() -> bool:
    """Whether 8-bit matrix products on this CPU, as bitsandbytes makes them, are exact."""
    largest = torch.full((16, 64), 127, dtype=torch.int8)
    return bool((torch._int_mm(largest, largest.t()) == 64 * 127 * 127).all())


def compute_dtype(precision: str) -> torch.dtype:
    if precision.startswith("bf16"):
        return torch.bfloat16
    return torch.float16 if precision.startswith("16") else torch.float32


def _require_bitsandbytes(quantization: str) -> None:
    try:
        import bitsandbytes  # noqa: F401
    except ImportError as error:
        raise UserError(
            f'peft.quantization={quantization} needs bitsandbytes ({error}): pip install "lmtrain[bitsandbytes]"'
        ) from None


def make_trainable_on_cpu(model: nn.Module) -> None:
    """Keeps 4-bit layers differentiable on CPUs with AVX512-BF16.

    There, bitsandbytes repacks a layer's weights at its first forward without gradients, after which the layer gives
    its input no gradient any more: one validation would end all learning. (Widths that don't divide by 64 fail in it.)
    """
    module: Any
    for module in model.modules():
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = False


def is_quantized(model: PreTrainedModel) -> bool:
    return getattr(model, "quantization_method", None) is not None


def dequantized(module: nn.Module) -> Tensor:
    """The fp32 weight, [out, in] on the CPU, that a bitsandbytes layer multiplies with."""
    from peft.utils.integrations import dequantize_bnb_weight

    weight = dequantize_bnb_weight(module.weight, state=getattr(module, "state", None))
    return weight.detach().to("cpu", torch.float32)
