"""What trainer.precision means to Lightning; half precision for everything but the adapter's weights."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from lightning.pytorch.plugins.precision import HalfPrecision
from torch import nn

from lmtrain.config.schema import Config
from lmtrain.config.strategies import outside_fp8
from lmtrain.strategies.lightning_private import half_dtype

ADAPTERS = ("lora_", "trainable_tokens_delta", ".memory.", ".memory_bank.")  # in the names of their parameters


def for_lightning(config: Config) -> tuple[str | None, list[HalfPrecision]]:
    """The Trainer's `precision`, or None and the plugin in its place."""
    t = config.trainer
    if t.precision in ("bf16-true", "16-true") and config.peft.method != "none":
        return None, [AdapterHalfPrecision(t.precision, t.accelerator)]
    return outside_fp8(t.precision), []


class AdapterHalfPrecision(HalfPrecision):
    """Lightning's bf16-true and 16-true, with an adapter's own weights left in fp32.

    They are few, so this costs nothing; in half precision an update of a usual size would be rounded away. Autocast
    multiplies them in half precision all the same: else three of four products of a LoRA would be fp32.
    """

    def __init__(self, precision: Any, device_type: str) -> None:
        super().__init__(precision)
        self.device_type = device_type

    @contextmanager
    def forward_context(self) -> Iterator[None]:
        # Kept casts would be used on where a reference's weights take the place of the trained ones, and after a step.
        with super().forward_context(), torch.autocast(self.device_type, half_dtype(self), cache_enabled=False):
            yield

    def convert_module(self, module: nn.Module) -> nn.Module:
        kept = {p: p.data for n, p in module.named_parameters() if any(part in n for part in ADAPTERS)}
        module = super().convert_module(module)
        for parameter, data in kept.items():
            parameter.data = data
        return module
