"""Packing: which examples share a row of seq_len tokens, by concatenation, greedy, first-fit or best-fit-decreasing.

Pure functions of the lengths and the seed, so the rows are the same whenever a run is started again.
"""

import bisect
from dataclasses import dataclass

import numpy as np


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
    """Lays examples into rows of `capacity` tokens.

    Args:
        lengths: int64 [n], tokens of each example, each at most `capacity` unless the method is concat.
        method: concat (one stream, cut where a row is full), greedy (in order; a new row where the next doesn't fit),
            first_fit (the first row with room), best_fit_decreasing (longest first, each into the fullest row with
            room for it; Johnson 1973).
        seed: examples are shuffled by it first; None leaves them in order.
    """
    order = np.arange(len(lengths)) if seed is None else np.random.default_rng(seed).permutation(len(lengths))
    if method == "concat":
        return _concat(lengths, capacity, order)
    if method == "best_fit_decreasing":
        order = order[np.argsort(-lengths[order], kind="stable")]
    place = {"greedy": _next_fit, "first_fit": _first_fit, "best_fit_decreasing": _best_fit}[method]
    row = np.array(place(lengths[order].tolist(), capacity), dtype=np.int64)
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
    first = np.searchsorted(begin, np.arange(0, total + capacity, capacity)[: -(-total // capacity) + 1])
    return Packing(first, order[holder], begin - begins[holder], end - begins[holder], capacity)


def _next_fit(lengths: list[int], capacity: int) -> list[int]:
    rows, row, room = [], -1, 0
    for length in lengths:
        if length > room:
            row, room = row + 1, capacity
        room -= length
        rows.append(row)
    return rows


def _first_fit(lengths: list[int], capacity: int) -> list[int]:
    """A tree of the largest room in each range of rows finds the first row with room in log(rows)."""
    leaves = 1 << max(0, len(lengths) - 1).bit_length()
    tree = [capacity] * (2 * leaves)
    rows = []
    for length in lengths:
        node = 1
        while node < leaves:
            node = 2 * node if tree[2 * node] >= length else 2 * node + 1
        rows.append(node - leaves)
        tree[node] -= length
        while node > 1:
            node //= 2
            tree[node] = max(tree[2 * node], tree[2 * node + 1])
    return rows


def _best_fit(lengths: list[int], capacity: int) -> list[int]:
    """Rows by their room: there are at most `capacity` different rooms, kept sorted."""
    with_room: dict[int, list[int]] = {}
    rooms: list[int] = []
    rows, opened = [], 0
    for length in lengths:
        at = bisect.bisect_left(rooms, length)
        if at == len(rooms):
            row, room = opened, capacity
            opened += 1
        else:
            room = rooms[at]
            row = with_room[room].pop()
            if not with_room[room]:
                del with_room[room], rooms[at]
        rows.append(row)
        left = room - length
        if left not in with_room:
            with_room[left] = []
            bisect.insort(rooms, left)
        with_room[left].append(row)
    return rows
