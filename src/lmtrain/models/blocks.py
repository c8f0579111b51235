"""The transformer blocks of a model: recomputing their activations, compiling them, running them without dropout; the
output layer behind them."""

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
    """The transformer blocks, in order: the modules transformers itself never splits over devices."""
    names = set(model._no_split_modules or ())
    # By all class names: fully_shard makes a module's class a subclass of what it was.
    return [m for m in model.modules() if any(cls.__name__ in names for cls in type(m).__mro__)]


@contextlib.contextmanager
def switched(modules: Iterable[Any], attribute: str, value: Any) -> Iterator[None]:
    """Within it the attribute of all modules is `value`; afterwards what it was in each."""
    before = [(module, getattr(module, attribute)) for module in modules]
    for module, _ in before:
        setattr(module, attribute, value)
    try:
        yield
    finally:
        for module, old in before:
            setattr(module, attribute, old)


def evaluating(model: nn.Module) -> contextlib.AbstractContextManager[None]:
    """Dropout and all else that is random is off within; what was in eval mode before stays so after."""
    return switched(model.modules(), "training", False)


def enable_activation_checkpointing(model: PreTrainedModel, kept: bool | str = True) -> None:
    """Keeps little of each block for its backward, which recomputes the rest (Chen et al. 2016).

    Args:
        kept: as trainer.activation_checkpointing. True: each block's input. "offload": the same, in host memory.
            "selective": also the results of matrix products and attention, which take most of a forward's time.
    """
    if not model.supports_gradient_checkpointing:
        raise UserError(
            f"{type(model).__name__} has no activation checkpointing: set trainer.activation_checkpointing=false"
        )
    # Its name since transformers 5.18, and the one before.
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    # The reentrant kind loses gradients where a block's input needs none, as under LoRA.
    options: dict[str, Any] = {"use_reentrant": False}
    if kept == "selective":
        options["context_fn"] = functools.partial(checkpoint.create_selective_checkpoint_contexts, _policy)
    enable(options)
    if kept == "offload":
        for module in model.modules():
            if getattr(module, _RECOMPUTES, None) is not None:
                setattr(module, _RECOMPUTES, _recomputed_from_host)


_RECOMPUTES = "_gradient_checkpointing_func"  # transformers' name for what calls a block
_PRODUCTS = {"aten.mm", "aten.addmm", "aten.bmm", "aten.baddbmm", "aten._scaled_mm", "aten._grouped_mm"}
_ATTENTION = {"aten._flash_attention_forward", "aten._efficient_attention_forward", "aten._cudnn_attention_forward",
              "torch_attn._varlen_attn"}  # fmt: skip


def _policy(context: Any, operator: Any, *args: Any, **kwargs: Any) -> checkpoint.CheckpointPolicy:
    name = str(getattr(operator, "overloadpacket", operator))
    is_kept = name in _PRODUCTS or name in _ATTENTION or name.startswith("aten._scaled_dot_product_")
    return checkpoint.CheckpointPolicy.MUST_SAVE if is_kept else checkpoint.CheckpointPolicy.PREFER_RECOMPUTE


def _recomputed_from_host(function: Callable[..., Any], *args: Any) -> Any:
    """What a block is recomputed from waits in page-locked host memory."""
    with torch.autograd.graph.save_on_cpu(pin_memory=torch.cuda.is_available()):
        return checkpoint.checkpoint(function, *args, use_reentrant=False)


log = logging.getLogger(__name__)

# Blocks of one shape share their code, and torch counts variants by code: trained and not, with an adapter and without,
# sliding and full attention are a dozen. Past its own limit of 8 torch runs blocks uncompiled.
VARIANTS = 64


def compile_model(model: PreTrainedModel, changing_lengths: bool = False, backend: str = "inductor") -> None:
    """torch.compile of every block, in place, so that parameter names stay; blocks of one shape share the code.

    Args:
        changing_lengths: micro-batches differ in length: code for any length at once, not for the first one first.
        backend: of torch.compile.
    """
    # Lightning trains inside DDP.forward, where torch would cut a block's graph at the 25 MB buckets of its gradients.
    torch._dynamo.config.optimize_ddp = False
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, VARIANTS)
    logger = logging.getLogger("torch._dynamo.convert_frame")
    if not any(isinstance(f, _GivesUp) for f in logger.filters):
        logger.addFilter(_GivesUp())
    for block in decoder_blocks(model):
        block.compile(dynamic=True if changing_lengths else None, backend=backend)


def let_grow(*tensors: Tensor, dim: int = 0) -> None:
    """Tells torch.compile that tensors will come in other sizes along `dim`, so that it makes code for any at once."""
    for tensor in tensors:
        torch._dynamo.maybe_mark_dynamic(tensor, dim)


class _GivesUp(logging.Filter):
    """Says in plain words what torch's own warning means, once."""

    said = False

    def filter(self, record: logging.LogRecord) -> bool:
        if "recompile_limit" in record.getMessage() and not self.said:
            self.said = True
            log.warning(
                "torch.compile has made more than %d variants of a block and runs further ones uncompiled, slower: "
                "trainer.compile=false makes none (TORCH_LOGS=recompiles shows why)",
                torch._dynamo.config.recompile_limit,
            )
        return True


def output_head(model: PreTrainedModel, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
    """(hidden [..., D'], weight [V, D'], bias [V] or None) whose `hidden @ weight.T + bias` are the model's logits.

    D' is the model's width D, so `hidden` comes back as it went in, unless LoRA adapts the output layer: its logits are
    W h + s B A dropout(h), one product of [h, A dropout(h)] with [W, s B]. A trained copy of the layer
    (peft.modules_to_save) and single trained rows (new tokens) come through peft's own `weight`.

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
AROUND = "gathered_for"  # attribute of an output layer that is sharded by itself: calls a function of hidden states


def at_head(model: PreTrainedModel, compute: Callable[[Tensor, Tensor, Tensor | None], T], hidden: Tensor) -> T:
    """What `compute` gives for `output_head(model, hidden)`, which is gathered first where it lies in parts."""

    def computed(hidden: Tensor) -> T:
        return compute(*output_head(model, hidden))

    around = getattr(model.get_output_embeddings(), AROUND, None)
    return computed(hidden) if around is None else around(computed, hidden)


def untied_layers(model: PreTrainedModel) -> tuple[Any, Any] | None:
    """Embeddings and output layer where each can be gathered by itself: plain layers whose weights nothing else reads.

    A class of a user's own may read them anywhere, and an adapter's layers beside them hold other dtypes.
    """
    embeddings, head = model.get_input_embeddings(), model.get_output_embeddings()
    plain = [
        isinstance(layer, kind) and type(layer).forward is kind.forward  # also as the subclass that fully_shard makes
        for layer, kind in ((embeddings, nn.Embedding), (head, nn.Linear))
    ]
    if not all(plain) or head.weight is embeddings.weight or not type(model).__module__.startswith("transformers."):
        return None
    return embeddings, head
