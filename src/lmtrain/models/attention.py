"""Causal attention for transformers' models, with or without several documents in a row.

transformers calls the function registered here in place of its own. It builds no mask, because no mask function is
registered under this name; plain causal attention needs none. Packed documents are passed as `Documents` to the
model's forward, in the keyword `documents`, which transformers passes on to every attention layer.
"""

import inspect
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.varlen import varlen_attn
from transformers import AttentionInterface, PreTrainedModel

from lmtrain.errors import UserError
from lmtrain.models.context import CONTEXT, Context
from lmtrain.models.documents import ALONE, Documents, causal_mask

NAME = "lmtrain"  # the attn_implementation of models built here; transformers never writes it into config.json
# The product of row length and head width from which a CPU trains attention faster in half precision than in fp32.
# On one thread fp32 takes 0.2 of the time at 64 x 32, 0.35 to 0.5 at 128, 0.75 at 256 x 32, but 1.2 at 256 x 64.
CPU_HALF_PRECISION_FROM = 256 * 64
# Kernels for attention on a GPU. cuDNN's, which torch 2.11 prefers on Hopper, has gradients of NaN for some masks and
# row lengths (PyTorch's issue 196678), and releases before 9.15.1 mishandle lengths that 128 doesn't divide. On an
# H200, gradients of short unmasked documents with fewer key heads were wrong by 50 % (tests/models/test_prefixes.py):
# which of the two was why is not known. With fewer queries than keys, the kernel that torch chose was wrong by 60 %.
MASKED_KERNELS = [SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
FEWER_QUERIES_KERNELS = [SDPBackend.MATH]
UNMASKED_KERNELS = [SDPBackend.FLASH_ATTENTION, *MASKED_KERNELS]
CUDNN_LENGTHS = 128  # row lengths are multiples of it where cuDNN's kernel may run
FEWER_KEY_HEADS = "enable_gqa" in inspect.signature(varlen_attn).parameters  # torch 2.11 may lack it
SLIDES = "lmtrain_slides"
SLIDING = "sliding_attention"  # transformers' name in config.layer_types


class AttentionScores(NamedTuple):
    """How attention scores are converted to attention weights."""

    scaling: float | None  # None: 1 / sqrt(head width)
    softcap: float | None
    sink: Tensor | None  # [H]
    dropout: float  # on the weights

    @property
    def plain(self) -> bool:
        """Whether fused kernels support it: there is neither a soft cap nor a sink."""
        return self.softcap is None and self.sink is None


def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    documents: Documents | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Computes causal attention, with transformers' AttentionInterface signature.

    Args:
        query: [B, H, T, D]; key, value: [B, H_kv, T, D] with H a multiple of H_kv. With context parallelism T is the
            length of a rank's slice, while `documents` describes whole rows.
        sliding_window: a token sees itself and the sliding_window - 1 tokens before it.
        documents: None if each row is one sequence.
        softcap: scores become `softcap * tanh(score / softcap)` (Gemma 2).
        s_aux: [H], the logit of a key without a value, which every query may attend to (gpt-oss).

    Inputs may differ in dtype, since rotary embeddings return fp32 under autocast.

    Returns: [B, T, H, D] in autocast's dtype, or in value's if it is off, and None in place of attention weights.
    """
    if query.shape[2] != key.shape[2]:
        raise RuntimeError("this attention has no key-value cache: generate inside attention.generation_mode(model)")
    _refuse_what_is_not_done_here(module, sliding_window, {**kwargs, "attention_mask": attention_mask})
    context: Context | None = getattr(module, CONTEXT, None)
    if context is not None:
        dtype = autocast_dtype(value)
        query, key, value = context.heads_for_tokens(query.to(dtype), key.to(dtype), value.to(dtype))
        s_aux = None if s_aux is None else s_aux.chunk(context.size)[context.rank]
    if sliding_window is not None and sliding_window >= query.shape[2]:
        sliding_window = None
    scores = AttentionScores(scaling, softcap, s_aux, dropout)
    if documents is None:
        seen = None if sliding_window is None else causal_mask(query.shape[2], sliding_window, query.device)
        out = _sdpa(query, key, value, scores, seen).transpose(1, 2)
    elif documents.method == "slices":
        out = _slices(query, key, value, scores, sliding_window, documents)
    elif documents.method == "dense_mask":
        out = _sdpa(query, key, value, scores, documents.mask(sliding_window)).transpose(1, 2)
    elif not scores.plain:
        capped = f"{type(module).__name__} caps its attention scores or has an attention sink"
        raise UserError(f"{capped}, which model.attention=varlen doesn't support: set model.attention=slices")
    else:
        out = _varlen_documents(query, key, value, scaling, sliding_window, documents)
    if context is not None:
        out = context.exchanged(out)
    return out.contiguous(), None


def _refuse_what_is_not_done_here(module: nn.Module, sliding_window: int | None, asked: dict[str, Any]) -> None:
    extras = [name for name in ("position_bias", "attention_mask") if asked.get(name) is not None]
    if getattr(module, "is_causal", True) is False or asked.get("is_causal") is False:
        raise UserError(f"{type(module).__name__} lets tokens see those that come after them (is_causal=False)")
    slides = getattr(module, SLIDES, None)
    if sliding_window is None and (_is_sliding(module) if slides is None else slides):
        extras.append("a sliding window that it doesn't pass on")
    if extras:
        found = f"{type(module).__name__} asks its attention for {', '.join(extras)}, which lmtrain's lacks"
        raise UserError(f"{found}: set model.attention=transformers, and {ALONE}")


def use_attention(model: PreTrainedModel) -> None:
    """Makes the model use this attention, and stores on each attention layer whether it has a sliding window.

    Deriving that from the layer's index in the forward would make torch.compile compile a variant for each layer.
    """
    if model._can_set_attn_implementation():  # not so where the layers don't call transformers' AttentionInterface
        model.set_attn_implementation(NAME)
    for module in model.modules():
        if hasattr(module, "layer_idx"):
            setattr(module, SLIDES, _is_sliding(module))


def _is_sliding(module: nn.Module) -> bool:
    types = getattr(getattr(module, "config", None), "layer_types", None)
    if types is None or SLIDING not in types:
        return False
    index = getattr(module, "layer_idx", None)
    return index is None or types[index] == SLIDING


def _sdpa(query: Tensor, key: Tensor, value: Tensor, scores: AttentionScores, mask: Tensor | None) -> Tensor:
    grouped = query.shape[1] != key.shape[1]
    dtype = compute = autocast_dtype(value)
    # CUDA's fp32 kernel and kernels that take a mask don't support grouped heads, and matmul never does.
    if grouped and (mask is not None or not scores.plain or (query.is_cuda and dtype == torch.float32)):
        key, value = _repeat_heads(key, query.shape[1]), _repeat_heads(value, query.shape[1])
        grouped = False
    if query.device.type == "cpu" and query.shape[2] * query.shape[3] < CPU_HALF_PRECISION_FROM:
        compute = torch.promote_types(dtype, torch.float32)
    if mask is not None and mask.dtype != torch.bool:
        mask = mask.to(compute)
    with torch.autocast(query.device.type, enabled=False), _kernels(query, key, mask):
        query, key, value = (x.to(compute) for x in (query, key, value))
        if scores.plain:
            out = F.scaled_dot_product_attention(
                query,
                key,
                value,
                attn_mask=mask,
                dropout_p=scores.dropout,
                is_causal=mask is None,
                scale=scores.scaling,
                enable_gqa=grouped,
            )
        else:
            seen = causal_mask(query.shape[2], None, query.device) if mask is None else mask
            out = F.dropout(_weights(query, key, scores, seen), scores.dropout) @ value
    return out.to(dtype)


def _kernels(query: Tensor, key: Tensor, mask: Tensor | None) -> AbstractContextManager[None]:
    """Returns a context in which scaled_dot_product_attention takes no kernel that is wrong for these tensors."""
    if not query.is_cuda:
        return nullcontext()
    if mask is None:
        is_right = query.shape[1] == key.shape[1] and query.shape[2] % CUDNN_LENGTHS == 0
        return nullcontext() if is_right else sdpa_kernel(UNMASKED_KERNELS)
    return sdpa_kernel(MASKED_KERNELS if query.shape[2] == key.shape[2] else FEWER_QUERIES_KERNELS)


def _weights(query: Tensor, key: Tensor, scores: AttentionScores, seen: Tensor) -> Tensor:
    """Computes attention weights [B, H, T, S], with a soft cap on scores and a sink in each query's softmax if set."""
    scaling = query.shape[-1] ** -0.5 if scores.scaling is None else scores.scaling
    exact = torch.promote_types(query.dtype, torch.float32)
    logits = (query @ key.transpose(-1, -2)).to(exact) * scaling  # [B, H, T, S]
    if scores.softcap is not None:
        logits = scores.softcap * torch.tanh(logits / scores.softcap)
    logits = logits.masked_fill(~seen, float("-inf"))
    if scores.sink is None:
        return logits.softmax(-1).to(query.dtype)
    sink = scores.sink.to(exact).view(1, -1, 1, 1).expand(*logits.shape[:-1], 1)
    return torch.cat([logits, sink], dim=-1).softmax(-1)[..., :-1].to(query.dtype)


def autocast_dtype(x: Tensor) -> torch.dtype:
    """Returns the dtype of matrix products with `x`: autocast's if it is on, else that of `x`."""
    device = x.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype


def _repeat_heads(x: Tensor, heads: int) -> Tensor:
    return x.repeat_interleave(heads // x.shape[1], dim=1)


@torch.compiler.disable
def _slices(
    query: Tensor, key: Tensor, value: Tensor, scores: AttentionScores, window: int | None, documents: Documents
) -> Tensor:
    batch, heads, seq_len, _ = query.shape
    sizes = [sum(lengths) * count for lengths, count, _ in documents.pieces]
    # [B * T, H, D], a view of a projection's output, whose memory order is [B, T, H, D]. split instead of slices: its
    # backward is one concatenation, while each slice's allocates zeros of the full size.
    qs, ks, vs = (x.transpose(1, 2).flatten(0, 1).split(sizes) for x in (query, key, value))
    outputs, first = [], 0  # the last piece without a prefix, where that of others is
    for i, (lengths, count, prefix) in enumerate(documents.pieces):
        first = first if prefix else i
        k, v = (torch.cat([x[first][:prefix], x[i]]) if prefix else x[i] for x in (ks, vs))
        q, k, v = (x.unflatten(0, (count, -1)).transpose(1, 2) for x in (qs[i], k, v))  # [count, H, T, D]
        slides = window is not None and window < prefix + max(lengths)
        mask = documents.prefixed_mask(lengths, prefix, window if slides else None) if prefix or slides else None
        outputs.append(_sdpa(q, k, v, scores, mask).transpose(1, 2).flatten(0, 1))
    return torch.cat(outputs).view(batch, seq_len, heads, -1)


def _varlen_documents(
    query: Tensor, key: Tensor, value: Tensor, scaling: float | None, window: int | None, documents: Documents
) -> Tensor:
    batch, heads, seq_len, _ = query.shape
    dtype = autocast_dtype(value)
    # Cast after the transpose: torch.compile writes the result of a cast in the order of its dimensions, and the kernel
    # needs [B, T, H, D]. Casting first would write rotated queries and keys a second time, to reorder them.
    q, k, v = (x.transpose(1, 2).to(dtype).flatten(0, 1) for x in (query, key, value))
    options: dict[str, Any] = {"scale": scaling, "window_size": (-1 if window is None else window - 1, 0)}
    if heads != k.shape[1]:
        if FEWER_KEY_HEADS:
            options["enable_gqa"] = True
        else:
            k, v = _repeat_heads(k, heads), _repeat_heads(v, heads)
    cu = cu_kv = documents.cu_seqlens
    if documents.prefixes is not None:
        # The kernel aligns its causal mask at the end of queries and keys, so every query sees the whole prefix.
        k, v = (x.index_select(0, documents.prefixes.kv_index) for x in (k, v))
        cu_kv = documents.prefixes.cu_kv
    # No document is longer than a row, a bound that is known without synchronizing with the GPU.
    out: Any = varlen_attn(q, k, v, cu, cu_kv, seq_len, seq_len, **options)
    return out.view(batch, seq_len, heads, -1)


AttentionInterface.register(NAME, attention)


@contextmanager
def generation_mode(model: nn.Module) -> Iterator[None]:
    """Makes `model.generate` correct within the context: transformers' own attention and masks, without compiled code.

    Args:
        model: a transformers model or a module with one as `.model`, such as LanguageModel.
    """
    hf: Any = model if hasattr(model, "set_attn_implementation") else model.model
    previous = hf.config._attn_implementation
    if previous == NAME:
        hf.set_attn_implementation("sdpa" if hf._supports_sdpa else "eager")
    try:
        with torch.compiler.set_stance("force_eager"):
            yield
    finally:
        if previous == NAME:
            hf.set_attn_implementation(NAME)
