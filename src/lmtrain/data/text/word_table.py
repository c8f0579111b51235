"""Words of up to 16 bytes and their token ids, found for a whole array of words at once."""

import numpy as np

LONGEST = 16  # bytes of a word that a table can hold: two 64-bit keys
_KEEP = np.array([(1 << 8 * n) - 1 for n in range(9)], dtype=np.uint64)  # of eight bytes the first n
_MIX = np.array([0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F], dtype=np.uint64)  # odd numbers with well-spread bits
_COUNT_BITS = 5  # a word has at least a byte a token


class WordTable:
    """A hash table with linear probing. It never changes, so threads can read it: `with_words` makes a larger one."""

    def __init__(self, keys: np.ndarray, counts: np.ndarray, ids: np.ndarray, like: "WordTable | None" = None) -> None:
        """keys: each word's bytes, padded with zeros, uint64 [w, 2]; counts: of its ids, int64 [w]; ids: uint32 [n].

        The first words are found fastest. like: a table of the first of these words, which is copied where it is large
        enough for all.
        """
        self._keys, self._counts, self.ids = keys, counts, ids
        size = 1 << max(10, (2 * len(keys)).bit_length())
        self._shift, self._mask = np.uint64(65 - size.bit_length()), size - 1
        # Eight bytes, the other eight, and where the word's ids begin, then how many they are; 0: a free slot.
        self._first, self._second = np.zeros(size, np.uint64), np.zeros(size, np.uint64)
        self._places = np.zeros(size, np.int64)
        held = 0
        if like is not None and like._mask == self._mask:
            self._first, self._second, self._places = like._first.copy(), like._second.copy(), like._places.copy()
            held = len(like)
        places = (np.cumsum(counts) - counts) << _COUNT_BITS | counts
        self._insert(keys[held:, 0], keys[held:, 1], places[held:])

    @classmethod
    def empty(cls) -> "WordTable":
        return cls(np.empty((0, 2), np.uint64), np.empty(0, np.int64), np.empty(0, np.uint32))

    def __len__(self) -> int:
        return len(self._keys)

    def with_words(self, words: dict[bytes, list[int]]) -> "WordTable":
        """These words (without zero bytes, of LONGEST bytes at most, with an id at least) and their ids too."""
        text = b"".join(word.ljust(LONGEST, b"\0") for word in words)
        counts = np.array([len(ids) for ids in words.values()], dtype=np.int64)
        more = np.array([i for ids in words.values() for i in ids], dtype=np.uint32)
        return WordTable(
            np.concatenate([self._keys, np.frombuffer(text, "<u8").reshape(-1, 2)]),
            np.concatenate([self._counts, counts]),
            np.concatenate([self.ids, more]),
            like=self,
        )

    def find(self, text: np.ndarray, begins: np.ndarray, lengths: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Where in `ids` the ids of each word begin, and how many they are: 0 of a word that is not here.

        text: UTF-8, uint8 [n], with LONGEST bytes after the last word; begins, lengths: of its words in bytes, int64
        [w]. Both results int64 [w].
        """
        eights = np.ndarray(len(text) - 7, "<u8", text, strides=(1,))
        first = eights[begins] & _KEEP[np.minimum(lengths, 8)]
        second = eights[begins + 8] & _KEEP[np.clip(lengths - 8, 0, 8)]
        slots = self._slots(first, second)
        places, same = self._look(slots, first, second)
        found = np.where(same, places, 0)
        left = np.flatnonzero(~same & (places != 0))
        while len(left):  # at most half of the slots are taken
            slots[left] = (slots[left] + 1) & self._mask
            places, same = self._look(slots[left], first[left], second[left])
            found[left[same]] = places[same]
            left = left[~same & (places != 0)]
        found[lengths > LONGEST] = 0
        return found >> _COUNT_BITS, found & ((1 << _COUNT_BITS) - 1)

    def _insert(self, first: np.ndarray, second: np.ndarray, places: np.ndarray) -> None:
        slots = self._slots(first, second)
        left = np.arange(len(places))
        while len(left):
            free = left[self._places[slots[left]] == 0]
            taken, index = np.unique(slots[free], return_index=True)  # of several words the first gets a slot
            words = free[index]
            self._first[taken], self._second[taken], self._places[taken] = first[words], second[words], places[words]
            left = left[self._places[slots[left]] != places[left]]
            slots[left] = (slots[left] + 1) & self._mask

    def _slots(self, first: np.ndarray, second: np.ndarray) -> np.ndarray:
        return ((first * _MIX[0] ^ second * _MIX[1]) >> self._shift).astype(np.int64)

    def _look(self, slots: np.ndarray, first: np.ndarray, second: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        return self._places[slots], (self._first[slots] == first) & (self._second[slots] == second)
