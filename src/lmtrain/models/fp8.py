"""trainer.precision=fp8: wide linear layers of the decoder blocks multiply in 8 bits, all else is as in bf16-mixed.

The layers are torchao's Float8Linear: inputs, weights and output gradients are scaled by their largest value and
rounded to 8 bits for each product. Parameters stay in fp32 and keep their names.
"""

import dataclasses
import importlib.util
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from lmtrain.config.batch import row_lengths
from lmtrain.config.schema import FP8, Config, TrainerConfig
from lmtrain.config.schema_data import DataConfig
from lmtrain.errors import UserError
from lmtrain.models.blocks import decoder_blocks
from lmtrain.models.feature import ADDED, Feature
from lmtrain.models.flops import flops_per_token

MULTIPLE = 16  # both dimensions of a matrix that is multiplied in 8 bits must be multiples of this
INSTEAD = "set trainer.precision=bf16-mixed"
# Name parts of the layers that stay in bf16: LoRA, memories and routers, which are small but sensitive to rounding.
_KEPT = (*ADDED, ".gate.", ".router.")


class Fp8(Feature):
    """The feature trainer.precision=fp8."""

    def is_on(self, config: Config) -> bool:
        return config.trainer.precision == FP8

    def check_machine(self, config: Config) -> None:
        obstacle = why_not(config.trainer)
        if obstacle is not None:
            raise UserError(f"trainer.precision=fp8: {obstacle}")

    def change_model(self, model: PreTrainedModel, config: Config) -> None:
        """Converts the linear layers that become faster in 8 bits to torchao's Float8Linear, in place.

        Raises:
            UserError: no layer would become faster, or this machine can't multiply in 8 bits.
        """
        self.check_machine(config)
        float8, gains = _torchao(), _gains(config.trainer.fp8_recipe)
        options = recipe(config)
        for block in decoder_blocks(model):
            float8.convert_to_float8_training(block, module_filter_fn=gains, config=options)
        if not converted(model):
            raise UserError(f"trainer.precision=fp8: {_why_none(model)}: {INSTEAD}")

    def restore_model(self, model: PreTrainedModel) -> None:
        """Turns the layers back into ordinary linear layers: the export is compared with this model in fp32."""
        for layer in converted(model).values():
            layer.__class__ = nn.Linear  # the module objects stay, since sharding and compilation refer to them

    def plan_rows(self, model: PreTrainedModel, config: Config) -> list[tuple[str, str]]:
        return [("fp8", describe(model, config))]

    def advice(self, run: Any) -> list[str]:
        if run.config.trainer.compile:
            return []
        return ["trainer.precision=fp8 without torch.compile is usually slower than bf16: set trainer.compile=true"]

    def speed(self, config: Config) -> dict[str, str]:
        return {"precision": f"{FP8} {config.trainer.fp8_recipe}"}


def why_not(t: TrainerConfig) -> str | None:
    """Returns why this machine can't multiply in 8 bits, with advice, or None if it can."""
    if t.accelerator != "cuda":
        return f"a CPU does not multiply in 8 bits: {INSTEAD}"
    if importlib.util.find_spec("torchao") is None:
        return f'torchao is not installed: pip install "lmtrain[fp8]", or {INSTEAD}'
    major, minor = torch.cuda.get_device_capability()
    if (major, minor) < (8, 9):
        return f"it needs a GPU of compute capability 8.9 or newer (here {major}.{minor}): {INSTEAD}"
    return None


def recipe(config: Config) -> Any:
    """Returns torchao's Float8LinearConfig for trainer.fp8_recipe."""
    options = _torchao().Float8LinearConfig.from_recipe_name(config.trainer.fp8_recipe)
    # A weight's gradient is a product that sums over tokens, so their number must be a multiple of 16 as well, or be
    # padded with zeros.
    return dataclasses.replace(options, pad_inner_dim=not _in_multiples(config.data))


def converted(model: nn.Module) -> dict[str, nn.Linear]:
    """Returns the layers that multiply in 8 bits, by name."""
    kind = _torchao().float8_linear.Float8Linear
    return {name: module for name, module in model.named_modules() if isinstance(module, kind)}


def describe(model: PreTrainedModel, config: Config) -> str:
    """Describes which layers multiply in 8 bits, their share of a token's FLOPs, and which layers stay in bf16."""
    inside, layers = converted(model), linear_layers(model)
    outside = {n: m for n, m in layers.items() if n not in inside}
    weights_in_bf16 = config.trainer.fp8_recipe == "rowwise_with_gw_hp"
    products = {m.weight: 6 if m.weight.requires_grad and not weights_in_bf16 else 4 for m in inside.values()}
    flops = sum(weight.numel() * times for weight, times in products.items())
    share = flops / flops_per_token(model, config.data.seq_len)
    rest = f"; in bf16: {_kinds(outside)}, where 8 bits gain nothing" if outside else ""
    number = f"{len(inside)} of {len(layers)} linear layers of the blocks"
    return f"{config.trainer.fp8_recipe}, {number}: {_kinds(inside)}, {share:.0%} of the FLOPs{rest}"


def linear_layers(model: PreTrainedModel) -> dict[str, nn.Linear]:
    """Returns the linear layers of the decoder blocks by name, without LoRA, memories and routers."""
    names = {id(m): n for n, m in model.named_modules()}
    found = [m for block in decoder_blocks(model) for m in block.modules() if isinstance(m, nn.Linear)]
    return {names[id(m)]: m for m in found if not _is_kept(names[id(m)])}


def _gains(recipe_name: str) -> Any:
    """Returns a filter (module, name within its block) -> whether torchao's thresholds predict a speedup for it."""
    measured = "rowwise" if recipe_name.startswith("rowwise") else recipe_name  # the recipes torchao has thresholds for
    wide = _torchao()._auto_filter_for_recipe(measured, [])
    return lambda module, name: type(module) is nn.Linear and not _is_kept(f".{name}") and wide(module, name)


def _is_kept(name: str) -> bool:
    return any(part in f"{name}." for part in _KEPT)


def _why_none(model: PreTrainedModel) -> str:
    layers = linear_layers(model)
    if not layers:
        return f"the blocks of {type(model).__name__} have no nn.Linear, which is what torchao converts"
    widest = max(layers.values(), key=lambda m: m.weight.numel())
    size = f"{widest.in_features} inputs and {widest.out_features} outputs (both have to be multiples of {MULTIPLE})"
    return f"none of the {len(layers)} linear layers of the blocks gains by it, of which the largest has {size}"


def _kinds(layers: dict[str, nn.Linear]) -> str:
    """Lists the distinct last parts of the layers' names, such as 'q_proj, o_proj'."""
    return ", ".join(dict.fromkeys(n.removesuffix(".base_layer").rpartition(".")[2] for n in layers))


def _in_multiples(data: DataConfig) -> bool:
    """Returns whether the number of tokens in every micro-batch is a multiple of 16."""
    lengths = row_lengths(data)
    values = [data.seq_len] if lengths is None else lengths.values
    return data.rows == "text" and data.packing != "off" and all(length % MULTIPLE == 0 for length in values)


def _torchao() -> Any:
    import torchao.float8  # an optional dependency, which takes a second to import

    return torchao.float8
