"""How much of the validation text stands word for word in the training text: what is learned by heart isn't new."""

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from lmtrain.data.store.bins import Shard

PIECE = 100  # bytes; a run of so many that is found twice was copied
_MOST = 1 << 23  # training tokens that are looked at, in half a second
_AT_ONCE = 1 << 20
_BASE = 0x9E3779B97F4A7C15  # odd, so it has an inverse modulo 2^64

Hashes = NDArray[np.uint64]


def share_seen(train: Sequence[Shard], val: Sequence[Shard], length: int) -> float:
    """The share of the validation shards' pieces of `length` tokens that the first _MOST training tokens hold too.

    Pieces follow one another in validation and begin at any token in training; they are compared by 64-bit polynomial
    hashes (Karp and Rabin 1987).
    """
    pieces = np.sort(np.concatenate([np.empty(0, np.uint64), *(h[::length] for h in _hashes(val, length))]))
    if len(pieces) == 0:
        return 0.0
    seen = np.zeros(len(pieces), dtype=bool)
    possible = np.zeros(1 << 16, dtype=bool)  # by the first 16 bits: few hashes are left to search for
    possible[pieces >> np.uint64(48)] = True
    for hashes in _hashes(train, length):
        found = hashes[possible[hashes >> np.uint64(48)]]
        places = np.searchsorted(pieces, found).clip(max=len(pieces) - 1)
        seen[places[pieces[places] == found]] = True
    return float(seen[np.searchsorted(pieces, pieces)].mean())  # of equal pieces, the first was marked


def _hashes(shards: Sequence[Shard], length: int) -> Iterator[Hashes]:
    """Hashes of the pieces that begin at each token, a part of a shard at a time."""
    most = _MOST
    for shard in shards:
        for start in range(0, min(shard.tokens, most), _AT_ONCE):
            read = min(_AT_ONCE + length - 1, shard.tokens - start)
            if read >= length:
                yield _rolling(shard.read(start, read), length)
        most -= shard.tokens


def _rolling(tokens: NDArray[np.int64], length: int) -> Hashes:
    """The hash of tokens[i : i + length] for each i: the sum of (token + 1) x BASE^j, modulo 2^64."""
    powers = np.full(len(tokens), _BASE, dtype=np.uint64).cumprod(dtype=np.uint64)
    inverse = np.full(len(tokens), pow(_BASE, -1, 1 << 64), dtype=np.uint64).cumprod(dtype=np.uint64)
    sums = np.concatenate(
        [np.zeros(1, np.uint64), ((tokens.astype(np.uint64) + np.uint64(1)) * powers).cumsum(dtype=np.uint64)]
    )
    count = len(tokens) - length + 1
    return (sums[length:] - sums[:count]) * inverse[:count]
