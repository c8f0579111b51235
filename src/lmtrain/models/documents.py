"""The boundaries of documents in packed rows, and the methods that keep attention within a document.

`model.attention` selects the method:
    auto        the fastest that works: slices on CPU; on CUDA varlen, or dense_mask if varlen is not supported
    slices      one scaled_dot_product_attention per document (0.4 of a full causal row's time on a CPU)
    varlen      torch.nn.attention.varlen: flash attention over all documents at once; CUDA of compute capability 8.0 or
                newer, bf16 or fp16, no dropout
    dense_mask  one scaled_dot_product_attention over whole rows with a mask [B, 1, T, T]
    sdpa        plain causal rows; refuses packed documents
    transformers  the model's own attention and masks; refuses packed documents
"""

from functools import cached_property, lru_cache
from itertools import groupby, pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lmtrain.errors import UserError

CHOICES = ("auto", "sdpa", "slices", "varlen", "dense_mask", "transformers")

ALONE = "let no row hold several (data.packing=off; for text data.isolate_documents=false)"
FLASH_CAPABILITY = (8, 0)  # flash attention's kernels need Ampere or newer, so not T4 (7.5) or V100 (7.0)
MERGED = 256  # tokens of short documents with one prefix that are one call of attention, though most don't see others


class Prefixes(NamedTuple):
    """Shared prefixes of consecutive documents, such as the prompt of some answers, which is stored only once.

    Document i attends, causally, to itself and to the first `lengths[i]` tokens of the last document before it that has
    no prefix (0: it has none itself).
    """

    lengths: Tensor  # [n_docs] int32
    kv_index: Tensor  # [K] int64: flattened positions of the keys that each document attends to, concatenated
    cu_kv: Tensor  # [n_docs + 1] int32: where each document's part of kv_index starts


# Documents whose attention is one call: the lengths of those of a row, how many such rows, and their prefix's length.
Piece = tuple[tuple[int, ...], int, int]


class Inputs(NamedTuple):
    """The rows of a micro-batch, as a LanguageModel reads them."""

    input_ids: Tensor  # [B, T] int64
    position_ids: Tensor | None = None  # [B, T] int64, a token's position in its document; None: counted along the row
    # [n_docs + 1] int32 starts of documents in the flattened B * T tokens, row boundaries included; None if each row is
    # one sequence.
    cu_seqlens: Tensor | None = None
    prefixes: Prefixes | None = None  # given if documents attend to a prefix of the previous one
    row_lengths: Tensor | None = None  # [B] int64, tokens of each row before its padding; None: there is no padding
    real: Tensor | None = None  # [n] int64, flattened positions of tokens other than padding; None: all are


def token_lengths(cu_seqlens: Tensor, rows: int, length: int, more: Tensor | None = None) -> Tensor:
    """Returns the length of the document that each token belongs to, int64 [rows, length].

    Args:
        more: [n_docs], what to add to the lengths of documents, such as those of their prefixes.
    """
    times = torch.diff(cu_seqlens).long()
    lengths = times if more is None else times + more
    return torch.repeat_interleave(lengths, times, output_size=rows * length).view(rows, length)


class Documents:
    """The document boundaries of one micro-batch, prepared for one attention method; created once per forward.

    Args:
        cu_seqlens: [n_docs + 1] int32, starts of the documents in the flattened batch * seq_len tokens; row boundaries
            are document boundaries, the first value is 0, the last batch * seq_len.
        batch: rows of the micro-batch.
        seq_len: tokens per row.
        method: slices, varlen or dense_mask, from `choose_method`.
        prefixes: None if no document attends to another. With prefixes, empty documents are not allowed.
        bias_dtype: dtype of attention's matrix products: dense_mask then builds the additive bias once. None: a bool
            mask, which scaled_dot_product_attention converts to such a bias in every layer and keeps for the backward.
        reach: how many tokens before the current one the model's short convolutions read, for `shifted`.
    """

    def __init__(
        self,
        cu_seqlens: Tensor,
        batch: int,
        seq_len: int,
        method: str,
        prefixes: Prefixes | None = None,
        bias_dtype: torch.dtype | None = None,
        reach: int = 0,
    ) -> None:
        self.cu_seqlens, self.batch, self.seq_len, self.method = cu_seqlens, batch, seq_len, method
        self.prefixes, self.bias_dtype = prefixes, bias_dtype
        self._masks: dict[Any, Any] = {}
        self._rows: tuple[list[Tensor], Tensor] | None = None
        self._earlier = self._earlier_tokens(reach) if reach else None  # built here, outside compiled blocks
        self.pieces: list[Piece] = []  # for slices; consecutive documents of equal length, such as whole rows, are one
        if method == "slices":
            starts = cu_seqlens.tolist()
            lengths = [end - start for start, end in pairwise(starts) if end > start]
            if prefixes is None:
                self.pieces = [((length,), len(list(run)), 0) for length, run in groupby(lengths)]
            else:
                self.pieces = _merged(lengths, prefixes.lengths.tolist())
        elif method == "dense_mask":
            self.mask(None)  # built here, outside compiled blocks

    @cached_property
    def _token(self) -> Tensor:
        return torch.arange(self.batch * self.seq_len, device=self.cu_seqlens.device)

    @cached_property
    def token_document(self) -> Tensor:
        """The document of each token, int64 [batch, seq_len]."""
        return torch.bucketize(self._token, self.cu_seqlens[1:], right=True).view(self.batch, self.seq_len)

    def _keys(self) -> tuple[Tensor, Tensor]:
        """Returns (index, starts): the flattened positions of all tokens that each document sees, prefixes first."""
        if self.prefixes is not None:
            return self.prefixes.kv_index, self.prefixes.cu_kv
        return self._token, self.cu_seqlens

    def _earlier_tokens(self, reach: int) -> list[tuple[Tensor, Tensor]]:
        """Returns, for distances 1 to `reach`, the position of the token that far before each, and if it is seen."""
        index, starts = self._keys()
        document = self.token_document.flatten()
        # A document's own tokens are the last ones that it sees.
        at = (starts[document + 1] - self.cu_seqlens[document + 1]) + self._token
        seen = [(at - distance >= starts[document]).unsqueeze(1) for distance in range(1, reach + 1)]
        if self.prefixes is None:  # `shifted` needs no positions
            return [(index, visible) for visible in seen]
        return [(index[(at - 1 - i).clamp(min=0)], visible) for i, visible in enumerate(seen)]

    def shifted(self, x: Tensor, distance: int) -> Tensor:
        """Returns for each token of x [B * T, D] the one `distance` before it in its document or prefix, or zeros."""
        assert self._earlier is not None
        index, seen = self._earlier[distance - 1]
        # Rolling is faster than a gather, above all in the backward pass; tokens that wrap around are never seen.
        return (x.roll(distance, 0) if self.prefixes is None else x.index_select(0, index)) * seen

    def as_rows(self) -> tuple[list[Tensor], Tensor]:
        """Returns the documents as rows of their own, behind the prefixes that they see, in groups of similar lengths.

        The first value has for each group [rows, length] int64, the flattened positions of the rows' tokens; a shorter
        row repeats its last one. The second, [B * T] int64, has for each token its place in all groups, flattened.
        """
        if self._rows is None:
            index, starts = self._keys()
            seen, own = ([b - a for a, b in pairwise(x.tolist())] for x in (starts, self.cu_seqlens))
            begins = starts.tolist()
            documents = sorted((i for i, n in enumerate(own) if n), key=lambda i: _size_class(seen[i]))
            groups, places, offset = [], [torch.empty(0, dtype=torch.int64)] * len(own), 0
            for _, some in groupby(documents, key=lambda i: _size_class(seen[i])):
                group = list(some)
                length = max(seen[i] for i in group)
                tokens = torch.arange(length)
                rows = [begins[i] + tokens.clamp(max=seen[i] - 1) for i in group]
                groups.append(index[torch.stack(rows).to(index.device)])
                for row, i in enumerate(group):
                    places[i] = offset + row * length + torch.arange(seen[i] - own[i], seen[i])
                offset += len(group) * length
            self._rows = groups, torch.cat(places).to(index.device)
        return self._rows

    def mask(self, window: int | None) -> Tensor:
        """Returns the mask [B, 1, T, T] for layers with this sliding window, or with None for full attention."""
        if window not in self._masks:
            self._masks[window] = self._dense_mask(window)
        return self._masks[window]

    def prefixed_mask(self, lengths: tuple[int, ...], prefix: int, window: int | None) -> Tensor:
        """Returns a bool mask [T, prefix + T] of the keys that documents with one prefix, of T tokens together, see."""
        key = (lengths, prefix, window)
        if key not in self._masks:
            # The prefix is document -1.
            counts = torch.tensor((prefix, *lengths), dtype=torch.int64)
            document = torch.repeat_interleave(torch.arange(-1, len(lengths)), counts)
            position = torch.cat([torch.arange(prefix), *(prefix + torch.arange(length) for length in lengths)])
            distance = position[prefix:, None] - position
            seen = (distance >= 0) & ((document == document[prefix:, None]) | (document < 0))
            seen = seen if window is None else seen & (distance < window)
            self._masks[key] = seen.to(self.cu_seqlens.device)
        return self._masks[key]

    def _dense_mask(self, window: int | None) -> Tensor:
        document, token = self.token_document, self._token[: self.seq_len]
        # Positions within the token's own document, without its prefix; row boundaries are document boundaries.
        offset = self._token.view_as(document) - self.cu_seqlens[document]
        prefix, first = torch.zeros_like(document), document
        if self.prefixes is not None:
            number = torch.arange(len(self.cu_seqlens) - 1, device=document.device)
            prefix = self.prefixes.lengths[document]
            first = number.where(self.prefixes.lengths == 0, 0).cummax(0).values[document]  # where the prefix is
        # In the following [B, T, T] tensors, rows are queries and columns are keys.
        same = document.unsqueeze(2) == document.unsqueeze(1)
        before = (first.unsqueeze(2) == document.unsqueeze(1)) & (offset.unsqueeze(1) < prefix.unsqueeze(2))
        seen = (same & (token.unsqueeze(1) >= token)) | before
        if window is not None:
            # Prefix tokens keep the positions of their own document, which has no prefix itself.
            key_position = offset.unsqueeze(1) + torch.where(same, prefix.unsqueeze(1), 0)
            seen &= (offset + prefix).unsqueeze(2) - key_position < window
        seen = seen.unsqueeze(1)
        if self.bias_dtype is None:
            return seen
        return torch.zeros_like(seen, dtype=self.bias_dtype).masked_fill_(~seen, float("-inf"))


def _merged(lengths: list[int], prefixes: list[int]) -> list[Piece]:
    """Returns pieces of one row each; documents with one prefix share a piece while it is short."""
    found: list[Piece] = []
    for length, prefix in zip(lengths, prefixes, strict=True):
        held, _, seen = found[-1] if found else ((), 1, 0)
        if prefix and seen == prefix and sum(held) + length <= max(prefix, MERGED):
            found[-1] = ((*held, length), 1, prefix)
        else:
            found.append(((length,), 1, prefix))
    return found


def _size_class(length: int) -> int:
    """Returns the group of a document for `as_rows`: lengths up to 32, and above that up to each power of two."""
    return max(5, (length - 1).bit_length())


def choose_method(choice: str, device: torch.device, dtype: torch.dtype, dropout: float, plain: bool = True) -> str:
    """Returns the method that keeps documents apart: `choice`, or for auto the fastest one that is supported.

    Args:
        dtype: of the attention's matrix products; autocast's dtype if autocast is on.
        dropout: on attention weights, 0 outside training.
        plain: whether attention is a softmax of scaled scores without caps and sinks, as fused kernels compute it.

    Raises UserError if the chosen method can't keep documents apart or isn't supported here.
    """
    half = dtype in (torch.bfloat16, torch.float16)
    if choice == "auto":
        if device.type != "cuda" or not plain:
            return "slices"
        # Slices would have to wait for the GPU, to read the documents' lengths.
        return "varlen" if half and dropout == 0 and why_not_varlen(device) is None else "dense_mask"
    if choice in ("sdpa", "transformers"):
        raise UserError(f"model.attention={choice} can't isolate packed documents: set it to auto, or {ALONE}")
    if choice == "varlen":
        reason = why_not_varlen(device)
        if reason is None and not half:
            reason = f"needs trainer.precision=bf16-mixed, bf16-true or 16-mixed (here attention is {dtype})"
        elif reason is None and dropout > 0:
            reason = f"has no attention dropout (here {dropout}): set model.dropout=0"
        if reason is not None:
            raise UserError(f"model.attention=varlen {reason}; or set model.attention=auto")
    return choice


def why_not_varlen(device: torch.device) -> str | None:
    """Returns why torch's variable-length attention can't run on this device, or None if it can."""
    if device.type != "cuda":
        return f"needs CUDA and torch 2.11 or newer (here: {device.type}, torch {torch.__version__})"
    capability = torch.cuda.get_device_capability(device)
    if capability < FLASH_CAPABILITY:
        found = f"{torch.cuda.get_device_name(device)} has {capability[0]}.{capability[1]}"
        return f"needs a GPU of compute capability 8.0 or newer ({found})"
    return None


@lru_cache(maxsize=8)
def causal_mask(length: int, window: int | None, device: torch.device) -> Tensor:
    """Returns a bool mask [T, T]: whether query q (rows) may attend to key k (columns)."""
    position = torch.arange(length, device=device)
    distance = position.unsqueeze(1) - position  # q - k
    seen = distance >= 0
    return seen if window is None else seen & (distance < window)
