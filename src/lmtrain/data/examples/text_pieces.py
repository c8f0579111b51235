"""Documents of text as pieces of at most a row's length, to be packed whole or trained on one a row."""

import numpy as np

from lmtrain.data.examples.store import Examples
from lmtrain.data.text.shards import Shard
from lmtrain.errors import UserError


class TextPieces(Examples):
    """A document of up to `longest` tokens is one piece. Longer ones are cut, each piece beginning with the token that
    the one before it ends with: so every token but a document's first is predicted exactly once.

    Where documents begin and how they are cut is held in memory, about 40 bytes for each.
    """

    def __init__(self, shards: list[Shard], longest: int) -> None:
        """Raises UserError for bins that don't say where documents end, and rows of less than two tokens."""
        if longest < 2:
            raise UserError(f"data.seq_len={longest}: a packed row needs two tokens, one to see and one to predict")
        without = [shard.path for shard in shards if shard.docs is None]
        if without:
            raise UserError(
                f"{without[0]} comes without document borders (a .docs file), which data.packing needs: set "
                f"data.packing=null, or prepare the text with lmtrain"
            )
        super().__init__(shards)
        ends = np.union1d(
            self._starts[1:], self._shard_starts[1:]
        )  # a document longer than a shard goes on in the next
        starts = np.concatenate([[0], ends[:-1]])
        pieces = np.maximum(1, -(-(ends - starts - 1) // (longest - 1)))
        number = np.arange(pieces.sum()) - np.repeat(np.cumsum(pieces) - pieces, pieces)
        self._begin = np.repeat(starts, pieces) + number * (longest - 1)
        self._count = np.minimum(longest, np.repeat(ends, pieces) - self._begin)
        self._length = len(self._begin)
        self.lengths = self._count

    def read(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        """A piece's ids, int64 [T], all of them learned."""
        begin, count = int(self._begin[index]), int(self._count[index])
        shard = int(np.searchsorted(self._shard_starts, begin, side="right")) - 1
        ids = self.shards[shard].read(begin - int(self._shard_starts[shard]), count)
        return ids.astype(np.int64), np.ones(count, dtype=bool)

    def learned(self) -> np.ndarray:
        return self.lengths
