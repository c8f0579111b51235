"""The transformer blocks of a model (activation checkpointing, compilation, running without dropout) and the output
layer after them."""

import contextlib
import functools
import logging
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

import torch
import torch._dynamo
from torch import Tensor, nn
from torch.utils import checkpoint
from transformers import PreTrainedModel

from lmtrain.errors import UserError


def decoder_blocks(model: PreTrainedModel) -> list[nn.Module]:
    """Returns the transformer blocks in order: the modules that transformers never splits over devices."""
    names = set(model._no_split_modules or ())
    # Base classes count too, since fully_shard replaces a module's class with a subclass.
    return [m for m in model.modules() if any(cls.__name__ in names for cls in type(m).__mro__)]


@contextlib.contextmanager
def switched(modules: Iterable[Any], attribute: str, value: Any) -> Iterator[None]:
    """Sets an attribute of all modules to `value` within the context, and restores each old value afterwards."""
    before = [(module, getattr(module, attribute)) for module in modules]
    for module, _ in before:
        setattr(module, attribute, value)
    try:
        yield
    finally:
        for module, old in before:
            setattr(module, attribute, old)


def evaluating(model: nn.Module) -> contextlib.AbstractContextManager[None]:
    """Puts all modules into eval mode within the context, without dropout, and restores each one's mode afterwards."""
    return switched(model.modules(), "training", False)


def enable_activation_checkpointing(model: PreTrainedModel, kept: bool | str = True) -> None:
    """Keeps few activations of each block for its backward, which recomputes the rest (Chen et al. 2016).

    Args:
        kept: as trainer.activation_checkpointing. True: each block's input. "offload": the same, in host memory.
            "selective": also the results of matrix products and attention, which take most of a forward's time.
    """
    if not model.supports_gradient_checkpointing:
        raise UserError(f"{type(model).__name__} can't checkpoint: set trainer.activation_checkpointing=false")
    # The method's name since transformers 5.18, and its earlier name.
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    # Reentrant checkpointing loses gradients if a block's input needs none, as under LoRA.
    options: dict[str, Any] = {"use_reentrant": False}
    if kept == "selective":
        options["context_fn"] = functools.partial(checkpoint.create_selective_checkpoint_contexts, _policy)
    enable(options)
    if kept == "offload":
        for module in model.modules():
            if getattr(module, _RECOMPUTES, None) is not None:
                setattr(module, _RECOMPUTES, _recomputed_from_host)


_RECOMPUTES = "_gradient_checkpointing_func"  # transformers' attribute for the function that calls a block
_PRODUCTS = {"aten.mm", "aten.addmm", "aten.bmm", "aten.baddbmm", "aten._scaled_mm", "aten._grouped_mm"}
_ATTENTION = {"aten._flash_attention_forward", "aten._efficient_attention_forward", "aten._cudnn_attention_forward",
              "torch_attn._varlen_attn"}  # fmt: skip


def _policy(context: Any, operator: Any, *args: Any, **kwargs: Any) -> checkpoint.CheckpointPolicy:
    name = str(getattr(operator, "overloadpacket", operator))
    is_kept = name in _PRODUCTS or name in _ATTENTION or name.startswith("aten._scaled_dot_product_")
    return checkpoint.CheckpointPolicy.MUST_SAVE if is_kept else checkpoint.CheckpointPolicy.PREFER_RECOMPUTE


def _recomputed_from_host(function: Callable[..., Any], *args: Any) -> Any:
    """Calls a block with activation checkpointing; its saved inputs are kept in page-locked host memory."""
    with torch.autograd.graph.save_on_cpu(pin_memory=torch.cuda.is_available()):
        return checkpoint.checkpoint(function, *args, use_reentrant=False)


log = logging.getLogger(__name__)

# Blocks of equal shape share code, and torch counts compiled variants per code object: trained or frozen, with or
# without an adapter, sliding or full attention make a dozen. Past its own limit of 8, torch runs blocks uncompiled.
VARIANTS = 64


def compile_model(model: PreTrainedModel, changing_lengths: bool = False, backend: str = "inductor") -> None:
    """Compiles every block in place, so that parameter names stay the same; blocks of equal shape share code.

    Args:
        changing_lengths: micro-batches differ in length: compiles for any length at once, instead of first for one.
        backend: of torch.compile.
    """
    # Lightning trains inside DDP.forward, where torch would split a block's graph at DDP's 25 MB gradient buckets.
    torch._dynamo.config.optimize_ddp = False
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, VARIANTS)
    logger = logging.getLogger("torch._dynamo.convert_frame")
    if not any(isinstance(f, _GivesUp) for f in logger.filters):
        logger.addFilter(_GivesUp())
    blocks, embeddings = decoder_blocks(model), model.get_input_embeddings()
    if blocks and _trained(blocks[0]) and not _trained(embeddings):
        embeddings.register_forward_hook(_require_gradient)
    for block in blocks:
        block.compile(dynamic=True if changing_lengths else None, backend=backend)


def _trained(module: nn.Module) -> bool:
    return any(p.requires_grad for p in module.parameters())


def _require_gradient(module: nn.Module, inputs: Any, output: Tensor) -> None:
    """A forward hook: makes the output of frozen embeddings require a gradient, as the inputs of all other blocks do.

    Otherwise the first block is another variant, which takes as long to compile as all others together.
    """
    if torch.is_grad_enabled():
        output.requires_grad_(True)


def let_grow(*tensors: Tensor, dim: int = 0) -> None:
    """Marks `dim` of the tensors as dynamic, so that torch.compile generates code for any size along it at once."""
    for tensor in tensors:
        torch._dynamo.maybe_mark_dynamic(tensor, dim)


class _GivesUp(logging.Filter):
    """A logging filter that explains, once, torch's warning about its recompile limit."""

    said = False

    def filter(self, record: logging.LogRecord) -> bool:
        if "recompile_limit" in record.getMessage() and not self.said:
            self.said = True
            found = f"torch.compile has made more than {torch._dynamo.config.recompile_limit} variants of a block"
            log.warning(f"{found} and runs further ones uncompiled, slower (TORCH_LOGS=recompiles shows why)")
        return True


def output_head(model: PreTrainedModel, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
    """Returns (hidden [..., D'], weight [V, D'], bias [V] or None) so that `hidden @ weight.T + bias` are the logits.

    D' is the model's width D and `hidden` is returned unchanged, unless LoRA adapts the output layer: then the logits
    are W h + s B A dropout(h), computed as one product of [h, A dropout(h)] with [W, s B]. A trained copy of the layer
    (peft.modules_to_save) and single trained rows (new tokens) are included in peft's own `weight`.

    Args:
        hidden: last hidden states, [..., D].
    """
    head = model.get_output_embeddings()
    bias = getattr(head, "bias", None)
    if not isinstance(getattr(head, "lora_A", None), nn.ModuleDict) or head.disable_adapters:
        return hidden, head.weight, bias
    inputs, weights = [hidden], [head.weight]
    for name in head.active_adapters:
        lora_a = head.lora_A[name]
        inputs.append(lora_a(head.lora_dropout[name](hidden.to(lora_a.weight.dtype))))
        weights.append(head.scaling[name] * head.lora_B[name].weight)
    return torch.cat(inputs, dim=-1), torch.cat(weights, dim=1), bias  # [..., D + r], [V, D + r]


T = TypeVar("T")
AROUND = "gathered_for"  # method of an output layer that is sharded by itself: gathers it and calls a given function


def at_head(model: PreTrainedModel, compute: Callable[[Tensor, Tensor, Tensor | None], T], hidden: Tensor) -> T:
    """Returns `compute(*output_head(model, hidden))`; an output layer that is sharded by itself is gathered first."""

    def computed(hidden: Tensor) -> T:
        return compute(*output_head(model, hidden))

    around = getattr(model.get_output_embeddings(), AROUND, None)
    return computed(hidden) if around is None else around(computed, hidden)


def untied_layers(model: PreTrainedModel) -> tuple[Any, Any] | None:
    """Returns (embeddings, output layer) if each can be gathered by itself, else None.

    Both must be plain layers whose weights nothing else reads: a user-defined model class might read them anywhere, and
    an adapter adds layers of other dtypes to them.
    """
    embeddings, head = model.get_input_embeddings(), model.get_output_embeddings()
    plain = [
        isinstance(layer, kind) and type(layer).forward is kind.forward  # true for fully_shard's subclasses as well
        for layer, kind in ((embeddings, nn.Embedding), (head, nn.Linear))
    ]
    if not all(plain) or head.weight is embeddings.weight or not type(model).__module__.startswith("transformers."):
        return None
    return embeddings, head
