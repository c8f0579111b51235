"""Documents of token bins as examples: with a loss mask and repeated by weight, or text cut into pieces of a row."""

from abc import ABC, abstractmethod
from functools import cached_property
from typing import ClassVar

import numpy as np
import torch

from lmtrain.data.order import Repeats
from lmtrain.data.store.shards import Shard
from lmtrain.errors import UserError


class Examples:
    """The examples of a split, read from disk on demand."""

    def __init__(self, shards: list[Shard], repeats: Repeats | None = None, group: int = 1) -> None:
        """repeats: how often groups of `group` examples of each source occur in the split; None: each occurs once."""
        self.shards, self.group = shards, group
        self._shard_starts = np.cumsum([0, *(shard.tokens for shard in shards)])
        ends = [s.document_ends(1, s.tokens + 1) + first for s, first in zip(shards, self._shard_starts, strict=False)]
        starts = np.concatenate([[0], *ends])
        # Of each stored example, the first token, counted over all shards, and the number of tokens: int64 [stored].
        self._begin, self._count = starts[:-1], np.diff(starts)
        self._stored: np.ndarray | None = None  # the stored example of each example
        if repeats is not None:
            index = np.arange(len(repeats) * group)
            self._stored = repeats.stored(index // group) * group + index % group

    def __len__(self) -> int:
        return len(self._count if self._stored is None else self._stored)

    def of(self, chosen: np.ndarray) -> "Examples":
        """Returns those of the examples for which `chosen`, bool [n], is true."""
        found = Examples(self.shards, group=self.group)
        found._stored = self._of(np.arange(len(self._count)))[chosen]
        return found

    def place_of(self, stored: int) -> int | None:
        """Returns the first place at which a stored example occurs; None if it is left out."""
        if self._stored is None:
            return stored
        place = int(np.searchsorted(self._stored, stored))
        return place if place < len(self) and self._stored[place] == stored else None

    def _of(self, stored: np.ndarray) -> np.ndarray:
        """Maps an array with a value per stored example to one with a value per example, which may repeat."""
        return stored if self._stored is None else stored[self._stored]

    @cached_property
    def labels(self) -> np.ndarray:
        """The label that the row format gave each example, int64 [n]."""
        return self._of(np.concatenate([shard.read_labels() for shard in self.shards]))

    @cached_property
    def texts(self) -> list[str]:
        """The line of text that the row format kept of each example's row; empty if it kept none."""
        stored = [text for s in self.shards for text in (s.read_texts() if s.texts else [""] * s.documents)]
        return stored if self._stored is None else [stored[i] for i in self._stored]

    @cached_property
    def lengths(self) -> np.ndarray:
        """The number of tokens of each example, int64 [n]."""
        return self._of(self._count)

    @property
    def tokens(self) -> int:
        return int(self.lengths.sum())

    def learned(self) -> np.ndarray:
        """Returns the number of tokens trained on in each example, int64 [n]; reads all loss masks."""
        places = map(self._place, range(len(self._count)))
        counts = [np.count_nonzero(shard.read_mask(*span)) for shard, span in places]
        return self._of(np.array(counts, dtype=np.int64))

    def read(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        """Returns an example's ids, int64 [T], and its loss mask, bool [T]."""
        shard, span = self._place(index if self._stored is None else int(self._stored[index]))
        return shard.read(*span).astype(np.int64), shard.read_mask(*span)

    def _place(self, stored: int) -> tuple[Shard, tuple[int, int]]:
        """Returns the shard of a stored example, with its first token there and its number of tokens."""
        begin = int(self._begin[stored])
        number = int(np.searchsorted(self._shard_starts, begin, side="right")) - 1
        return self.shards[number], (begin - int(self._shard_starts[number]), int(self._count[stored]))


class ExampleRows(ABC):
    """The base class of rows that hold whole examples: row i holds `group` examples, from i * group on.

    unit: the key of a micro-batch under which it has its number of rows, which is its weight in the loss.
    learns: whether the examples' own tokens are trained on, as prompts are not.
    """

    group: ClassVar[int] = 1
    learns: ClassVar[bool] = True
    unit: ClassVar[str]

    def __init__(self, examples: Examples) -> None:
        self.examples = examples

    def __len__(self) -> int:
        return len(self.examples) // self.group

    @property
    def epoch_tokens(self) -> int:
        """The number of tokens in all micro-batches of an epoch."""
        return self.examples.tokens

    @abstractmethod
    def read(self, rows: np.ndarray) -> dict[str, torch.Tensor]:
        """Returns a micro-batch for (epoch, row) pairs."""

    def empty(self) -> dict[str, torch.Tensor]:
        """Returns a micro-batch with weight 0, because all ranks must run the same number of micro-batches per step."""
        batch = self.read(np.zeros((1, 2), dtype=np.int64))
        return {**batch, self.unit: torch.tensor(0, dtype=torch.int64), "seen": torch.tensor(0, dtype=torch.int64)}


class TextPieces(Examples):
    """Documents of text cut into pieces of up to `longest` tokens. Each further piece of a document begins with the
    last token of the piece before, so every token but a document's first is predicted exactly once.

    The starts and lengths of documents and pieces are held in memory, about 40 bytes for each.
    """

    def __init__(self, shards: list[Shard], longest: int) -> None:
        """Raises UserError for bins without document ends, and for rows of fewer than two tokens."""
        if longest < 2:
            raise UserError(f"data.seq_len={longest}: a packed row needs two tokens, one to see and one to predict")
        for shard in shards:
            shard.check_borders("data.packing=null")
        super().__init__(shards)
        # A document that continues in the next shard is cut at the border.
        ends, borders = self._begin + self._count, np.unique(self._shard_starts[1:])
        ends = ends[np.diff(ends, prepend=-1) > 0]  # ascending as they are: np.union1d would hash them all
        at = np.searchsorted(ends, borders)
        is_end = np.append(ends, -1)[at] == borders
        ends = np.insert(ends, at[~is_end], borders[~is_end])
        starts = np.concatenate([[0], ends[:-1]])
        pieces = np.maximum(1, -(-(ends - starts - 1) // (longest - 1)))
        number = np.arange(pieces.sum()) - np.repeat(np.cumsum(pieces) - pieces, pieces)
        self._begin = np.repeat(starts, pieces) + number * (longest - 1)
        self._count = np.minimum(longest, np.repeat(ends, pieces) - self._begin)

    def read(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        """Returns a piece's ids, int64 [T], and its loss mask, all true if the text has none, bool [T]."""
        shard, span = self._place(index)
        learned = np.ones(span[1], dtype=bool) if shard.mask is None else shard.read_mask(*span)
        return shard.read(*span).astype(np.int64), learned

    def learned(self) -> np.ndarray:
        return self.lengths if self.shards[0].mask is None else super().learned()
