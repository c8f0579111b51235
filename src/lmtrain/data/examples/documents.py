"""Documents of token bins as examples: those with a loss mask, as often as weights say, or text in pieces of a row."""

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Iterator
from functools import cached_property
from typing import ClassVar

import numpy as np
import torch

from lmtrain.data.order import Repeats
from lmtrain.data.store import contents
from lmtrain.data.store.shards import Shard
from lmtrain.errors import UserError


class Examples:
    """A split's examples, read from disk as they are asked for."""

    def __init__(self, shards: list[Shard], repeats: Repeats | None = None, group: int = 1) -> None:
        """repeats: how often the examples of each source stand in it, `group` of them together; None: each once."""
        self.shards, self.repeats, self.group = shards, repeats, group
        self._starts = _starts(shards)  # int64 [stored + 1], over the tokens of all shards
        self._shard_starts = np.cumsum([0, *(shard.tokens for shard in shards)])
        stored = len(self._starts) - 1
        self._stored = None if repeats is None else self._stored_index(np.arange(len(repeats) * group))
        self._length = stored if self._stored is None else len(self._stored)

    def _stored_index(self, index: np.ndarray) -> np.ndarray:
        assert self.repeats is not None
        return self.repeats.stored(index // self.group) * self.group + index % self.group

    def __len__(self) -> int:
        return self._length

    def _of(self, stored: np.ndarray) -> np.ndarray:
        """What is known of each stored example, of each example."""
        return stored if self._stored is None else stored[self._stored]

    @cached_property
    def labels(self) -> np.ndarray:
        """What the row format said of each example besides its tokens, int64 [n]."""
        return self._of(np.concatenate([shard.read_labels() for shard in self.shards]))

    @cached_property
    def texts(self) -> list[str]:
        """What the row format kept of each example's row in words, a line each; empty where it kept nothing."""
        stored = [text for s in self.shards for text in (s.read_texts() if s.texts else [""] * s.documents)]
        return stored if self._stored is None else [stored[i] for i in self._stored]

    @cached_property
    def lengths(self) -> np.ndarray:
        """Tokens of each example, int64 [n]."""
        return self._of(np.diff(self._starts))

    @property
    def tokens(self) -> int:
        return int(self.lengths.sum())

    def learned(self) -> np.ndarray:
        """Learned tokens of each example, int64 [n]; reads all of their masks."""
        places = map(self._place, range(len(self._starts) - 1))
        counts = [np.count_nonzero(shard.read_mask(*span)) for shard, span in places]
        return self._of(np.array(counts, dtype=np.int64))

    def read(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        """An example's ids, int64 [T], and which of them are learned, bool [T]."""
        shard, span = self._place(index if self._stored is None else int(self._stored[index]))
        return shard.read(*span).astype(np.int64), shard.read_mask(*span)

    def _place(self, stored: int) -> tuple[Shard, tuple[int, int]]:
        """The shard of a stored example; its first token there, and how many they are."""
        start, stop = int(self._starts[stored]), int(self._starts[stored + 1])
        number = int(np.searchsorted(self._shard_starts, start, side="right")) - 1
        return self.shards[number], (start - int(self._shard_starts[number]), stop - start)


def _starts(shards: list[Shard]) -> np.ndarray:
    """Where each document starts, counted over all shards, and where the last one ends."""
    first, ends = 0, [np.zeros(1, dtype=np.int64)]
    for shard in shards:
        ends.append(shard.document_ends(1, shard.tokens + 1) + first)
        first += shard.tokens
    return np.concatenate(ends)


def earlier_fingerprints(splits: dict[str, Examples]) -> list[str]:
    """What checkpoints of earlier versions call these tokens: by the files that held them then, of fixed types."""
    as_one = hashlib.sha256()
    by_file = []
    for name, examples in splits.items():
        starts = np.concatenate([[0], np.cumsum(examples.lengths)]).astype("<i8").tobytes()
        ids, masks = hashlib.sha256(), hashlib.sha256()
        as_one.update(starts)
        for part in _parts(examples, 0, "<u4"):
            as_one.update(part)
            ids.update(part)
        for part in _parts(examples, 1, "u1"):
            as_one.update(part)
            masks.update(part)
        labelled = all(shard.labels is not None for shard in examples.shards)
        labels = [hashlib.sha256(examples.labels.astype("<i8").tobytes()).hexdigest()] if labelled else []
        by_file.append([name, ids.hexdigest(), masks.hexdigest(), hashlib.sha256(starts).hexdigest(), *labels])
    return [contents.fingerprint(by_file), as_one.hexdigest()[:16]]


def _parts(examples: Examples, which: int, dtype: str) -> Iterator[bytes]:
    return (examples.read(i)[which].astype(dtype).tobytes() for i in range(len(examples)))


class ExampleRows(ABC):
    """Row i is example i, or with `group` that many from i * group on; what rows of this kind share.

    unit: the name under which a micro-batch tells how many rows it weighs.
    """

    group: ClassVar[int] = 1
    unit: ClassVar[str]

    def __init__(self, examples: Examples) -> None:
        self.examples = examples

    def __len__(self) -> int:
        return len(self.examples) // self.group

    @property
    def epoch_tokens(self) -> int:
        """Tokens of all micro-batches of an epoch."""
        return self.examples.tokens

    @abstractmethod
    def read(self, rows: np.ndarray) -> dict[str, torch.Tensor]:
        """A micro-batch from (epoch, row) pairs."""

    def empty(self) -> dict[str, torch.Tensor]:
        """One that weighs nothing: the ranks of a step run equally many micro-batches."""
        batch = self.read(np.zeros((1, 2), dtype=np.int64))
        return {**batch, self.unit: torch.tensor(0), "seen": torch.tensor(0)}


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
