"""Estimates of a model's cost before it runs (parameters, FLOPs, memory), and the peak FLOP/s of devices."""

import inspect
import re
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from lmtrain.config import safe_yaml
from lmtrain.config.options import arguments_of
from lmtrain.config.schema import Config
from lmtrain.config.strategies import context_parallel, engine_config, outside_fp8, ranks_per_part, tensor_parallel
from lmtrain.config.targets import building, find_class
from lmtrain.models.blocks import decoder_blocks, untied_layers
from lmtrain.models.language_model import auto_chunk_bytes

# DeepSpeed's defaults, in elements: gradients reduced at a time, and parameters kept gathered under ZeRO-3.
ZERO_BUCKET, ZERO_LIVE = 5e8, 1e9

# Two tables of devices: peak TFLOP/s by the name that torch gives, and memory by the name in estimate.device.
DEVICES: dict[str, Any] = safe_yaml.table(__file__, "devices.yaml")


def parameter_counts(model: nn.Module) -> tuple[int, int, int]:
    """Returns the numbers of parameters (all, trained, in embeddings); tied weights count once, 4-bit ones unpacked."""
    parameters = list(model.parameters())
    tables = {id(m.weight): m.weight.numel() for m in model.modules() if isinstance(m, nn.Embedding)}
    trained = sum(p.numel() for p in parameters if p.requires_grad)
    return sum(numel(p) for p in parameters), trained, sum(tables.values())


def numel(parameter: nn.Parameter) -> int:
    """Returns the number of weights in a parameter; a 4-bit one stores two per byte."""
    state = getattr(parameter, "quant_state", None)
    return state.shape.numel() if state is not None else parameter.numel()


def flops_per_token(model: PreTrainedModel, seq_len: int) -> float:
    """Returns forward and backward FLOPs per trained token, `6 N + 12 L H Q T` (PaLM, Chowdhery et al. 2022, app. B).

    N counts the parameters a token is multiplied with: not embeddings that are only looked up, but a tied output
    embedding; of a mixture the chosen experts; of a memory the chapters read after each layer. Attention is counted
    over all T keys, as is the convention for MFU, although the masked half of it is not computed; nothing is added for
    recomputed activations. A frozen parameter is used in the forward and in its input's gradient only, so it counts 4
    instead of 6.
    """
    config = model.config.get_text_config()
    total, trained, tables = parameter_counts(model)
    in_memory, trained_in_memory = _chapter_parameters(model)
    total, trained = total + in_memory, trained + trained_in_memory
    multiplied = total - tables - _idle_expert_parameters(model)
    if getattr(config, "tie_word_embeddings", False):
        multiplied += model.get_input_embeddings().weight.numel()
    per_parameter = 6.0 if trained == total else 4.0 + 2.0 * trained / total
    return per_parameter * multiplied + 12.0 * _attention_width(model) * seq_len


def _attention_widths(config: Any) -> tuple[int, int]:
    """Returns the widths of all heads of (queries, keys), (0, 0) if there are none; the first may differ from D.

    With latent attention (DeepSeek), whose values have another width than queries and keys, it is the mean of both.
    """
    heads = getattr(config, "num_attention_heads", None)
    if not isinstance(heads, int) or heads == 0:
        return 0, 0
    width = getattr(config, "head_dim", None) or config.hidden_size // heads
    if getattr(config, "qk_head_dim", None) and getattr(config, "v_head_dim", None):
        width = (config.qk_head_dim + config.v_head_dim) // 2
    return heads * width, (getattr(config, "num_key_value_heads", None) or heads) * width


def _layers(model: PreTrainedModel) -> list[Any]:
    """Returns the config of each layer: the model's config, unless transformers has one per layer (heterogeneous)."""
    config = model.config.get_text_config()
    if getattr(config, "is_heterogeneous", False):
        return list(config.per_layer_config)
    return [config] * (getattr(config, "num_hidden_layers", None) or len(decoder_blocks(model)))


def _attention_width(model: PreTrainedModel) -> int:
    """Returns the number of heads times their width, summed over the layers with softmax attention.

    Layers of Mamba, linear attention or convolutions are not counted.
    """
    config, layers = model.config.get_text_config(), _layers(model)
    kinds = getattr(config, "layer_types", None) or getattr(config, "layers_block_type", None) or []
    compares = [kind in ("attention", "hybrid") or (kind.endswith("_attention")
                and kind != "linear_attention") for kind in kinds]  # fmt: skip
    if len(compares) != len(layers):
        compares = [True] * len(layers)
    return sum(_attention_widths(layer)[0] for layer, counted in zip(layers, compares, strict=True) if counted)


def _idle_expert_parameters(model: nn.Module) -> int:
    """Returns the number of parameters in experts that a token is not routed to."""
    config: Any = model.config.get_text_config()  # type: ignore[operator, union-attr]
    chosen = getattr(config, "num_experts_per_tok", None)
    experts = getattr(config, "num_experts", None) or getattr(config, "num_local_experts", None)
    if not chosen or not experts:
        return 0
    # Stacked experts have a first dimension for them, whatever their name (JetMoE's are in attention, too).
    in_experts = sum(
        p.numel()
        for name, p in model.named_parameters()
        if ".experts." in name or (p.ndim == 3 and p.shape[0] == experts)
    )
    return in_experts * (experts - chosen) // experts


def _chapter_parameters(model: nn.Module) -> tuple[int, int]:
    """Returns corrections (to all, to trained parameters): memory keys and values a token reads, minus those held."""
    blocks: list[Any] = [m for m in model.modules() if getattr(m, "keeps_router_logits", False)]
    banks = {id(block.bank): block.bank for block in blocks}
    read = sum(block.top_k * sum(p[0].numel() for p in block.bank.parameters()) for block in blocks)
    held = [p for bank in banks.values() for p in bank.parameters()]
    change = read - sum(p.numel() for p in held)
    return change, change if all(p.requires_grad for p in held) else 0


def peak_flops(device: torch.device, precision: str) -> float | None:
    """Returns the dense peak of the device in FLOP/s, or None if it is not known (CPUs, unlisted GPUs, fp32).

    Args:
        precision: as in trainer.precision; fp8 gives the peak of bf16, so that its MFU can be compared with bf16's.
    """
    if device.type != "cuda" or not outside_fp8(precision).startswith(("bf16", "16")):
        return None
    name = torch.cuda.get_device_name(device)
    peaks = DEVICES["teraflops"].items()
    return next((peak * 1e12 for known, peak in peaks if re.search(rf"{known}(?!\d)", name)), None)


def memory_estimate(model: PreTrainedModel, config: Config, card_bytes: int | None = None) -> dict[str, int]:
    """Estimates the bytes on one device by part, from shapes alone: `model` may be on the meta device.

    Activations are those that transformers' GPT-2 and Llama blocks keep for the backward (Korthikanti et al. 2022,
    section 4, counts the same way), with attention that never materializes its weights. Allocator overhead and kernel
    workspace are not included.

    Args:
        card_bytes: memory of the GPU, which determines the size of a chunk of logits; None: that of the current GPU.
    """
    _, trained, _ = parameter_counts(model)
    weight_bytes = {"bf16-true": 2, "16-true": 2, "64-true": 8}.get(config.trainer.precision, 4)
    state_bytes = 4 if config.trainer.strategy == "deepspeed" else weight_bytes  # ZeRO's optimizer updates fp32 copies
    mixed = outside_fp8(config.trainer.precision).endswith("-mixed")
    row = config.objective.row_tokens(config.data, model)
    tokens = config.data.micro_batch_size * row // context_parallel(config.trainer)
    blocks = [p for block in decoder_blocks(model) for p in block.parameters()]
    in_blocks = sum(p.numel() for p in blocks if p.is_floating_point())
    whole = {
        # Autocast keeps a half-precision copy of the blocks' matrices until their backward.
        "parameters": _weights_bytes(model, weight_bytes) + (2 * in_blocks if mixed else 0),
        "gradients": weight_bytes * trained,
        "optimizer": _state_bytes(model, config, state_bytes) + (2 * trained if state_bytes == 2 else 0),
        "activations": tokens * _activation_bytes(model, config, weight_bytes, mixed)
        + _memory_bytes(model, config, tokens, 2 if mixed else weight_bytes),
        **({"average": 4 * trained} if config.callbacks.ema.enabled else {}),
        "logits": _logits_bytes(model, config, tokens, 2 if mixed else weight_bytes, card_bytes),
    }
    return whole | _parts(whole, model, config, weight_bytes)


def _parts(whole: dict[str, int], model: PreTrainedModel, config: Config, weight_bytes: int) -> dict[str, int]:
    """Returns bytes of parameters, gradients, optimizer state on one device if trainer.strategy shards them, else {}.

    Gathered at a time are the current block, the next one (under fsdp_tp the device's part of both), and the parameters
    outside blocks; untied embeddings are counted separately, as FSDP gathers them for the lookup only (docs/scale.md).
    """
    t = config.trainer
    group = tensor_parallel(t)
    world = int(t.devices) * t.num_nodes if str(t.devices).isdigit() else 1
    weights = _weights_bytes(model, weight_bytes)
    parameters, gradients, state = whole["parameters"], whole["gradients"], whole["optimizer"]
    blocks = [_weights_bytes(block, weight_bytes) for block in decoder_blocks(model)]
    at_work_bytes = 2 if outside_fp8(t.precision).endswith("-mixed") and t.accelerator == "cuda" else weight_bytes
    two_blocks = 2 * max((_weights_bytes(block, at_work_bytes) for block in decoder_blocks(model)), default=0) // group
    gathered = weights - sum(blocks) + two_blocks
    if t.strategy in ("fsdp", "fsdp_tp"):
        apart = untied_layers(model)
        if apart is not None:
            embeddings, head = (_weights_bytes(layer, weight_bytes) for layer in apart)
            at_head = _weights_bytes(apart[1], at_work_bytes) + two_blocks
            gathered += max(embeddings, at_head) - embeddings - head - two_blocks
        shards = int(t.devices) if t.fsdp.copy_per_node and world > 1 else world
        accumulates = config.data.global_batch_size > config.data.micro_batch_size * world // ranks_per_part(t)
        in_blocks = weight_bytes * sum(parameter_counts(block)[1] for block in decoder_blocks(model))
        held = 0
        if accumulates and not t.fsdp.reduce_each_micro_batch:
            held = gradients - in_blocks + in_blocks // group
        if t.fsdp.cpu_offload:
            return {"parameters": gathered, "gradients": held, "optimizer": 0}
        return {
            "parameters": weights // shards + gathered,
            "gradients": held or gradients // shards,
            "optimizer": state // shards,
        }
    if t.strategy == "deepspeed":
        # ZeRO keeps a separate copy in fp32 of what is trained, which the optimizer updates.
        stage, master = t.deepspeed.stage, 4 * parameter_counts(model)[1] // world
        if t.deepspeed.offload_optimizer is not None:
            master = state = 0
        part = 0 if t.deepspeed.offload_parameters is not None else weights // world
        # Gradients are kept until a bucket is full and copied into it; gathered parameters stay up to a maximum number.
        zero = engine_config(t)["zero_optimization"]
        waiting = min(gradients, weight_bytes * int(zero.get("reduce_bucket_size", ZERO_BUCKET)))
        copies = 2 if stage == 3 or zero.get("overlap_comm") else 1
        live = min(weights, weight_bytes * int(zero.get("stage3_max_live_parameters", ZERO_LIVE)))
        return {
            "parameters": master + (part + max(gathered, live) if stage == 3 else parameters),
            "gradients": gradients // world + copies * waiting if stage >= 2 else gradients,
            "optimizer": state // world,
        }
    return {}


def _weights_bytes(model: nn.Module, weight_bytes: int) -> int:
    """Returns the bytes of all parameters; quantised ones count as stored, with their scales."""
    return sum(_packed_bytes(p) or weight_bytes * p.numel() for p in model.parameters())


def _packed_bytes(parameter: nn.Parameter) -> int:
    """Returns the bytes of a quantised parameter, with the scales of a 4-bit one; 0 for any other parameter."""
    if parameter.is_floating_point():
        return 0
    state: Any = getattr(parameter, "quant_state", None)
    scales = [] if state is None else [state.absmax, *([state.state2.absmax] if state.state2 is not None else [])]
    return sum(tensor.numel() * tensor.itemsize for tensor in (parameter, *scales))


def _state_bytes(model: nn.Module, config: Config, itemsize: int) -> int:
    """Returns the bytes of the optimizer's state; of a custom class what it keeps for a small weight is measured."""
    trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    if config.optimizer._target_ is not None:
        each = _measured_state(config) * itemsize / 4
        return round(each * sum(p.numel() for _, p in trained))
    optimizer: Any = config.optimizer
    return round(sum(p.numel() * optimizer.state_bytes(name, p.shape, itemsize) for name, p in trained))


def _measured_state(config: Config, side: int = 256) -> float:
    """Returns the bytes that a custom optimizer keeps for each fp32 number of a weight, from a step on a small one."""
    cfg = config.optimizer
    cls = find_class(str(cfg._target_), "optimizer", torch.optim.Optimizer, config.run.allow_target)
    weight = nn.Parameter(torch.ones(side, side, dtype=torch.float32, device="cpu"))
    weight.grad = torch.ones_like(weight)
    with building("optimizer", str(cfg._target_)):
        optimizer: Any = cls([weight], **arguments_of(cfg, inspect.signature(cls).parameters))
        optimizer.step(lambda: weight.sum())
    kept = [value for state in optimizer.state.values() for value in state.values() if isinstance(value, torch.Tensor)]
    return sum(value.numel() * value.itemsize for value in kept if value.numel() > 1) / side**2


def _activation_bytes(model: PreTrainedModel, config: Config, weight_bytes: int, mixed: bool) -> int:
    """Returns activation bytes per token, over all layers, under trainer.activation_checkpointing."""
    shape = model.config.get_text_config()
    stream, product = weight_bytes, 2 if mixed else weight_bytes  # itemsize of the residual stream and of products
    layers = _layers(model)
    layer = _block_activation_bytes(layers[0], stream, product, mixed, tensor_parallel(config.trainer))
    how = config.trainer.activation_checkpointing
    if not how:
        return len(layers) * layer
    border = stream * shape.hidden_size  # what a block is recomputed from
    if how == "selective":
        border += _product_bytes(layers[0], product, tensor_parallel(config.trainer))
    return (len(layers) * border if how != "offload" else 0) + layer


def _product_bytes(shape: Any, product: int, parts: int) -> int:
    """Returns bytes per token and layer for results of matrix products and attention (selective checkpointing)."""
    hidden, (queries, keys) = shape.hidden_size, _attention_widths(shape)
    inner, gates = _inner_width(shape), 2 if hasattr(shape, "rms_norm_eps") else 1
    chosen = getattr(shape, "num_experts_per_tok", None) if getattr(shape, "moe_intermediate_size", None) else None
    fed = chosen * (gates * shape.moe_intermediate_size + hidden) if chosen else gates * inner // parts + hidden
    return product * (2 * (queries + keys) // parts + hidden + fed)


def _inner_width(shape: Any) -> int:
    """Returns the inner width of the feed-forward layers, the largest if they differ."""
    inner = getattr(shape, "n_inner", None) or getattr(shape, "intermediate_size", None)
    if inner is None:
        inner = 0 if hasattr(shape, "rms_norm_eps") else 4 * shape.hidden_size
    return max(inner) if isinstance(inner, list | tuple) else inner


def _memory_bytes(model: nn.Module, config: Config, tokens: int, product: int) -> int:
    """Returns the bytes that memory blocks keep for their backward: with checkpointing, those of one block."""
    kept: list[int] = [m.kept_bytes(tokens, product) for m in model.modules() if hasattr(m, "kept_bytes")]  # type: ignore[operator]
    return max(kept, default=0) if config.trainer.activation_checkpointing else sum(kept)


def _block_activation_bytes(shape: Any, stream: int, product: int, mixed: bool, parts: int) -> int:
    """Returns bytes per token and layer kept for the backward; `parts` devices split heads and inner width."""
    hidden, (queries, keys) = shape.hidden_size, _attention_widths(shape)
    attention = product * (2 * queries + 2 * keys) // parts  # q, k, v and the output
    if not hasattr(shape, "rms_norm_eps"):  # GPT-2: LayerNorm keeps its input; one projection computes q, k, v
        inner = 2 * product * _inner_width(shape) // parts
        return 2 * stream * hidden + 2 * product * hidden + attention + inner
    # An RMSNorm made of separate operations keeps its input and result; autocast casts the result per projection.
    norms = 4 * stream * hidden + (5 if mixed else 2) * product * hidden
    if shape.model_type.startswith("qwen3"):
        norms += (4 + product) * (queries + keys) // parts  # norms of q and k, in fp32
    if getattr(shape, "num_experts_per_tok", None) and getattr(shape, "moe_intermediate_size", None):
        chosen = shape.num_experts_per_tok
        return norms + attention + chosen * product * (4 * shape.moe_intermediate_size + 2 * hidden)
    return norms + attention + 4 * product * _inner_width(shape) // parts


def _logits_bytes(model: PreTrainedModel, config: Config, tokens: int, product: int, card_bytes: int | None) -> int:
    row = model.config.get_text_config().vocab_size * product
    return min(tokens * row, auto_chunk_bytes(config.trainer.accelerator, card_bytes))
