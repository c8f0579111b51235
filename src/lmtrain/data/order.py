"""Chooses the rows of optimizer step s: a pure function of (seed, step), so a run resumes by starting at step s.

The training stream is a sequence of epochs, each a permutation of all rows keyed by (seed, epoch). Step s takes the
rows s * G .. s * G + G - 1 of that stream (G: global batch size), whatever the number of devices; if the number of rows
per step grows (data.batch_warmup), a step begins where the steps before it end. The last step of a run that is limited
by epochs takes the rows that are left. Nothing is stored: the permutation is computed index by index (a Feistel network
with cycle walking; Black and Rogaway 2002, "Ciphers with arbitrary finite domains"), so a corpus of a trillion tokens
costs no memory.
"""

from collections.abc import Sequence
from fractions import Fraction
from functools import lru_cache
from typing import TYPE_CHECKING, Protocol

import numpy as np

if TYPE_CHECKING:
    import torch

_ROUNDS = 6
_BLOCK = 1024  # indices that are permuted at once: the few of a small step take numpy almost as long
_MASK64 = (1 << 64) - 1
MicroBatch = dict[str, "torch.Tensor"]


class Rows(Protocol):
    """The rows of a corpus: their number, micro-batches read by (epoch, row) pairs, and a row that trains nothing.

    Rows of different lengths, which are padded, also have `lengths`, int64 [rows]; rows of several text sources have
    `mixture`, which chooses the rows of each step. Rows whose loss compares each row with another one have `coupled`
    set to True: they are read by (epoch, row, other row). The other row is the previous one in the step or, in
    validation, among all validated rows; for the first row it is the last one.
    """

    def __len__(self) -> int: ...
    def read(self, rows: np.ndarray) -> MicroBatch: ...
    def empty(self) -> MicroBatch: ...


def mix64(*values: int) -> int:
    """Returns a well-mixed 64-bit hash of integers (splitmix64 finalizer, Steele et al. 2014, over each in turn)."""
    state = 0x9E3779B97F4A7C15
    for value in values:
        state = (state ^ (value & _MASK64)) * 0xBF58476D1CE4E5B9 & _MASK64
        state = (state ^ (state >> 27)) * 0x94D049BB133111EB & _MASK64
        state ^= state >> 31
    return state


def _round(half: np.ndarray, key: int) -> np.ndarray:
    """Applies the Feistel round function to uint64 values; wraps modulo 2**64."""
    x = half ^ np.uint64(key)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def permute(index: np.ndarray, size: int, seed: int, epoch: int) -> np.ndarray:
    """Returns the image of `index` (int64, each in [0, size)) under the epoch's permutation of range(size)."""
    if size <= 1:
        return index.copy()
    half_bits = ((size - 1).bit_length() + 1) // 2
    mask = np.uint64((1 << half_bits) - 1)
    shift = np.uint64(half_bits)
    keys = [mix64(seed, epoch, r) for r in range(_ROUNDS)]
    out = index.astype(np.uint64)
    todo = np.ones(len(out), dtype=bool)
    # The network permutes a power of four >= size; walking its cycle until we are back inside permutes range(size).
    while todo.any():
        x = out[todo]
        left, right = x >> shift, x & mask
        for key in keys:
            left, right = right, left ^ (_round(right, key) & mask)
        out[todo] = (left << shift) | right
        todo = out >= size
    return out.astype(np.int64)


def step_rows(step: int, *, rows: int, global_batch_size: int, seed: int, max_epochs: int | None = None) -> np.ndarray:
    """Returns the (epoch, row) pairs of global step `step`.

    Returns:
        int64 [n, 2]: column 0 is the epoch, column 1 the row in [0, rows); n is global_batch_size, or fewer (at least
        0) in the last step of a run that ends after max_epochs.
    """
    first = step * global_batch_size
    return stream_rows(first, first + global_batch_size, rows=rows, seed=seed, max_epochs=max_epochs)


def stream_rows(first: int, stop: int, *, rows: int, seed: int, max_epochs: int | None = None) -> np.ndarray:
    """Returns the (epoch, row) pairs at positions first .. stop - 1 of the stream, in the format of `step_rows`."""
    if max_epochs is not None:
        stop = min(stop, rows * max_epochs)
    found = np.empty((max(0, stop - first), 2), dtype=np.int64)
    done = 0
    while first + done < stop:
        epoch, index = divmod(first + done, rows)
        block, at = divmod(index, _BLOCK)
        row = _permuted(block, rows, seed, epoch)[at : at + len(found) - done]
        found[done : done + len(row), 0] = epoch
        found[done : done + len(row), 1] = row
        done += len(row)
    return found


@lru_cache(maxsize=2)
def _permuted(block: int, size: int, seed: int, epoch: int) -> np.ndarray:
    index = np.arange(block * _BLOCK, min((block + 1) * _BLOCK, size), dtype=np.int64)
    return permute(index, size, seed, epoch)


def rank_share(step_rows: np.ndarray, rank: int, world_size: int, micro_batch_size: int) -> list[np.ndarray]:
    """Returns this rank's micro-batches of a step, as arrays of rows [<= micro_batch_size, columns of step_rows].

    Every rank gets the same number of micro-batches (FSDP hangs otherwise); in a short step some may be short or empty.
    """
    mine = step_rows[rank::world_size]
    longest = -(-len(step_rows) // world_size)
    count = max(1, -(-longest // micro_batch_size))
    return [mine[i * micro_batch_size : (i + 1) * micro_batch_size] for i in range(count)]


def joins(longest: Sequence[int], size: int, most: int) -> list[int]:
    """Returns where to begin anew in joining consecutive micro-batches of `size` rows into larger ones, from 0 on.

    Short rows are so computed many at a time, which is several times as fast, and none needs more memory than full
    rows do.

    Args:
        longest: tokens of the longest row in each micro-batch, to which the others are padded.
        most: tokens that a joined micro-batch may have, its padding included.
    """
    starts, most_here = [0], 0
    for i, tokens in enumerate(longest):
        most_here = max(most_here, tokens)
        if i > starts[-1] and (i + 1 - starts[-1]) * size * most_here > most:
            starts.append(i)
            most_here = tokens
    return starts


def step_seed(seed: int, step: int, rank: int) -> int:
    """Returns the seed of everything random inside a step (dropout), so that no generator state needs saving."""
    return mix64(seed, 0x5EED, step, rank) >> 1  # 63 bits: torch takes a signed integer


class Repeats:
    """Concatenated sources, with each row of a source repeated by its weight: 2 for twice, 0.5 for every second row.

    Nothing is copied: the stored row at each index is computed.
    """

    def __init__(self, counts: Sequence[int], weights: Sequence[Fraction]) -> None:
        """counts: number of stored rows of each source, in order."""
        self.parts = [weight.as_integer_ratio() for weight in weights]
        self.first_stored = np.cumsum([0, *counts], dtype=np.int64)
        self.first = np.cumsum([0, *(int(n * w) for n, w in zip(counts, weights, strict=True))], dtype=np.int64)

    def __len__(self) -> int:
        return int(self.first[-1])

    def stored(self, index: np.ndarray) -> np.ndarray:
        """Returns the stored rows for the row numbers `index`, int64, each in [0, len)."""
        source = np.searchsorted(self.first, index, side="right") - 1
        times, of = np.array(self.parts, dtype=np.int64)[source].T
        # A source's first n stored rows give int(n * weight) rows: find the last n for which that is at most `index`.
        return self.first_stored[source] + ((index - self.first[source] + 1) * of - 1) // times
