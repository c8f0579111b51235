"""Rows of token bins: windows of `seq_len` tokens with their labels, and document starts within a micro-batch."""

import itertools
from bisect import bisect_right
from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import torch

from lmtrain.data.mixing import Mixture
from lmtrain.data.order import mix64
from lmtrain.data.store.bins import Shard
from lmtrain.data.text.fim import FillInTheMiddle
from lmtrain.errors import UserError

IGNORE = -100  # label of tokens that are not trained on, torch's own default


class Windows:
    """All windows of a split.

    Each shard with T tokens is cut into windows of `seq_len` inputs; the label of a token is the one after it, so a
    window reads seq_len + 1 tokens. In training, the cut points move by an offset (less than a window) that is drawn
    anew for each epoch, so that epochs do not always cut the same sentences; every window appears exactly once per
    epoch.
    """

    def __init__(self, shards: list[Shard], seq_len: int, *, seed: int | None, isolate_documents: bool) -> None:
        self.shards, self.seq_len = shards, seq_len
        self.seed, self.isolate_documents = seed, isolate_documents
        self.mixture: Mixture | None = None  # chooses the rows of each step if the shards are of several sources
        self.fim: FillInTheMiddle | None = None  # rearranges documents as they are read
        counts = [self._windows_in(s.tokens) for s in shards]
        self.first_row = [0, *itertools.accumulate(counts)]  # of each shard, and the number of rows
        if len(self) == 0:
            tokens = max(s.tokens for s in shards)
            more = "use more text" if seed is not None else "hold out more with data.val_fraction"
            found = f"{shards[0].path} holds {tokens} tokens, fewer than one row of data.seq_len={seq_len}"
            raise UserError(f"{found} (and a label): set data.seq_len={max(1, tokens - 1)} or less, or {more}")

    def __len__(self) -> int:
        return self.first_row[-1]

    def _shifts(self, tokens: int) -> bool:
        return self.seed is not None and tokens >= 4 * self.seq_len

    def _windows_in(self, tokens: int) -> int:
        usable = tokens - 1 - (self.seq_len - 1 if self._shifts(tokens) else 0)
        return max(0, usable // self.seq_len)

    def _offset(self, shard: int, epoch: int) -> int:
        if self.seed is None or not self._shifts(self.shards[shard].tokens):
            return 0
        return _drawn(self.seed, epoch, shard) % self.seq_len

    def read(self, rows: np.ndarray) -> dict[str, torch.Tensor]:
        """Reads a micro-batch from (epoch, row) pairs [B, 2]; see `make_batch`."""
        places = [self._locate(epoch, row) for epoch, row in rows.tolist()]
        block, ends = read_places(places, self.seq_len, with_ends=self.isolate_documents or self.fim is not None)
        if self.fim is not None:
            for b, (epoch, row) in enumerate(rows.tolist()):
                block[b], ends[b] = self.fim.rearrange(block[b], ends[b], epoch, row)
        batch = make_batch(block, ends if self.isolate_documents else None)
        for b, (shard, start) in enumerate(places):
            if shard.mask is not None:
                batch["labels"][b, torch.from_numpy(~shard.read_mask(start + 1, self.seq_len))] = IGNORE
        return batch

    def _locate(self, epoch: int, row: int) -> tuple[Shard, int]:
        """Returns the shard of a row, and the index of the row's first token in it."""
        shard = bisect_right(self.first_row, row) - 1
        return self.shards[shard], (row - self.first_row[shard]) * self.seq_len + self._offset(shard, epoch)

    def empty(self) -> dict[str, torch.Tensor]:
        """Returns a row that trains nothing, for ranks that have no rows left in the last step."""
        return empty_window(self.seq_len, self.isolate_documents)


@lru_cache(maxsize=1024)
def _drawn(seed: int, epoch: int, shard: int) -> int:
    """Returns the random number from which the offset of a shard in an epoch follows."""
    return mix64(seed, 0x0FF5E7, epoch, shard)


def read_places(
    places: list[tuple[Shard, int]], seq_len: int, *, with_ends: bool
) -> tuple[np.ndarray, list[np.ndarray]]:
    """Reads the tokens of B rows, int64 [B, seq_len + 1], each given by a shard and its first token, and document ends.

    Returns: the tokens; with `with_ends`, for each row, ascending ends in 1 .. seq_len + 1, one past a document's last
    token.
    """
    block = np.empty((len(places), seq_len + 1), dtype=np.int64)
    ends = []
    for b, (shard, start) in enumerate(places):
        block[b] = shard.read(start, seq_len + 1)
        if with_ends:
            ends.append(shard.document_ends(start + 1, start + seq_len + 2) - start)
    return block, ends


def make_batch(block: np.ndarray, ends: list[np.ndarray] | None) -> dict[str, torch.Tensor]:
    """Builds a micro-batch of B rows of T tokens.

    Args:
        block: int64 [B, T + 1], with the label of the last token.
        ends: document ends from `read_places`, to isolate documents; None lets them attend to each other.

    Returns:
        input_ids int64 [B, T]; labels int64 [B, T], already shifted: labels[b, t] follows input_ids[b, t]. With
        isolated documents also position_ids int64 [B, T], restarting at each document, and cu_seqlens int32 [n + 1],
        the document starts in the B * T flattened tokens and their end; a label that would cross a document border is
        IGNORE.
    """
    # Copies, even of a single row, which is already contiguous: labels are modified in place.
    batch = {"input_ids": torch.from_numpy(block[:, :-1].copy()), "labels": torch.from_numpy(block[:, 1:].copy())}
    return batch if ends is None else batch | _isolate(batch["labels"], ends)


def empty_window(seq_len: int, isolate_documents: bool) -> dict[str, torch.Tensor]:
    """Returns a row [1, seq_len] that trains nothing, in the format of `make_batch`."""
    ends = [np.empty(0, dtype=np.int64)] if isolate_documents else None
    batch = make_batch(np.zeros((1, seq_len + 1), dtype=np.int64), ends)
    batch["labels"].fill_(IGNORE)
    return batch


def _isolate(labels: torch.Tensor, ends: list[np.ndarray]) -> dict[str, torch.Tensor]:
    """Masks, in place, labels that cross a document border; returns position_ids and cu_seqlens."""
    rows, seq_len = labels.shape
    starts = []
    for b, row_ends in enumerate(ends):
        borders = np.unique(row_ends[row_ends <= seq_len])
        labels[b, torch.from_numpy(borders - 1)] = IGNORE  # the target there is another document's first token
        starts.append(b * seq_len + np.concatenate([[0], borders[borders < seq_len]]))
    return documents_at(np.concatenate(starts), rows, seq_len)


def documents_at(starts: Sequence[int] | np.ndarray, rows: int, length: int) -> dict[str, torch.Tensor]:
    """Returns position_ids [rows, length] and cu_seqlens for the given starts of documents, ascending, the first 0."""
    borders = np.array([*starts, rows * length], dtype=np.int32)
    positions = np.arange(rows * length) - np.repeat(borders[:-1], np.diff(borders))
    return {
        "position_ids": torch.from_numpy(positions.astype(np.int64)).view(rows, length),
        "cu_seqlens": torch.from_numpy(borders),
    }


def cut_rows(batch: dict[str, torch.Tensor], length: int) -> dict[str, torch.Tensor]:
    """Cuts each row of a micro-batch of `Windows` into rows of `length` tokens, in their order.

    Args:
        batch: of [B, T] tokens; `length` divides T.

    Returns:
        The same batch as [B * T / length, length]: the last token of a shorter row keeps its label, the token after it.
        If documents are isolated, each row also begins a new document.
    """
    cut = {name: batch[name].reshape(-1, length) for name in ("input_ids", "labels")}
    if "cu_seqlens" not in batch:
        return cut
    tokens = batch["input_ids"].numel()
    starts = np.union1d(batch["cu_seqlens"][:-1].numpy(), np.arange(0, tokens, length))
    return cut | documents_at(starts, tokens // length, length)
