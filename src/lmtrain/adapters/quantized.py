"""Frozen base models quantised to 4 bits (Dettmers et al. 2023, arXiv:2305.14314) or 8 (2022, arXiv:2208.07339)."""

import contextlib
import functools
import os
from typing import Any

import torch
from torch import Tensor, nn
from transformers import BitsAndBytesConfig, PreTrainedModel

from lmtrain.config.schema import PeftConfig
from lmtrain.config.strategies import SHARING
from lmtrain.errors import UserError, needing


def loading_options(cfg: PeftConfig, precision: str, accelerator: str, *, to_host: bool = False) -> dict[str, Any]:
    """Returns arguments of `from_pretrained` that quantise while loading; none if peft.quantization is null.

    Args:
        precision: trainer.precision; 4-bit weights are multiplied in its compute dtype.
        accelerator: cpu, cuda, ...: the device for quantised weights.
        to_host: puts quantised weights into host memory, wherever they are quantised (see `quantising`).
    """
    if cfg.quantization is None:
        return {}
    _require_bitsandbytes(cfg.quantization)
    if cfg.quantization == "int8":
        if accelerator == "cpu" and not multiplies_int8():
            why = "this CPU has no VNNI instructions, so products of 8-bit numbers overflow"
            raise UserError(f"peft.quantization=int8: {why}: set peft.quantization=nf4")
        config = BitsAndBytesConfig(load_in_8bit=True)
    else:
        config = BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type=cfg.quantization,
            bnb_4bit_use_double_quant=bool(cfg.double_quant),
            bnb_4bit_compute_dtype=compute_dtype(precision),
        )
    return {"quantization_config": config, "device_map": {"": "cpu" if to_host else _device(accelerator)}}


def _device(accelerator: str) -> str:
    return f"cuda:{os.environ.get('LOCAL_RANK', '0')}" if accelerator in ("cuda", "gpu") else accelerator


def quantising(cfg: PeftConfig, accelerator: str, to_host: bool) -> contextlib.AbstractContextManager[None]:
    """Returns a context in which a GPU does the 4-bit quantisation of weights for host memory.

    A CPU takes a minute per billion weights.
    """
    if cfg.quantization is None or not to_host or _device(accelerator) == "cpu":
        return contextlib.nullcontext()
    from lmtrain.adapters.packed import quantised_on

    return quantised_on(torch.device(_device(accelerator)))


def quantise_shapes(model: PreTrainedModel, loading: dict[str, Any]) -> None:
    """Converts a model on the meta device to bitsandbytes layers, as loading its weights would have.

    Args:
        loading: from `loading_options`; its quantisation applies unless the model's config.json has one.
    """
    stored = getattr(model.config, "quantization_config", None)
    config = stored or loading.get("quantization_config")
    if config is None or _method(config) != "bitsandbytes":
        return
    _require_bitsandbytes("nf4")
    from transformers.quantizers import AutoHfQuantizer

    from lmtrain.adapters.packed import pack_shapes

    quantizer: Any = AutoHfQuantizer.from_config(config, pre_quantized=stored is not None)
    quantizer.preprocess_model(model, device_map=None)
    quantizer.postprocess_model(model)
    pack_shapes(model)


def check_shared_out(model: PreTrainedModel, strategy: str) -> None:
    """Raises UserError if the files' weights are quantised in a way that trainer.strategy can't shard."""
    stored = getattr(model.config, "quantization_config", None)
    if stored is None or strategy not in SHARING:
        return
    in_4_bits = _method(stored) == "bitsandbytes" and _said(stored, "load_in_4bit")
    if strategy == "fsdp" and in_4_bits:
        return
    found = f"the weights of {model.config._name_or_path} are stored quantised ({_method(stored)})"
    instead = f"set trainer.strategy={'fsdp or ' if in_4_bits else ''}ddp"
    raise UserError(f"{found}, which does not go with trainer.strategy={strategy}: {instead}")


def _method(config: Any) -> Any:
    method = _said(config, "quant_method")  # the string of config.json, or a member of an enumeration
    return getattr(method, "value", method)


def _said(config: Any, name: str) -> Any:
    """Returns a field of a quantization_config, which is a dict if read from config.json, and an object after use."""
    return config.get(name) if isinstance(config, dict) else getattr(config, name, None)


@functools.cache
def multiplies_int8() -> bool:
    """Returns whether 8-bit matrix products on this CPU, as bitsandbytes computes them, are exact."""
    largest = torch.full((16, 64), 127, dtype=torch.int8)
    return bool((torch._int_mm(largest, largest.t()) == 64 * 127 * 127).all())


def compute_dtype(precision: str) -> torch.dtype:
    if precision.startswith("bf16"):
        return torch.bfloat16
    return torch.float16 if precision.startswith("16") else torch.float32


def _require_bitsandbytes(quantization: str) -> None:
    with needing("bitsandbytes", f"peft.quantization={quantization}"):
        import bitsandbytes  # noqa: F401


def make_trainable_on_cpu(model: nn.Module) -> None:
    """Keeps 4-bit layers differentiable on CPUs with AVX512-BF16.

    There, bitsandbytes repacks a layer's weights at its first forward without gradients, after which the layer passes
    no gradient to its input: training would stop learning after one validation. (Repacking also fails for widths that
    64 does not divide.)
    """
    module: Any
    for module in model.modules():
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = False


def is_quantized(model: PreTrainedModel) -> bool:
    return getattr(model, "quantization_method", None) is not None


def dequantized(module: nn.Module) -> Tensor:
    """Returns the fp32 weight, [out, in] on the CPU, that a bitsandbytes layer multiplies with."""
    from peft.utils.integrations import dequantize_bnb_weight

    weight = dequantize_bnb_weight(module.weight, state=getattr(module, "state", None))
    return weight.detach().to("cpu", torch.float32)
