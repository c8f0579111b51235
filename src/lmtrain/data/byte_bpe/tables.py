"""Vectorized lookup tables, searched and filled a whole array at a time: of keys, word ids and BPE merges."""

from typing import Any

import numpy as np

_MIX = np.array([0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F], dtype=np.uint64)  # odd numbers with well-spread bits


class KeyTable:
    """A hash table from pairs of 64-bit keys to nonzero numbers: linear probing, at most half of the rows in use."""

    def __init__(self) -> None:
        self._rows = np.zeros((1024, 3), dtype=np.uint64)  # key, key, number; number 0: free
        self._held = 0

    def __len__(self) -> int:
        return self._held

    def find(self, first: np.ndarray, second: np.ndarray) -> np.ndarray:
        """Returns the numbers of these keys (uint64 [n] each), int64 [n]; 0 for keys that are not in the table."""
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
        """Adds distinct keys that are not in the table yet, with their numbers: integers [n]."""
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
        taken, index = np.unique(slots[free], return_index=True)  # of several keys for a slot the first gets it
        keys = free[index]
        rows[taken, 0], rows[taken, 1], rows[taken, 2] = first[keys], second[keys], numbers[keys]
        placed[keys] = True
        left = left[~placed[left]]
        slots[left] = (slots[left] + 1) & (len(rows) - 1)


def _slots(rows: np.ndarray, first: np.ndarray, second: np.ndarray) -> np.ndarray:
    """Returns the slot at which the search for each key starts, int64 [n]."""
    shift = np.uint64(65 - len(rows).bit_length())
    return ((first * _MIX[0] ^ second * _MIX[1]) >> shift).astype(np.int64)


def _look(rows: np.ndarray, slots: np.ndarray, first: np.ndarray, second: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    seen = rows.take(slots, axis=0)
    return seen[:, 2], (seen[:, 0] == first) & (seen[:, 1] == second)


LONGEST = 16  # maximum number of bytes of a word in a table: they fit into two 64-bit keys
_KEEP = np.array([(1 << 8 * n) - 1 for n in range(9)], dtype=np.uint64)  # bit masks of the first n of eight bytes
_COUNT_BITS = 5  # holds a word's number of tokens, at most LONGEST: every token has at least one byte


class WordTable:
    def __init__(self) -> None:
        self._places = KeyTable()  # per word, where its ids begin, and in the lowest _COUNT_BITS their number
        self._ids, self._used = np.empty(1 << 12, dtype=np.uint32), 0

    def __len__(self) -> int:
        return len(self._places)

    def find(self, keys: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Returns where each word's ids begin, and their number, 0 for a word not in the table; both int64 [w].

        keys: from `word_keys`.
        """
        found = self._places.find(keys[0], keys[1])
        return found >> _COUNT_BITS, found & ((1 << _COUNT_BITS) - 1)

    def ids(self, places: np.ndarray) -> np.ndarray:
        """Returns the ids at these positions, uint32 [n]; arbitrary ids for positions where none are stored."""
        return self._ids.take(places, mode="clip")

    def add(self, keys: np.ndarray, ids: np.ndarray, counts: np.ndarray) -> None:
        """Adds distinct words of at most LONGEST bytes that are not in the table yet.

        keys: from `word_keys`; ids: of all words in turn, uint32 [n]; counts: ids per word, at least 1, int64 [w].
        """
        used = self._used + len(ids)
        if used > len(self._ids):
            self._ids = np.resize(self._ids, 2 * used)
        self._ids[self._used : used] = ids
        places = self._used + np.cumsum(counts) - counts
        self._places.add(keys[0], keys[1], places << _COUNT_BITS | counts)
        self._used = used


def word_keys(text: np.ndarray, begins: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Returns the keys of words, uint64 [2, w], made of their bytes; no table holds the key of a word over LONGEST.

    text: UTF-8 whose words have no zero bytes, uint8 [n], with LONGEST bytes after the last word; begins, lengths: of
    its words, in bytes, int64 [w].
    """
    eights = np.ndarray(len(text) - 7, "<u8", text, strides=(1,))
    keys = np.empty((2, len(begins)), dtype=np.uint64)
    keys[0] = eights[begins] & _KEEP[np.minimum(lengths, 8)]
    keys[1] = ~(eights[begins + 8] & _KEEP[np.clip(lengths - 8, 0, 8)])  # never 0: eight bytes of 255 are not UTF-8
    keys[0, lengths > LONGEST] = 0
    return keys


def key_bytes(keys: np.ndarray) -> np.ndarray:
    """Returns the bytes of the words with these keys, padded with zeros, uint8 [w, LONGEST]."""
    return np.stack([keys[0], ~keys[1]], axis=1).astype("<u8").view(np.uint8)


# The character for each byte in a byte-level vocabulary: the byte's own if it is visible, else the next from 256 on.
_SEEN = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
LETTERS = {byte: chr(byte) for byte in _SEEN}
LETTERS |= {byte: chr(256 + n) for n, byte in enumerate(b for b in range(256) if b not in _SEEN)}

_BYTES = {letter: byte for byte, letter in LETTERS.items()}
_NONE = 0xFFFFFFFF  # stands for the absence of a token
_ANY = np.uint64(1)  # the second key, which is the same for all pairs: the first identifies a pair


def is_plain(model: dict[str, Any]) -> bool:
    """Returns whether `Merges` implements this model of a tokenizer.json: a BPE without affixes or dropout."""
    affixes = model.get("continuing_subword_prefix") or model.get("end_of_word_suffix")
    return model["type"] == "BPE" and not affixes and not model["dropout"]


def token_bytes(token: str) -> bytes:
    """Returns the bytes of a vocabulary token, or none if a character stands for no byte, like the space in "<a b>"."""
    return bytes(_BYTES[letter] for letter in token) if all(letter in _BYTES for letter in token) else b""


class Merges:
    """BPE merging (Sennrich et al. 2016): one token per byte, then the earliest learned pair is joined repeatedly."""

    def __init__(self, vocabulary: dict[str, int], merges: list[list[str]]) -> None:
        """Takes ids of tokens, and pairs of tokens in the order in which they were learned, as in tokenizer.json."""
        self._of_byte = np.array([vocabulary.get(LETTERS[byte], _NONE) for byte in range(256)], dtype=np.uint32)
        self._never = len(merges)  # the rank of pairs that are not joined
        self._joined = np.array([vocabulary[a + b] for a, b in merges], dtype=np.uint32)  # by rank
        # If a pair occurs twice, its last rank counts, as in the library.
        ranks = {(vocabulary[a], vocabulary[b]): rank for rank, (a, b) in enumerate(merges)}
        pairs = np.array(list(ranks), dtype=np.uint32).reshape(-1, 2)
        self._ranks = KeyTable()
        self._ranks.add(*_keys(pairs[:, 0], pairs[:, 1]), np.array(list(ranks.values()), dtype=np.int64) + 1)

    def ids(self, words: np.ndarray, lengths: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Returns the token ids of all words, uint32 [n], and the number of ids of each word, int64 [w].

        words: their bytes, uint8 [w, longest]; lengths: in bytes, at least 1, int64 [w]. A word with a byte that has no
        token gets no ids.
        """
        tokens = self._of_byte[words.T]  # [longest, w]: vectorized over the words at each position
        inside = np.arange(len(tokens))[:, None] < lengths
        without = ((tokens == _NONE) & inside).any(axis=0)
        tokens[~inside | without] = _NONE
        ranks = self._find(tokens[:-1], tokens[1:])  # of each token and the next one, [longest - 1, w]
        left, done = np.arange(len(lengths)), tokens.copy()
        while len(left):
            at = ranks.argmin(axis=0)
            rank = ranks[at, np.arange(len(left))]
            more = rank < self._never
            done[:, left[~more]] = tokens[:, ~more]
            left, at, rank = left[more], at[more], rank[more]
            tokens, ranks = tokens.compress(more, axis=1), ranks.compress(more, axis=1)
            self._join(tokens, ranks, at, rank)
        ids = done.T
        return ids[ids != _NONE], np.count_nonzero(ids != _NONE, axis=1)

    def _join(self, tokens: np.ndarray, ranks: np.ndarray, at: np.ndarray, rank: np.ndarray) -> None:
        """Joins the tokens `at` and `at + 1` of each word in place, and moves those after them one position forward."""
        words = np.arange(len(at))
        behind = np.arange(len(tokens))[:, None] > at
        for array, empty in ((tokens, _NONE), (ranks, self._never)):
            np.copyto(array[:-1], array[1:].copy(), where=behind[: len(array) - 1])
            array[-1] = empty
        tokens[at, words] = self._joined[rank]
        ranks[at, words] = self._find(tokens[at, words], tokens[at + 1, words])
        words, at = words[at > 0], at[at > 0] - 1
        ranks[at, words] = self._find(tokens[at, words], tokens[at + 1, words])

    def _find(self, left: np.ndarray, right: np.ndarray) -> np.ndarray:
        """Returns the rank of each pair, int32; `_never` for a pair that is never joined."""
        ranks = np.full(left.shape, self._never, dtype=np.int32)
        both = right != _NONE
        found = self._ranks.find(*_keys(left[both], right[both])) - 1
        ranks[both] = np.where(found < 0, self._never, found)
        return ranks


def _keys(left: np.ndarray, right: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    key = left.astype(np.uint64) << np.uint64(32) | right
    return key + _ANY, np.full(len(key), _ANY)
