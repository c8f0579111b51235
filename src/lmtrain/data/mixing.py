"""Which rows of several sources make up step s: by their weights, to one row at every step, computed from the step.

The stream of rows is cut into stretches with constant shares: a new one begins where a weight changes. Within a stretch
the sources are halved again and again, and of the first n rows of a group the second half of it gets round(n * its
share): so how many rows each source has given before any row, and which source a row comes from, follow from the row's
number alone. Nothing is stored and nothing is copied.
"""

import bisect
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from lmtrain.config.batch import Stages
from lmtrain.data.order import mix64, permute
from lmtrain.errors import UserError


@dataclass(frozen=True)
class MixtureSource:
    """One source as the mixture sees it.

    weights: by the optimizer step from which each holds, the first from step 0.
    """

    name: str
    rows: int
    weights: dict[int, float]


@dataclass(frozen=True)
class Stretch:
    """Rows of the stream from `start` on, with constant shares; `before`: what each source gave before, int64 [S]."""

    start: int
    shares: tuple[float, ...]
    before: np.ndarray


class Mixture:
    """The order of rows from several sources: share of a source = weight * rows ** (1 / temperature), normalised.

    Rows are numbered over the sources one after the other. An epoch is as many rows as all of them hold together,
    whatever their shares; each source has epochs of its own, every row once in each.
    """

    def __init__(self, sources: Sequence[MixtureSource], sizes: Stages, temperature: float | None) -> None:
        """
        Args:
            sizes: rows of each step.
            temperature: None, and weights alone are the shares.
        """
        self.sources, self.step_sizes = list(sources), sizes
        self.sizes = [1.0 if temperature is None else source.rows ** (1 / temperature) for source in sources]
        self.first_row = np.cumsum([0, *(source.rows for source in sources)])
        self.changes = sorted({step for source in sources for step in source.weights})
        self.stretches = self._stretches()

    def _stretches(self) -> list[Stretch]:
        found: list[Stretch] = []
        before = np.zeros(len(self.sources), dtype=np.int64)
        for step in self.changes:
            start = self.step_sizes.before(step)
            if found:
                before = before + split_evenly(start - found[-1].start, found[-1].shares)
            parts = [weight_at(s.weights, step) * size for s, size in zip(self.sources, self.sizes, strict=True)]
            found.append(Stretch(start, tuple(part / sum(parts) for part in parts), before))
        return found

    def _stretch_of(self, position: int) -> Stretch:
        return self.stretches[bisect.bisect_right(self.stretches, position, key=lambda s: s.start) - 1]

    def rows_given(self, position: int) -> np.ndarray:
        """How many of the first `position` rows of the stream came from each source, int64 [S]."""
        stretch = self._stretch_of(position)
        return stretch.before + split_evenly(position - stretch.start, stretch.shares)

    def step_rows(self, step: int, *, seed: int, max_epochs: int | None = None) -> np.ndarray:
        """The (epoch, row) pairs of a step, as `order.step_rows` gives them; the epoch is that of the row's source."""
        first, stop = self.step_sizes.before(step), self.step_sizes.before(step + 1)
        if max_epochs is not None:
            stop = min(stop, int(self.first_row[-1]) * max_epochs)
        stretch = self._stretch_of(first)  # a step lies in one
        source, index = draw(np.arange(first, max(first, stop), dtype=np.int64) - stretch.start, stretch.shares)
        return self._rows(source, index + stretch.before[source], seed)

    def _rows(self, source: np.ndarray, index: np.ndarray, seed: int) -> np.ndarray:
        """(epoch, row) of the index-th row that each source gives."""
        sizes = np.diff(self.first_row)[source]
        epoch, row = np.divmod(index, sizes)
        for s, e in np.unique(np.stack([source, epoch], axis=1), axis=0):
            here = (source == s) & (epoch == e)
            row[here] = permute(row[here], self.sources[s].rows, mix64(seed, 0x317, int(s)), int(e))
        return np.stack([epoch, row + self.first_row[source]], axis=1)


def weight_at(weights: dict[int, float], step: int) -> float:
    return weights[max(s for s in weights if s <= step)]


def check_weights(sources: Sequence[dict[int, float]]) -> None:
    """Raises UserError where the weights of all sources are 0 from some step on."""
    for step in sorted({step for weights in sources for step in weights}):
        if not any(weight_at(weights, step) for weights in sources):
            raise UserError(
                f"data.mixture: all weights are 0 from step {step} on: give a source that is to be trained on a weight"
            )


def split_evenly(number: int, shares: Sequence[float]) -> np.ndarray:
    """How many of the first `number` rows of a stretch each source gives, int64 [S]; they add up to `number`."""
    if len(shares) == 1:
        return np.array([number], dtype=np.int64)
    half = len(shares) // 2
    right = int(_of_second_half(np.array([number]), shares, half)[0])
    return np.concatenate([split_evenly(number - right, shares[:half]), split_evenly(right, shares[half:])])


def draw(number: np.ndarray, shares: Sequence[float]) -> tuple[np.ndarray, np.ndarray]:
    """The source of each row of a stretch, int64 [n], and how many rows of that source come before it, int64 [n]."""
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
    """How many of the first rows of a group of sources come from its second half: its share of them, rounded."""
    total = sum(shares)
    return np.floor(number * (sum(shares[half:]) / total if total else 0.0) + 0.5).astype(np.int64)
