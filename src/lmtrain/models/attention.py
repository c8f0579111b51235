"""Causal attention for transformers' models, with or without several documents in a row.

transformers calls the function registered here in place of its own and, because no mask function goes with the name,
builds no mask: where every token sees all before it, none is needed. Packed documents reach it as `Documents`,
handed to the model's forward as the keyword `documents`, which transformers passes on to every attention layer.

How documents are kept apart (`model.attention`):
    auto        the fastest that works: slices on CPU; on CUDA varlen, or block_mask where varlen can't be had
    slices      one scaled_dot_product_attention per document (0.4 of a full causal row's time on a CPU)
    varlen      torch.nn.attention.varlen: flash attention over all documents at once; CUDA, bf16 or fp16, no dropout
    block_mask  flex_attention on CUDA, elsewhere a dense mask
    sdpa        plain causal rows; refuses packed documents
    transformers  the model's own attention and masks; refuses packed documents
"""

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache, lru_cache
from itertools import groupby, pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AttentionInterface

from lmtrain.errors import UserError

NAME = "lmtrain"  # the attn_implementation of models built here; transformers never writes it into config.json
CHOICES = ("auto", "sdpa", "slices", "varlen", "block_mask", "transformers")
FULL, SLIDING = "full_attention", "sliding_attention"  # transformers' names in config.layer_types


class Documents:
    """Where the documents of one micro-batch lie, in the form one attention method wants; made once per forward.

    Args:
        cu_seqlens: [n_docs + 1] int32, starts of the documents in the flattened batch * seq_len tokens; row borders
            are document borders, the first is 0, the last batch * seq_len.
        batch, seq_len: rows of the micro-batch and tokens per row.
        method: slices, varlen or block_mask, from `choose_method`.
    """

    def __init__(self, cu_seqlens: Tensor, batch: int, seq_len: int, method: str) -> None:
        self.cu_seqlens, self.batch, self.seq_len, self.method = cu_seqlens, batch, seq_len, method
        self._masks: dict[int | None, Any] = {}
        if method == "slices":
            starts = cu_seqlens.tolist()
            lengths = [end - start for start, end in pairwise(starts) if end > start]
            # Neighbours of one length are one batch: whole rows, for example.
            self.runs = [(length, len(list(run))) for length, run in groupby(lengths)]
        elif method == "block_mask":
            self.token_document = torch.bucketize(
                torch.arange(batch * seq_len, device=cu_seqlens.device), cu_seqlens[1:], right=True
            ).view(batch, seq_len)

    def mask(self, window: int | None) -> Any:
        """The mask of layers with this sliding window: a flex BlockMask on CUDA, else [B, 1, T, T] bool."""
        if window not in self._masks:
            make = self._flex_mask if self.cu_seqlens.is_cuda else self._dense_mask
            self._masks[window] = make(window)
        return self._masks[window]

    def _dense_mask(self, window: int | None) -> Tensor:
        document = self.token_document
        same = document.unsqueeze(2) == document.unsqueeze(1)  # [B, T, T]
        return (same & _causal_mask(self.seq_len, window, document.device)).unsqueeze(1)

    def _flex_mask(self, window: int | None) -> Any:
        from torch.nn.attention.flex_attention import create_block_mask

        document = self.token_document

        def visible(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
            seen = (document[b, q] == document[b, kv]) & (q >= kv)
            return seen if window is None else seen & (q - kv < window)

        return create_block_mask(visible, self.batch, None, self.seq_len, self.seq_len, document.device)


def choose_method(choice: str, device: torch.device, dtype: torch.dtype, dropout: float) -> str:
    """The way to keep documents apart: `choice`, or for auto the fastest that can run.

    Args:
        dtype: of the attention's matrix products, autocast's where it is on.
        dropout: on attention weights, 0 outside training.

    Raises UserError where the choice can't do it.
    """
    half = dtype in (torch.bfloat16, torch.float16)
    if choice == "auto":
        if device.type != "cuda" or dropout > 0:
            return "slices"
        return "varlen" if half and varlen_available() else "block_mask"
    if choice in ("sdpa", "transformers"):
        raise UserError(
            f"model.attention={choice} can't keep packed documents apart: "
            f"set model.attention=auto or data.isolate_documents=false"
        )
    reason = None
    if choice == "varlen" and (device.type != "cuda" or not varlen_available()):
        reason = f"needs CUDA and torch 2.11 or newer (here: {device.type}, torch {torch.__version__})"
    elif choice == "varlen" and not half:
        reason = f"needs trainer.precision=bf16-mixed, bf16-true or 16-mixed (here attention is {dtype})"
    elif choice != "slices" and dropout > 0 and device.type == "cuda":
        reason = f"has no attention dropout (here {dropout}): set model.dropout=0"
    if reason is not None:
        raise UserError(f"model.attention={choice} {reason}; or set model.attention=auto")
    return choice


@cache
def _varlen() -> tuple[Any, frozenset[str]]:
    """torch's varlen_attn and the names of its parameters, (None, {}) where it is absent or too old to scale."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return None, frozenset()
    parameters = frozenset(inspect.signature(varlen_attn).parameters)
    return (varlen_attn, parameters) if "window_size" in parameters else (None, frozenset())


def varlen_available() -> bool:
    """Whether this torch has variable-length attention with scale and window (2.11 and newer)."""
    return _varlen()[0] is not None


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
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Causal attention with transformers' AttentionInterface signature.

    Args:
        query: [B, H, T, D]; key, value: [B, H_kv, T, D] with H a multiple of H_kv.
        sliding_window: a token sees itself and the sliding_window - 1 tokens before it.
        documents: None where each row is one sequence.

    Returns: [B, T, H, D] and None (attention weights are never made).
    """
    _refuse_what_is_not_done_here(module, query, key, attention_mask, sliding_window, kwargs)
    if sliding_window is not None and sliding_window >= query.shape[2]:
        sliding_window = None
    if query.dtype != value.dtype:  # rotary embeddings leave fp32 under autocast
        query, key = query.to(value.dtype), key.to(value.dtype)
    if documents is None:
        out = _causal(query, key, value, scaling, dropout, sliding_window).transpose(1, 2)
    elif documents.method == "slices":
        out = _slices(query, key, value, scaling, dropout, sliding_window, documents)
    elif documents.method == "varlen":
        out = _varlen_documents(query, key, value, scaling, sliding_window, documents)
    elif query.is_cuda:
        out = _flex(query, key, value, scaling, documents.mask(sliding_window)).transpose(1, 2)
    else:
        out = _sdpa(query, key, value, scaling, dropout, documents.mask(sliding_window)).transpose(1, 2)
    return out.contiguous(), None


def _refuse_what_is_not_done_here(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    attention_mask: Tensor | None,
    sliding_window: int | None,
    kwargs: dict[str, Any],
) -> None:
    if query.shape[2] != key.shape[2]:
        raise RuntimeError("this attention has no key-value cache: generate inside attention.generation_mode(model)")
    extras = [name for name in ("softcap", "s_aux", "position_bias") if kwargs.get(name) is not None]
    if attention_mask is not None:
        extras.append("attention_mask")
    if getattr(module, "is_causal", True) is False or kwargs.get("is_causal") is False:
        extras.append("is_causal=False")
    if sliding_window is None and _is_sliding(module):
        extras.append("a sliding window that it doesn't pass on")
    if extras:
        raise UserError(
            f"{type(module).__name__} asks its attention for {', '.join(extras)}, which lmtrain's doesn't do: "
            f"set model.attention=transformers (and data.isolate_documents=false)"
        )


def _is_sliding(module: nn.Module) -> bool:
    types = getattr(getattr(module, "config", None), "layer_types", None)
    if types is None or SLIDING not in types:
        return False
    index = getattr(module, "layer_idx", None)
    return index is None or types[index] == SLIDING


@lru_cache(maxsize=8)
def _causal_mask(length: int, window: int | None, device: torch.device) -> Tensor:
    """[T, T] bool: query q (rows) sees key k (columns)."""
    position = torch.arange(length, device=device)
    distance = position.unsqueeze(1) - position  # q - k
    seen = distance >= 0
    return seen if window is None else seen & (distance < window)


def _causal(
    query: Tensor, key: Tensor, value: Tensor, scaling: float | None, dropout: float, window: int | None
) -> Tensor:
    length = query.shape[2]
    mask = None if window is None or window >= length else _causal_mask(length, window, query.device)
    return _sdpa(query, key, value, scaling, dropout, mask)


def _sdpa(
    query: Tensor, key: Tensor, value: Tensor, scaling: float | None, dropout: float, mask: Tensor | None
) -> Tensor:
    grouped = query.shape[1] != key.shape[1]
    if grouped and mask is not None:  # CUDA's fast kernels take grouped heads only without a mask
        key, value = _repeat_heads(key, query.shape[1], dim=1), _repeat_heads(value, query.shape[1], dim=1)
        grouped = False
    return F.scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=mask,
        dropout_p=dropout,
        is_causal=mask is None,
        scale=scaling,
        enable_gqa=grouped,
    )


def _repeat_heads(x: Tensor, heads: int, dim: int) -> Tensor:
    return x.repeat_interleave(heads // x.shape[dim], dim=dim)


def _flatten(x: Tensor) -> Tensor:
    """[B, H, T, D] to [B * T, H, D]: a view of what a projection gave, as its memory is [B, T, H, D]."""
    return x.transpose(1, 2).flatten(0, 1)


@torch.compiler.disable
def _slices(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scaling: float | None,
    dropout: float,
    window: int | None,
    documents: Documents,
) -> Tensor:
    batch, heads, seq_len, _ = query.shape
    sizes = [length * count for length, count in documents.runs]
    outputs = []
    # split, not slicing: its backward is one concatenation, a slice's is a zero tensor of the whole size each.
    splits = [_flatten(x).split(sizes) for x in (query, key, value)]
    for (length, count), q, k, v in zip(documents.runs, *splits, strict=True):
        q, k, v = (x.unflatten(0, (count, length)).transpose(1, 2) for x in (q, k, v))  # [count, H, length, D]
        outputs.append(_causal(q, k, v, scaling, dropout, window).transpose(1, 2).flatten(0, 1))
    return torch.cat(outputs).view(batch, seq_len, heads, -1)


def _varlen_documents(
    query: Tensor, key: Tensor, value: Tensor, scaling: float | None, window: int | None, documents: Documents
) -> Tensor:
    batch, heads, seq_len, _ = query.shape
    varlen_attn, parameters = _varlen()
    q, k, v = _flatten(query), _flatten(key), _flatten(value)
    options: dict[str, Any] = {"scale": scaling, "window_size": (-1 if window is None else window - 1, 0)}
    if heads != k.shape[1]:
        if "enable_gqa" in parameters:
            options["enable_gqa"] = True
        else:
            k, v = _repeat_heads(k, heads, dim=1), _repeat_heads(v, heads, dim=1)
    cu = documents.cu_seqlens
    # No document is longer than a row, and that bound is known without asking the GPU.
    return varlen_attn(q, k, v, cu, cu, seq_len, seq_len, **options).view(batch, seq_len, heads, -1)


@cache
def _compiled_flex() -> Any:
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention)


def _flex(query: Tensor, key: Tensor, value: Tensor, scaling: float | None, mask: Any) -> Tensor:
    return _compiled_flex()(
        query, key, value, block_mask=mask, scale=scaling, enable_gqa=query.shape[1] != key.shape[1]
    )


AttentionInterface.register(NAME, attention)


@contextmanager
def generation_mode(model: nn.Module) -> Iterator[None]:
    """Within it `model.generate` is right: transformers' own attention with its masks, nothing compiled anew.

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
