"""A hash table that is searched and filled for whole arrays of keys at once."""

import numpy as np

_MIX = np.array([0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F], dtype=np.uint64)  # odd numbers with well-spread bits


class KeyTable:
    """From two 64-bit keys to a number, which is not zero; linear probing, at most half of the rows taken."""

    def __init__(self) -> None:
        self._rows = np.zeros((1024, 3), dtype=np.uint64)  # key, key, number; number 0: free
        self._held = 0

    def __len__(self) -> int:
        return self._held

    def find(self, first: np.ndarray, second: np.ndarray) -> np.ndarray:
        """The numbers of these keys (uint64 [n], each), 0 for those that are not here. int64 [n]."""
        rows = self._rows
        slots = _slots(rows, first, second)
        numbers, same = _look(rows, slots, first, second)
        found = np.where(same, numbers, 0)
        left = np.flatnonzero(~same & (numbers != 0))
        while len(left):
            slots[left] = (slots[left] + 1) & (len(rows) - 1)
            numbers, same = _look(rows, slots[left], first[left], second[left])
            found[left[same]] = numbers[same]
            left = left[~same & (numbers != 0)]
        return found.view(np.int64)

    def add(self, first: np.ndarray, second: np.ndarray, numbers: np.ndarray) -> None:
        """Keys that are not here, each once, with their numbers: integers [n]."""
        self._held += len(numbers)
        if 2 * self._held > len(self._rows):
            old = self._rows[self._rows[:, 2] != 0]
            self._rows = np.zeros((1 << (4 * self._held - 1).bit_length(), 3), dtype=np.uint64)
            _fill(self._rows, old[:, 0], old[:, 1], old[:, 2])
        _fill(self._rows, first, second, numbers.astype(np.uint64))


def _fill(rows: np.ndarray, first: np.ndarray, second: np.ndarray, numbers: np.ndarray) -> None:
    slots = _slots(rows, first, second)
    left = np.arange(len(numbers))
    placed = np.zeros(len(numbers), dtype=bool)
    while len(left):
        free = left[rows[slots[left], 2] == 0]
        taken, index = np.unique(slots[free], return_index=True)  # of several keys the first gets a slot
        keys = free[index]
        rows[taken, 0], rows[taken, 1], rows[taken, 2] = first[keys], second[keys], numbers[keys]
        placed[keys] = True
        left = left[~placed[left]]
        slots[left] = (slots[left] + 1) & (len(rows) - 1)


def _slots(rows: np.ndarray, first: np.ndarray, second: np.ndarray) -> np.ndarray:
    """Where to begin to look, int64 [n]."""
    shift = np.uint64(65 - len(rows).bit_length())
    return ((first * _MIX[0] ^ second * _MIX[1]) >> shift).astype(np.int64)


def _look(rows: np.ndarray, slots: np.ndarray, first: np.ndarray, second: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    seen = rows.take(slots, axis=0)
    return seen[:, 2], (seen[:, 0] == first) & (seen[:, 1] == second)
