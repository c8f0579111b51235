"""Words of up to 16 bytes and their token ids, found for a whole array of words at once."""

import numpy as np

from lmtrain.data.text.key_table import KeyTable

LONGEST = 16  # bytes of a word that a table can hold: two 64-bit keys
_KEEP = np.array([(1 << 8 * n) - 1 for n in range(9)], dtype=np.uint64)  # of eight bytes the first n
_COUNT_BITS = 5  # a word has at least a byte a token


class WordTable:
    def __init__(self) -> None:
        self._places = KeyTable()  # where a word's ids begin, then how many they are
        self._ids, self._used = np.empty(1 << 12, dtype=np.uint32), 0

    def __len__(self) -> int:
        return len(self._places)

    def find(self, keys: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Where the ids of each word begin, and how many they are: 0 of a word that isn't here. Both int64 [w].

        keys: of `word_keys`.
        """
        found = self._places.find(keys[0], keys[1])
        return found >> _COUNT_BITS, found & ((1 << _COUNT_BITS) - 1)

    def ids(self, places: np.ndarray) -> np.ndarray:
        """The ids that lie there, uint32 [n]; anything where nothing does."""
        return self._ids.take(places, mode="clip")

    def add(self, keys: np.ndarray, ids: np.ndarray, counts: np.ndarray) -> None:
        """Words that aren't here, each once, of LONGEST bytes at most: their ids one after another, one at least each.

        keys: of `word_keys`; ids: uint32 [n]; counts: how many each word has, int64 [w].
        """
        used = self._used + len(ids)
        if used > len(self._ids):
            self._ids = np.resize(self._ids, 2 * used)
        self._ids[self._used : used] = ids
        places = self._used + np.cumsum(counts) - counts
        self._places.add(keys[0], keys[1], places << _COUNT_BITS | counts)
        self._used = used


def word_keys(text: np.ndarray, begins: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """The keys of words, uint64 [2, w]: their bytes, none of them zero; those of longer words are in no table.

    text: UTF-8 without zero bytes, uint8 [n], with LONGEST bytes after the last word; begins, lengths: of its words, in
    bytes, int64 [w].
    """
    eights = np.ndarray(len(text) - 7, "<u8", text, strides=(1,))
    keys = np.empty((2, len(begins)), dtype=np.uint64)
    keys[0] = eights[begins] & _KEEP[np.minimum(lengths, 8)]
    keys[1] = ~(eights[begins + 8] & _KEEP[np.clip(lengths - 8, 0, 8)])  # eight bytes of 255 are no UTF-8
    keys[0, lengths > LONGEST] = 0
    return keys


def key_bytes(keys: np.ndarray) -> np.ndarray:
    """The bytes of the words with these keys, padded with zeros, uint8 [w, LONGEST]."""
    return np.stack([keys[0], ~keys[1]], axis=1).astype("<u8").view(np.uint8)
