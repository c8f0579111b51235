"""Chooses the rows of step s from several sources by their weights, exact to about one row at every step.

The stream of rows is divided into stretches with constant shares: a new stretch begins where a weight changes and where
a source reaches its max_epochs. Within a stretch the list of sources is halved recursively; of the first n rows of a
group of sources, its second half gets round(n * its share). Thus the number of rows that each source has given before
any row, and the source of that row, follow from the row's number alone. Nothing is stored and nothing is copied.
"""

import bisect
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from lmtrain.config.batch import Stages
from lmtrain.data.order import mix64, permute
from lmtrain.errors import UserError

_ENDLESS = 2**48  # rows; a source that lasts longer counts as never used up


@dataclass(frozen=True)
class MixtureSource:
    """One source of a mixture.

    weights: sampling weights by the optimizer step from which each holds; the first holds from step 0.
    max_epochs: how often each of its rows is seen at most; None for no limit.
    """

    name: str
    rows: int
    weights: dict[int, float]
    max_epochs: float | None = None


@dataclass(frozen=True)
class Stretch:
    """Rows of the stream from `start` on with constant shares; `before`: rows each source gave earlier, int64 [S]."""

    start: int
    shares: tuple[float, ...]
    before: np.ndarray


class Mixture:
    """The order of rows from several sources: share of a source = weight * rows ** (1 / temperature), normalized.

    Rows are numbered over the concatenated sources. An epoch has as many rows as all sources together, whatever their
    shares; each source also has epochs of its own, in each of which every row occurs once.
    """

    def __init__(self, sources: Sequence[MixtureSource], sizes: Stages, temperature: float | None) -> None:
        """
        Args:
            sizes: number of rows in each step.
            temperature: if None, the shares are the weights alone.

        Raises:
            UserError: max_epochs leaves none of the sources that have a weight at step 0 a whole row.
        """
        self.sources, self.step_sizes = list(sources), sizes
        # How many rows each source may give in total.
        self.limits = [_ENDLESS if s.max_epochs is None else math.floor(s.max_epochs * s.rows) for s in sources]
        self.sizes = [1.0 if temperature is None else source.rows ** (1 / temperature) for source in sources]
        self.first_row = np.cumsum([0, *(source.rows for source in sources)])
        self.changes = sorted({step for source in sources for step in source.weights})
        self.end: int | None = None  # position at which all sources with a weight are used up
        self.stretches = self._stretches()
        if not self.stretches:
            rows = ", ".join(f"{source.name} {source.rows:,}" for source in self.sources)
            raise UserError(f"data.mixture: max_epochs leaves no row to begin with (rows: {rows}); raise it")

    def _stretches(self) -> list[Stretch]:
        found: list[Stretch] = []
        position, before = 0, np.zeros(len(self.sources), dtype=np.int64)
        while True:
            shares = self._shares(self.step_sizes.step_of(position), before)
            if not sum(shares):
                self.end = position
                return found
            found.append(Stretch(position, shares, before))
            changes = [self.step_sizes.before(step) - position for step in self.changes]
            length = min([n for n in changes if n > 0] + self._used_up_after(shares, before))
            if length >= _ENDLESS:
                return found
            position, before = position + length, before + split_evenly(length, shares)

    def _shares(self, step: int, before: np.ndarray) -> tuple[float, ...]:
        left = [limit - int(given) for limit, given in zip(self.limits, before, strict=True)]
        parts = [weight_at(source.weights, step) * size if rows > 0 else 0.0
                 for source, size, rows in zip(self.sources, self.sizes, left, strict=True)]  # fmt: skip
        return tuple(part / (sum(parts) or 1.0) for part in parts)

    def _used_up_after(self, shares: tuple[float, ...], before: np.ndarray) -> list[int]:
        """Returns for each source after how many rows of a stretch it is used up, _ENDLESS if it never is."""
        return [
            bisect.bisect_left(range(_ENDLESS), limit - int(before[s]), key=lambda n: int(split_evenly(n, shares)[s]))
            if share and limit < _ENDLESS else _ENDLESS
            for s, (share, limit) in enumerate(zip(shares, self.limits, strict=True))
        ]  # fmt: skip

    def rows_given(self, position: int) -> np.ndarray:
        """Returns how many of the first `position` rows of the stream came from each source, int64 [S]."""
        stretch = self.stretches[bisect.bisect_right(self.stretches, position, key=lambda s: s.start) - 1]
        return stretch.before + split_evenly(position - stretch.start, stretch.shares)

    def stream_rows(self, first: int, stop: int, *, seed: int, max_epochs: int | None = None) -> np.ndarray:
        """Returns the (epoch, row) pairs at positions first .. stop - 1, like `order.stream_rows`.

        The epoch is that of the row's source.
        """
        stop = min(stop, _ENDLESS if self.end is None else self.end)
        if max_epochs is not None:
            stop = min(stop, int(self.first_row[-1]) * max_epochs)
        parts = [np.empty((0, 2), dtype=np.int64)]
        ends = [stretch.start for stretch in self.stretches[1:]] + [_ENDLESS]
        for stretch, end in zip(self.stretches, ends, strict=True):
            numbers = np.arange(max(first, stretch.start), min(stop, end), dtype=np.int64) - stretch.start
            if len(numbers):
                source, index = draw(numbers, stretch.shares)
                parts.append(self._rows(source, index + stretch.before[source], seed))
        return np.concatenate(parts)

    def _rows(self, source: np.ndarray, index: np.ndarray, seed: int) -> np.ndarray:
        """Returns the (epoch, row) of the index-th row that each source gives."""
        sizes = np.diff(self.first_row)[source]
        epoch, row = np.divmod(index, sizes)
        for s, e in np.unique(np.stack([source, epoch], axis=1), axis=0):
            here = (source == s) & (epoch == e)
            row[here] = permute(row[here], self.sources[s].rows, mix64(seed, 0x317, int(s)), int(e))
        return np.stack([epoch, row + self.first_row[source]], axis=1)


def weight_at(weights: dict[int, float], step: int) -> float:
    return weights[max(s for s in weights if s <= step)]


def check_weights(sources: Sequence[dict[int, float]]) -> None:
    """Raises UserError if the weights of all sources are 0 from some step on."""
    for step in sorted({step for weights in sources for step in weights}):
        if not any(weight_at(weights, step) for weights in sources):
            raise UserError(f"data.mixture: all weights are 0 from step {step} on: give a source a weight above 0")


def split_evenly(number: int, shares: Sequence[float]) -> np.ndarray:
    """Returns how many of the first `number` rows of a stretch each source gives, int64 [S]; the sum is `number`."""
    if len(shares) == 1:
        return np.array([number], dtype=np.int64)
    half = len(shares) // 2
    right = int(_of_second_half(np.array([number]), shares, half)[0])
    return np.concatenate([split_evenly(number - right, shares[:half]), split_evenly(right, shares[half:])])


def draw(number: np.ndarray, shares: Sequence[float]) -> tuple[np.ndarray, np.ndarray]:
    """Returns the source of each row of a stretch, int64 [n], and how many rows of it come before, int64 [n]."""
    if len(shares) == 1:
        return np.zeros_like(number), number
    half = len(shares) // 2
    before = _of_second_half(number, shares, half)
    second = _of_second_half(number + 1, shares, half) > before
    source, index = np.empty_like(number), np.empty_like(number)
    source[~second], index[~second] = draw((number - before)[~second], shares[:half])
    source[second], index[second] = draw(before[second], shares[half:])
    source[second] += half
    return source, index


def _of_second_half(number: np.ndarray, shares: Sequence[float], half: int) -> np.ndarray:
    """Returns how many of a group's first `number` rows come from its second half: `number` * its share, rounded."""
    total = sum(shares)
    return np.floor(number * (sum(shares[half:]) / total if total else 0.0) + 0.5).astype(np.int64)
