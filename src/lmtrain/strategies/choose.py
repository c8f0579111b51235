"""Construction of the Lightning strategy for trainer.strategy, and of the precision for trainer.precision."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from lightning.pytorch import strategies
from lightning.pytorch.plugins.precision import HalfPrecision
from lightning.pytorch.strategies import Strategy
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from lmtrain.config.schema import Config, TrainerConfig
from lmtrain.config.strategies import outside_fp8
from lmtrain.models.feature import ADDED, Feature
from lmtrain.optim import half
from lmtrain.strategies.lightning_private import half_dtype
from lmtrain.strategies.placement import MapsCheckpoints
from lmtrain.strategies.sharding import MIXED

_HALF = ("bf16-true", "16-true")
_FP32_ROUTERS = ("ernie4_5_moe", "flint", "inkling_text")  # families whose routers multiply in fp32 under autocast


def build_strategy(t: TrainerConfig) -> str | Strategy:
    """Returns the strategy, or its Lightning name, for a config whose `auto` values are resolved.

    Raises:
        UserError: deepspeed is chosen but not installed, without CUDA, or with options it can't use.
    """
    if (t.strategy == "auto" or t.strategy.startswith("ddp")) and int(t.devices) * t.num_nodes > 1:
        # Gradients are views of the buckets; otherwise all gradients would be stored twice.
        return DDPStrategy(gradient_as_bucket_view=True, find_unused_parameters=t.strategy.endswith("_true"))
    if t.strategy in ("fsdp", "fsdp_tp"):
        from lmtrain.strategies.fsdp import FSDPStrategy, TensorParallelStrategy

        return FSDPStrategy(t) if t.strategy == "fsdp" else TensorParallelStrategy(t)
    if t.strategy == "deepspeed":
        from lmtrain.strategies.deepspeed import DeepSpeedStrategy

        return DeepSpeedStrategy(t)
    return t.strategy


class DDPStrategy(MapsCheckpoints, strategies.DDPStrategy):
    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        super().load_optimizer_state_dict(checkpoint)
        # State that stays in host memory (all of it, or only the step counts) is cloned: it would keep the whole file
        # mapped, which is removed once there are newer checkpoints.
        for state in (state for optimizer in self.optimizers for state in optimizer.state.values()):
            state |= {key: value.clone() for key, value in state.items() if isinstance(value, Tensor) and value.is_cpu}


def for_lightning(config: Config) -> tuple[str | None, list[HalfPrecision]]:
    """Returns the Trainer's `precision` and no plugin, or None and the precision plugin to use instead."""
    t = config.trainer
    if t.precision in _HALF and config.peft.method != "none":
        return None, [AdapterHalfPrecision(t.precision, t.accelerator)]
    return outside_fp8(t.precision), []


class Rounding(Feature):
    """Training in half or mixed precision: the plan's row on the bits that rounding cuts off."""

    def is_on(self, config: Config) -> bool:
        return outside_fp8(config.trainer.precision) in (*_HALF, *MIXED)

    def plan_rows(self, model: PreTrainedModel, config: Config) -> list[tuple[str, str]]:
        mixed = MIXED.get(outside_fp8(config.trainer.precision))
        if mixed is not None:
            some = [p[:8] for p in _multiplied(model) if config.trainer.strategy != "deepspeed" and not p.is_meta]
            found = any(bool(rows.any() & half.lies_on(rows, mixed)) for rows in some)
            text = (
                f"the weights begin as numbers of {str(mixed).removeprefix('torch.')}: before the first update random "
                "bits below its precision are added, so that small updates are not rounded away in products"
            )
            return [("rounding", text)] * found
        if config.trainer.strategy == "deepspeed":
            return [("rounding", "DeepSpeed updates copies of the weights in fp32 (4 bytes each)")]
        own = "" if config.peft.method == "none" else "; an adapter's own weights are in fp32"
        text = (
            "the 16 bits that rounding cuts off a weight are kept with the optimizer's state (2 bytes a trained "
            "weight) and updates are computed in fp32, so small ones are not lost; gradients are summed and "
            f"moments stored in half precision{own}"
        )
        return [("rounding", text)]


def _multiplied(model: PreTrainedModel) -> list[Tensor]:
    """Returns the trained weights that matrix products read: of linear layers, routers and stacks of experts.

    All others are read in fp32, and in full: tables, convolutions, and what layers multiply or add element by element,
    such as Mamba's A and RWKV's mixing. A table that is the output layer, too, is among the returned.
    """
    routers_too = model.config.get_text_config().model_type not in _FP32_ROUTERS
    found: list[Tensor] = []
    for module in model.modules():
        if isinstance(module, (nn.Embedding, _ConvNd)):
            continue
        linear = isinstance(module, (nn.Linear, Conv1D))
        for name, p in module.named_parameters(recurse=False):
            matrix = name == "weight" and p.ndim == 2 and (linear or routers_too)
            if p.requires_grad and (matrix or (p.ndim > 2 and min(p.shape) > 1)):
                found.append(p)
    looked_up = {m.weight for m in model.modules() if isinstance(m, nn.Embedding)}
    head = model.get_output_embeddings()
    return [p for p in dict.fromkeys(found) if p not in looked_up or (head is not None and p is head.weight)]


def fill_in(model: PreTrainedModel, precision: str) -> None:
    """Fills in the bits that a half-precision checkpoint lacks (optim/half.py) in mixed precision; called once.

    That is after the first gradient and before the first update, so that a reference model, the first validation and
    the first loss are those of the checkpoint's own weights. No product changes by it. Embeddings that are tied to the
    output layer are also looked up, in fp32: these change by at most half of the distance to the next number.
    """
    for place, parameter in enumerate(_multiplied(model) if precision in MIXED else ()):
        half.fill_in(parameter, place, MIXED[precision])


class AdapterHalfPrecision(HalfPrecision):
    """Lightning's bf16-true and 16-true, with an adapter's own weights kept in fp32.

    They are few, so this costs nothing, and small updates change what they compute from the first step on. Autocast
    still multiplies them in half precision: otherwise three of the four products of a LoRA would be fp32.
    """

    def __init__(self, precision: Any, device_type: str) -> None:
        super().__init__(precision)
        self.device_type = device_type

    @contextmanager
    def forward_context(self) -> Iterator[None]:
        # Cached casts would be stale after a step, and after a reference model's weights replace the trained ones.
        with super().forward_context(), torch.autocast(self.device_type, half_dtype(self), cache_enabled=False):
            yield

    def convert_module(self, module: nn.Module) -> nn.Module:
        kept = {p: p.data for n, p in module.named_parameters() if any(part in n for part in ADDED)}
        module = super().convert_module(module)
        for parameter, data in kept.items():
            parameter.data = data
        return module
