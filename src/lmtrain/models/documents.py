"""Where documents lie in packed rows, and how they are kept apart.

`model.attention` says how:
    auto        the fastest that works: slices on CPU; on CUDA varlen, or block_mask where varlen can't be had
    slices      one scaled_dot_product_attention per document (0.4 of a full causal row's time on a CPU)
    varlen      torch.nn.attention.varlen: flash attention over all documents at once; CUDA, bf16 or fp16, no dropout
    block_mask  flex_attention on CUDA, elsewhere a dense mask
    sdpa        plain causal rows; refuses packed documents
    transformers  the model's own attention and masks; refuses packed documents
"""

import inspect
from functools import cache, lru_cache
from itertools import groupby, pairwise
from typing import Any

import torch
from torch import Tensor

from lmtrain.errors import UserError

CHOICES = ("auto", "sdpa", "slices", "varlen", "block_mask", "transformers")


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
            self.mask(None)  # here, so that a compiled block finds it made

    def mask(self, window: int | None) -> Any:
        """The mask of layers with this sliding window: a flex BlockMask on CUDA, else [B, 1, T, T] bool."""
        if window not in self._masks:
            make = self._flex_mask if self.cu_seqlens.is_cuda else self._dense_mask
            self._masks[window] = make(window)
        return self._masks[window]

    def _dense_mask(self, window: int | None) -> Tensor:
        document = self.token_document
        same = document.unsqueeze(2) == document.unsqueeze(1)  # [B, T, T]
        return (same & causal_mask(self.seq_len, window, document.device)).unsqueeze(1)

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
def varlen() -> tuple[Any, frozenset[str]]:
    """torch's varlen_attn and the names of its parameters, (None, {}) where it is absent or too old to scale."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return None, frozenset()
    parameters = frozenset(inspect.signature(varlen_attn).parameters)
    return (varlen_attn, parameters) if "window_size" in parameters else (None, frozenset())


def varlen_available() -> bool:
    """Whether this torch has variable-length attention with scale and window (2.11 and newer)."""
    return varlen()[0] is not None


@lru_cache(maxsize=8)
def causal_mask(length: int, window: int | None, device: torch.device) -> Tensor:
    """[T, T] bool: query q (rows) sees key k (columns)."""
    position = torch.arange(length, device=device)
    distance = position.unsqueeze(1) - position  # q - k
    seen = distance >= 0
    return seen if window is None else seen & (distance < window)
