"""Half precision for everything but the adapter's weights."""

from lightning.pytorch.plugins.precision import HalfPrecision
from torch import nn


class AdapterHalfPrecision(HalfPrecision):
    """Lightning's bf16-true and 16-true, with an adapter's own weights left in fp32.

    They are few, so this costs nothing; in half precision an update of a usual size would be rounded away.
    """

    def convert_module(self, module: nn.Module) -> nn.Module:
        kept = {p: p.data for n, p in module.named_parameters() if "lora_" in n or "trainable_tokens_delta" in n}
        module = super().convert_module(module)
        for parameter, data in kept.items():
            parameter.data = data
        return module
