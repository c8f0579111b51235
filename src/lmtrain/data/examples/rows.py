"""Rows of examples: one example each, padded to the longest of its micro-batch, or several packed into seq_len tokens.

Packing (concatenation, greedy, first-fit, best-fit-decreasing) is a pure function of the lengths and the seed, so a
restarted run gets the same rows.
"""

import bisect
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from lmtrain.config.schema import Config
from lmtrain.data.examples.documents import Examples
from lmtrain.data.order import Rows
from lmtrain.data.text.windows import IGNORE, documents_at
from lmtrain.errors import UserError


@dataclass(frozen=True)
class Packing:
    """Row r holds the pieces first[r] .. first[r + 1] - 1; piece p is tokens start[p] .. stop[p] - 1 of example[p]."""

    first: np.ndarray  # int64 [rows + 1]
    example: np.ndarray  # int64 [pieces]
    start: np.ndarray  # int64 [pieces]
    stop: np.ndarray  # int64 [pieces]
    capacity: int

    def __len__(self) -> int:
        return len(self.first) - 1

    @property
    def utilisation(self) -> float:
        """The share of slots that hold a token."""
        return float((self.stop - self.start).sum() / max(1, len(self) * self.capacity))


def pack(lengths: np.ndarray, capacity: int, method: str, seed: int | None) -> Packing:
    """Packs examples into rows of `capacity` tokens.

    Args:
        lengths: int64 [n], tokens of each example, each at most `capacity` unless the method is concat.
        method: concat (one stream, cut where a row is full), greedy (in order; a new row if the next doesn't fit),
            first_fit (the first row with room), best_fit_decreasing (longest first, each into the fullest row with
            room for it; Johnson 1973).
        seed: for shuffling the examples first; None keeps their order.
    """
    order = np.arange(len(lengths)) if seed is None else np.random.default_rng(seed).permutation(len(lengths))
    if method == "concat":
        return _concat(lengths, capacity, order)
    if method == "best_fit_decreasing":
        shorter = (capacity - lengths[order]).astype(np.min_scalar_type(capacity))  # 16 bits are sorted by radix
        order = order[np.argsort(shorter, kind="stable")]
    place = {"greedy": _next_fit, "first_fit": _first_fit, "best_fit_decreasing": _best_fit}[method]
    row = place(lengths[order], capacity)
    by_row = np.argsort(row, kind="stable")
    example = order[by_row]
    rows = int(row.max(initial=-1)) + 1
    first = np.searchsorted(row[by_row], np.arange(rows + 1))
    return Packing(first, example, np.zeros_like(example), lengths[example], capacity)


def _concat(lengths: np.ndarray, capacity: int, order: np.ndarray) -> Packing:
    ends = np.cumsum(lengths[order])
    begins = ends - lengths[order]
    total = int(ends[-1]) if len(ends) else 0
    cuts = np.arange(capacity, total, capacity)
    edges = np.unique(np.concatenate([begins, cuts, [total]]))
    begin, end = edges[:-1], edges[1:]
    holder = np.searchsorted(begins, begin, side="right") - 1
    first = np.searchsorted(begin, np.arange(0, total + capacity, capacity))
    return Packing(first, order[holder], begin - begins[holder], end - begins[holder], capacity)


def _next_fit(lengths: np.ndarray, capacity: int) -> np.ndarray:
    rows = []
    row = -1
    room = 0
    for length in lengths.tolist():
        if length > room:
            row, room = row + 1, capacity
        room -= length
        rows.append(row)
    return np.array(rows, dtype=np.int64)


def _first_fit(lengths: np.ndarray, capacity: int) -> np.ndarray:
    """Finds the first row with room in O(log(rows)) steps, by a tree of the largest room in each range of rows."""
    leaves = 1 << max(0, len(lengths) - 1).bit_length()
    tree = [capacity] * (2 * leaves)
    rows = []
    for length in lengths.tolist():
        node = 1
        while node < leaves:
            node = 2 * node if tree[2 * node] >= length else 2 * node + 1
        rows.append(node - leaves)
        tree[node] -= length
        while node > 1:
            node //= 2
            tree[node] = max(tree[2 * node], tree[2 * node + 1])
    return np.array(rows, dtype=np.int64)


def _best_fit(lengths: np.ndarray, capacity: int) -> np.ndarray:
    """Finds the fullest row with room in a sorted list of the room that rows have left, at most `capacity` values.

    Lengths descend. Examples of one length are placed at once: the fullest row with room takes as many as it holds, and
    so do all others with as much room.
    """
    with_room: dict[int, list[int]] = {}
    rooms: list[int] = []
    placed, opened = [np.empty(0, dtype=np.int64)], 0
    for length, count in zip(*(some[::-1].tolist() for some in np.unique(lengths, return_counts=True)), strict=True):
        while count:
            at = bisect.bisect_left(rooms, length)
            room = rooms[at] if at < len(rooms) else capacity
            each = min(count, room // length if length else count)
            if at < len(rooms):
                held = with_room[room]
                rows = held[: -1 - max(1, count // each) : -1]
                del held[-len(rows) :]
                if not held:
                    del with_room[room], rooms[at]
            else:
                rows = list(range(opened, opened + max(1, count // each)))
                opened += len(rows)
            placed.append(np.repeat(rows, each))
            count -= each * len(rows)
            left = room - each * length
            if left not in with_room:
                with_room[left] = []
                bisect.insort(rooms, left)
            with_room[left] += rows
    return np.concatenate(placed)


_MULTIPLE = 8  # the length of padded rows is rounded up to this, which is faster on matrix units


class PaddedRows:
    """Rows of one example each. Loaders batch rows of similar length (`lengths`), so there is little padding.

    No mask is needed: padding follows the example, and attention is causal.
    """

    def __init__(self, examples: Examples, *, by_length: bool = False) -> None:
        """by_length: sorts rows from short to long, for validation, where the order of rows doesn't matter."""
        self.examples = examples
        self.order = np.argsort(examples.lengths, kind="stable") if by_length else np.arange(len(examples))
        self.lengths = examples.lengths[self.order]

    def __len__(self) -> int:
        return len(self.examples)

    def read(self, rows: np.ndarray) -> dict[str, torch.Tensor]:
        """Returns a micro-batch for (epoch, row) pairs [B, 2].

        Returns:
            input_ids int64 [B, T]; labels int64 [B, T], shifted: labels[b, t] is token t + 1 if that is trained on,
            else IGNORE; learned int64 [n]: positions of labels in the B * T flattened tokens, so that logits are
            computed only there; row_lengths int64 [B]: number of tokens of each row that are not padding; seen int64
            []: their sum; real int64 [seen]: their positions in the B * T.
        """
        return padded([self.examples.read(int(self.order[row])) for _, row in rows], _MULTIPLE)

    def empty(self) -> dict[str, torch.Tensor]:
        return _empty(_MULTIPLE)


class PackedRows:
    """Rows of seq_len tokens that hold several examples, separated by cu_seqlens if `isolate_documents` is true."""

    def __init__(self, examples: Examples, packing: Packing, *, isolate_documents: bool) -> None:
        self.examples, self.packing, self.isolate_documents = examples, packing, isolate_documents
        self.padded = False

    def __len__(self) -> int:
        return len(self.packing)

    def pad(self) -> None:
        """Reads each example as a padded row of its own, for models that can't keep those of a row apart."""
        self.padded = self.isolate_documents

    @property
    def epoch_tokens(self) -> int:
        return int((self.packing.stop - self.packing.start).sum())

    def read(self, rows: np.ndarray) -> dict[str, torch.Tensor]:
        """Returns a micro-batch for (epoch, row) pairs [B, 2], T = seq_len.

        Returns:
            what `PaddedRows.read` returns; no label is the first token of an example. With isolation, position_ids
            int64 [B, T], restarting at each example, and cu_seqlens int32 [n + 1], the starts of examples (and of a
            row's empty end) in the B * T flattened tokens.
        """
        pack, length = self.packing, self.packing.capacity
        parts = [[self._piece(p) for p in range(int(pack.first[row]), int(pack.first[row + 1]))] for _, row in rows]
        if self.padded:
            return padded([piece for pieces in parts for piece in pieces], _MULTIPLE)
        joined = [(np.concatenate([i for i, _ in pieces]), np.concatenate([t for _, t in pieces])) for pieces in parts]
        batch = padded(joined, length)
        if not self.isolate_documents:
            return batch
        ends = [np.cumsum([len(ids) for ids, _ in pieces]) + b * length for b, pieces in enumerate(parts)]
        starts = np.union1d(np.concatenate(ends), np.arange(len(rows)) * length)
        return batch | documents_at(starts[starts < len(rows) * length], len(rows), length)

    def _piece(self, piece: int) -> tuple[np.ndarray, np.ndarray]:
        """Returns the ids of a piece of an example and its loss mask, without its first token, which none predicts."""
        part = slice(int(self.packing.start[piece]), int(self.packing.stop[piece]))
        ids, trained = (values[part] for values in self.examples.read(int(self.packing.example[piece])))
        return ids, trained & (np.arange(len(ids)) > 0)

    def empty(self) -> dict[str, torch.Tensor]:
        length = _MULTIPLE if self.padded else self.packing.capacity
        return _empty(length) | (documents_at([0], 1, length) if self.isolate_documents and not self.padded else {})


def example_rows(examples: Examples, config: Config, seed: int | None) -> tuple[Rows, str]:
    """Lays examples out in rows by data.packing; also describes how full they are. seed: None for validation."""
    data = config.data
    method = data.packing or "off"
    if method == "off":
        return PaddedRows(examples, by_length=seed is None), "one example a row, padded to the longest of its batch"
    longest = int(examples.lengths.max())
    if longest > data.seq_len and method != "concat":
        found = f"an example has {longest} tokens, more than a row of data.seq_len={data.seq_len}"
        raise UserError(f"{found}: raise it, lower data.max_length={data.max_length}, or set data.packing=concat")
    packing = pack(examples.lengths, data.seq_len, method, seed)
    isolated = "isolated" if data.isolate_documents else "seeing each other (data.isolate_documents=false)"
    words = (
        f"packed by {method}: {len(examples):,} examples in {len(packing):,} rows of {data.seq_len:,} tokens, "
        f"{packing.utilisation:.1%} full, {isolated}"
    )
    return PackedRows(examples, packing, isolate_documents=data.isolate_documents), words


def padded(parts: Sequence[tuple[np.ndarray, np.ndarray]], multiple: int = 1) -> dict[str, torch.Tensor]:
    """Lays out (ids, trained) as padded rows of a length that is a multiple of `multiple`; see `PaddedRows.read`."""
    lengths = np.array([len(ids) for ids, _ in parts])
    shape = len(parts), -(-int(lengths.max()) // multiple) * multiple
    input_ids, labels = np.zeros(shape, dtype=np.int64), np.full(shape, IGNORE, dtype=np.int64)
    for b, (ids, trained) in enumerate(parts):
        input_ids[b, : len(ids)] = ids
        labels[b, : len(ids) - 1] = np.where(trained[1:], ids[1:], IGNORE)
    return {
        "input_ids": torch.from_numpy(input_ids),
        "labels": torch.from_numpy(labels),
        "learned": torch.from_numpy(np.flatnonzero(labels != IGNORE)),
        "real": torch.from_numpy(np.flatnonzero(np.arange(shape[1]) < lengths[:, None])),
        "row_lengths": torch.from_numpy(lengths),
        "seen": torch.tensor(int(lengths.sum()), dtype=torch.int64),
    }


def _empty(length: int) -> dict[str, torch.Tensor]:
    """Returns a row of `length` tokens that trains nothing."""
    return padded([(np.zeros(length, np.int64), np.zeros(length, bool))]) | {"seen": torch.tensor(0, dtype=torch.int64)}
