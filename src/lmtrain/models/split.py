"""Tensor parallelism: splits a model's layers over the ranks of a group, which read the same rows.

A layer split by columns gives each rank a part of its outputs; the layer after it, split by rows, takes that part and
sums over the group. In between, a rank has its attention heads, or its part of the feed-forward width (Megatron-LM,
Shoeybi et al. 2019, arXiv:1909.08053). Embeddings and norms are replicated and compute the same on every rank. The
output layer is replicated too, but each rank computes the logits and the loss of its share of the tokens only
(language_model.py). With sequence parallelism a rank also holds only its share of the tokens between the split layers
(`TokenShares`).

The pairs of layers come from transformers (`base_model_tp_plan` of a family's config); the plan of GPT-2, whose
queries, keys and values are one matrix, is defined here. Split parameters are DTensors; each rank computes with its
own part.
"""

import re
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import SequenceParallel, parallelize_module
from torch.distributed.tensor.placement_types import Placement, _StridedShard
from torch.nn import functional as F
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from lmtrain.config.strategies import torch_is_at_least
from lmtrain.distributed.dtensor import laid_out
from lmtrain.errors import UserError
from lmtrain.models.language_model import attention_dropout

# A packed layer's outputs are BLOCKS blocks side by side (queries, keys, values), each of which is split.
PACKED, BLOCKS = "packed_colwise", 3
# torch 2.11 can't gather a tensor that is split by blocks.
GATHERS_BLOCKS = torch_is_at_least(2, 13)
COLUMNS, ROWS = ("colwise", PACKED, "colwise_gather_output"), ("rowwise", "rowwise_split_input")
PER_HEAD_NORM = "replicated_with_grad_allreduce"
_GPT2 = {"attn.c_attn": PACKED, "attn.c_proj": "rowwise", "mlp.c_fc": "colwise", "mlp.c_proj": "rowwise"}
OWN_PLANS = {"gpt2": {f"h.*.{name}": style for name, style in _GPT2.items()}}
Layer = Any  # nn.Linear, or GPT-2's Conv1D, whose weight is transposed
INSTEAD = "Set trainer.strategy=fsdp, which shares out any model"
TOKENS = Shard(1)  # splits [B, T, D] by tokens


class TokenShares:
    """Sequence parallelism: splits the tokens of the current rows over the ranks of a group, in shares of equal size.

    Norms and the residual stream, otherwise replicated on all ranks, hold T / ranks of the tokens (Korthikanti et al.
    2022, arXiv:2205.05198). Attention and feed-forward layers gather the tokens at their start, and at their end a
    reduce-scatter gives each rank its share instead of an all-reduce: the traffic is the same as without.
    """

    def __init__(self, mesh: DeviceMesh) -> None:
        self.mesh = mesh
        self.count = 0  # T, without the zeros that pad the last shares

    def padded(self, x: Tensor) -> Tensor:
        """Pads x [B, T, D] with zeros at the end, to a multiple of the number of ranks."""
        return F.pad(x, (0, 0, 0, -self.count % self.mesh.size()))

    def share(self, x: Tensor) -> Tensor:
        """Returns this rank's tokens of x [B, T, D], which all ranks have; all ranks get the full gradient of x."""
        self.count = x.shape[1]
        return laid_out(self.padded(x), self.mesh, Replicate(), TOKENS)

    def whole(self, x: Tensor) -> Tensor:
        """Gathers all tokens, for replicated computation, whose gradient is the same on all ranks."""
        return laid_out(x, self.mesh, TOKENS, Replicate())[:, : self.count]

    def gathered(self, x: Tensor) -> Tensor:
        """Gathers all tokens, for split layers, where each rank's gradient is a partial sum."""
        lying = DTensor.from_local(x, self.mesh, [TOKENS], run_check=False).redistribute(self.mesh, [Replicate()])
        return lying.to_local(grad_placements=[Partial()])[:, : self.count]

    def summed(self, x: Tensor) -> Tensor:
        """Returns this rank's tokens of the sum of x [B, T, D] over the ranks."""
        return laid_out(self.padded(x), self.mesh, Partial(), TOKENS)

    def enter(self, block: nn.Module) -> None:
        """Makes the first block start from this rank's tokens."""
        block.register_forward_pre_hook(partial(_change_hidden, self.share), with_kwargs=True)

    def leave(self, block: nn.Module) -> None:
        """Makes the last block return all tokens."""
        block.register_forward_hook(lambda _block, _args, output: _change_output(self.whole, output))

    def split(self, block: nn.Module, layers: Iterable[nn.Module]) -> None:
        """Makes the parts of a block that have split layers gather their tokens; norms run on this rank's tokens."""
        split = set(layers)
        for part in list(block.children()):
            if any(module in split for module in part.modules()):
                part.register_forward_pre_hook(partial(_change_hidden, self.gathered), with_kwargs=True)
            elif any(True for _ in part.parameters()):
                split_norm(part, self.mesh, sequence_dim=1)


def split(part: nn.Module, layers: dict[nn.Module, str], mesh: DeviceMesh, tokens: TokenShares | None = None) -> None:
    """Splits those of a model's `layers` (from `check`) that are in `part`, in place; parameters become DTensors.

    Args:
        part: a module with full parameters.
        mesh: one-dimensional.
        tokens: given if each rank holds only its share of the tokens between the split layers.
    """
    if tokens is not None:
        tokens.split(part, layers)
    for parent in list(part.modules()):
        for module in list(parent.children()):
            style = layers.get(module)
            if style == PER_HEAD_NORM:
                split_norm(module, mesh, sequence_dim=2)  # normalizes single heads, of which each rank has some
            elif style is not None:
                (_split_adapted if is_adapted(module) else _split_layer)(module, style, mesh, tokens)
            if style == PACKED:  # GPT-2 splits the output of c_attn into pieces of this width
                attn: Any = parent
                attn.split_size //= mesh.size()


def check(model: PreTrainedModel, size: int) -> dict[nn.Module, str]:
    """Returns the modules to split over `size` ranks, with their styles; only shapes are checked, no weights.

    Raises:
        UserError: the family has no plan, or one that isn't supported; `size` does not divide widths or heads; there
            is dropout on attention weights, or an adapter that can't be split.
    """
    config = model.config.get_text_config()
    family, key = config.model_type, f"trainer.strategy=fsdp_tp with tensor_parallel_size={size}"
    plan = _plan(model)
    styles = {name: plan.get(re.sub(r"\.\d+(?=\.)", ".*", name)) for name, _ in model.base_model.named_modules()}
    layers = {f"{model.base_model_prefix}.{name}": style for name, style in styles.items() if style is not None}
    local = {name for name, style in layers.items() if style in ("colwise", PACKED)}
    if not layers:
        raise UserError(f"trainer.strategy=fsdp_tp: there is no plan to split the family {family}. {INSTEAD}")
    for name in {name.rpartition(".")[0] for name in local}:
        for parameter, _ in model.get_submodule(name).named_parameters(prefix=name):
            if not any(parameter.startswith(f"{layer}.") for layer in layers):
                raise UserError(f"trainer.strategy=fsdp_tp: it is not known how to split {parameter}. {INSTEAD}")
    if any(name.rpartition(".")[2] in ("c_attn", "q_proj", "query_key_value") for name in local):
        for what in ("num_attention_heads", "num_key_value_heads"):
            count = getattr(config, what, None)
            if count is not None and count % size:
                raise UserError(f"{key}: {family}'s {what}={count} is not a multiple of it. {divisors(count)}")
        if attention_dropout(config) > 0:
            own = "attn_pdrop" if hasattr(config, "attn_pdrop") else "attention_dropout"
            why = "dropout on attention weights would use the same mask for the heads of all devices of a group"
            raise UserError(f"{key}: {why}. Set model.dropout=0, or only +model.extra.{own}=0")
    for name, style in layers.items():
        if style != PER_HEAD_NORM:
            _check_layer(model.get_submodule(name), name, style, size)
    return {model.get_submodule(name): style for name, style in layers.items()}


def check_tokens(model: PreTrainedModel) -> None:
    """Raises UserError if the model does not support trainer.fsdp.sequence_parallel."""
    key, off = "trainer.fsdp.sequence_parallel=true", "set trainer.fsdp.sequence_parallel=false"
    if any(is_adapted(module) for module in model.modules()):
        raise UserError(f"{key} does not go with LoRA, whose matrices are not split: {off}")
    if any(isinstance(module, nn.Dropout) and module.p > 0 for module in model.modules()):
        raise UserError(f"{key}: each rank draws dropout for its slice of tokens. Set model.dropout=0, or {off[4:]}")


def _plan(model: PreTrainedModel) -> dict[str, str]:
    """Returns the split styles by module name within the base model, with `*` for a block's number; blocks only."""
    config = model.config.get_text_config()
    plan = OWN_PLANS.get(config.model_type) or getattr(config, "base_model_tp_plan", None) or {}
    plan = {name: style for name, style in plan.items() if ".*." in name}
    if any(".experts" in name or name.endswith(".gate") for name in plan):
        raise UserError(f"trainer.strategy=fsdp_tp does not split a mixture of experts. {INSTEAD}")
    unknown = sorted(set(plan.values()) - {*COLUMNS, *ROWS, PER_HEAD_NORM})
    if unknown:
        found = f"transformers' plan for the family {config.model_type} has {', '.join(unknown)}"
        raise UserError(f"trainer.strategy=fsdp_tp: {found}. {INSTEAD}")
    return plan


def _check_layer(module: nn.Module, name: str, style: str, size: int) -> None:
    if is_adapted(module) and (getattr(module, "lora_variant", None) or any(vars(module).get("use_dora", {}).values())):
        raise UserError(f"trainer.strategy=fsdp_tp can't split DoRA: set peft.use_dora=false, or {INSTEAD[4:]}")
    layer: Layer = module.base_layer if is_adapted(module) else module
    if type(layer) not in (nn.Linear, Conv1D):
        found = f"trainer.strategy=fsdp_tp splits linear layers, and {name} is a {type(layer).__name__}"
        raise UserError(f"{found}: leave it out of peft.modules_to_save and the like. {INSTEAD}")
    outputs, inputs = layer.weight.T.shape if isinstance(layer, Conv1D) else layer.weight.shape
    width = inputs if style in ROWS else outputs // BLOCKS if style == PACKED else outputs
    if width % size:
        what = "inputs" if style in ROWS else "outputs"
        raise UserError(f"tensor_parallel_size={size} does not divide the {width} {what} of {name}. {divisors(width)}")


def divisors(count: int) -> str:
    """Returns advice for a group size that does not divide `count`."""
    fits = [d for d in range(2, min(count, 64) + 1) if count % d == 0]
    if not fits:
        return INSTEAD
    return f"Set trainer.fsdp.tensor_parallel_size to {' or '.join(map(str, fits))}, or trainer.strategy=fsdp"


def is_adapted(module: nn.Module) -> bool:
    """Returns whether the module is a layer with LoRA."""
    return isinstance(getattr(module, "lora_A", None), nn.ModuleDict)


def _split_adapted(module: Any, style: str, mesh: DeviceMesh, tokens: TokenShares | None) -> None:
    """Splits a layer with LoRA: B with the layer's columns, or A with its rows; the other matrix stays replicated."""
    _split_layer(module.base_layer, style, mesh, tokens)
    for name in module.lora_A:
        _split_layer((module.lora_B if style in COLUMNS else module.lora_A)[name], style, mesh, tokens)
        dropout = module.lora_dropout[name]
        if style == "rowwise" and isinstance(dropout, nn.Dropout):
            dropout.forward = partial(_own_part_of_dropout, dropout, mesh)  # type: ignore[method-assign]


def _own_part_of_dropout(dropout: nn.Dropout, mesh: DeviceMesh, x: Tensor) -> Tensor:
    """Draws the full dropout mask on every rank and applies this rank's part of it.

    So the ranks' random generators stay in the same state, and the parts differ between ranks.
    """
    if not dropout.training:
        return x
    width = x.shape[-1]
    factors = F.dropout(x.new_ones(*x.shape[:-1], width * mesh.size()), dropout.p)
    return x * factors.narrow(-1, mesh.get_local_rank() * width, width)


def _split_layer(layer: Layer, style: str, mesh: DeviceMesh, tokens: TokenShares | None = None) -> None:
    """Splits the parameters of one layer, and replaces its forward with one that uses this rank's part of them."""
    transposed = isinstance(layer, Conv1D)
    if style in ROWS:
        _distribute(layer, "weight", mesh, Shard(0 if transposed else 1))
        if tokens is not None:
            _distribute(layer, "bias", mesh, Replicate())
    elif style == PACKED:
        # FSDP shards the first dimension, and can't shard one that is split by blocks already: it is replicated then.
        by_blocks = transposed and GATHERS_BLOCKS
        _distribute(layer, "weight", mesh, _StridedShard(1, split_factor=BLOCKS) if by_blocks else Replicate())
        _distribute(layer, "bias", mesh, Replicate())
    else:
        _distribute(layer, "weight", mesh, Shard(1 if transposed else 0))
        _distribute(layer, "bias", mesh, Shard(0))
    compute: Callable[..., Tensor] = by_rows if style in ROWS else by_columns
    layer.forward = partial(compute, layer, style, mesh, tokens)


def _distribute(layer: nn.Module, name: str, mesh: DeviceMesh, placement: Placement) -> None:
    """Makes a parameter a DTensor; every rank takes its part from its own full copy, without communication."""
    parameter = getattr(layer, name)
    if parameter is not None:
        parts = distribute_tensor(parameter.detach(), mesh, [placement], src_data_rank=None)
        layer.register_parameter(name, nn.Parameter(parts, requires_grad=parameter.requires_grad))


def by_columns(layer: Layer, style: str, mesh: DeviceMesh, tokens: TokenShares | None, x: Tensor) -> Tensor:
    """Computes this rank's part of the outputs, [..., outputs / ranks], or with colwise_gather_output all of them."""
    if tokens is None:  # otherwise TokenShares.gathered does this
        # Each rank's gradient of the input is a partial sum, which the backward sums over the ranks.
        x = DTensor.from_local(x, mesh, [Replicate()], run_check=False).to_local(grad_placements=[Partial()])
    outputs = 1 if isinstance(layer, Conv1D) else 0  # the dimension of the weight
    y = _product(layer, x, _own_part(layer.weight, outputs), _own_part(layer.bias, 0))
    return laid_out(y, mesh, Shard(-1), Replicate()) if style == "colwise_gather_output" else y


def by_rows(layer: Layer, style: str, mesh: DeviceMesh, tokens: TokenShares | None, x: Tensor) -> Tensor:
    """Computes all outputs from this rank's part of the inputs (with rowwise_split_input, x is the full input).

    With `tokens` the outputs are those of this rank's tokens only.
    """
    if style == "rowwise_split_input":
        x = laid_out(x, mesh, Replicate(), Shard(-1))
    y = _product(layer, x, layer.weight.to_local(), None)
    if tokens is None:
        y = laid_out(y, mesh, Partial(), Replicate())
        return y if layer.bias is None else y + layer.bias.to(y.dtype)
    y = tokens.summed(y)
    return y if layer.bias is None else y + layer.bias.to_local(grad_placements=[Partial()]).to(y.dtype)


def _own_part(parameter: Any, dim: int) -> Any:
    """Returns this rank's part of a parameter split by columns, or its part of each block of a replicated one.

    None gives None. dim: the dimension of outputs.
    """
    if parameter is None:
        return None
    if not isinstance(parameter.placements[0], Replicate):
        return parameter.to_local()
    mesh = parameter.device_mesh
    blocks = parameter.to_local(grad_placements=[Partial()]).unflatten(dim, (BLOCKS, mesh.size(), -1))
    return blocks.select(dim + 1, mesh.get_local_rank()).flatten(dim, dim + 1)


def _product(layer: Layer, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    if not isinstance(layer, Conv1D):
        return F.linear(x, weight, bias)
    flat = x.reshape(-1, x.shape[-1])
    y = flat @ weight if bias is None else torch.addmm(bias, flat, weight)
    return y.view(*x.shape[:-1], weight.shape[1])


def split_norm(module: nn.Module, mesh: DeviceMesh, sequence_dim: int) -> None:
    """Makes a norm run on this rank's part of dimension `sequence_dim`; its weight's gradient is summed over ranks."""
    frozen = {name for name, p in module.named_parameters() if not p.requires_grad}
    parallelize_module(module, mesh, SequenceParallel(sequence_dim=sequence_dim, use_local_output=True))
    for name, p in module.named_parameters():
        p.requires_grad_(name not in frozen)


def _change_hidden(change: Any, _module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Changes the hidden states among a module's arguments: the first argument, or the keyword `hidden_states`."""
    if args and isinstance(args[0], Tensor):
        return (change(args[0]), *args[1:]), kwargs
    return args, kwargs | {"hidden_states": change(kwargs["hidden_states"])}


def _change_output(change: Any, output: Any) -> Any:
    return (change(output[0]), *output[1:]) if isinstance(output, tuple) else change(output)
