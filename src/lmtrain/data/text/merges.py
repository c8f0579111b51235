"""The merges of a byte-level BPE, done in many short words at once."""

from typing import Any

import numpy as np

from lmtrain.data.text.key_table import KeyTable

# The letter that stands for each byte in such a vocabulary: itself where it can be seen, the next above 255 where not.
_SEEN = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
LETTERS = {byte: chr(byte) for byte in _SEEN}
LETTERS |= {byte: chr(256 + n) for n, byte in enumerate(b for b in range(256) if b not in _SEEN)}

_BYTES = {letter: byte for byte, letter in LETTERS.items()}
_NONE = 0xFFFFFFFF  # in the place of a token where there is none
_ANY = np.uint64(1)  # the second key, which pairs have no use for


def is_plain(model: dict[str, Any]) -> bool:
    """Whether `Merges` does what this model of a tokenizer.json does."""
    affixes = model.get("continuing_subword_prefix") or model.get("end_of_word_suffix")
    return model["type"] == "BPE" and not affixes and not model["dropout"]


def token_bytes(token: str) -> bytes:
    """What a token of the vocabulary stands for; nothing where it has other letters, as "<a b>" has."""
    return bytes(_BYTES[letter] for letter in token) if all(letter in _BYTES for letter in token) else b""


class Merges:
    """Begins with a token a byte and joins the pair that was learned first until no pair was (Sennrich et al. 2016)."""

    def __init__(self, vocabulary: dict[str, int], merges: list[list[str]]) -> None:
        """As tokenizer.json has them: ids of tokens, and pairs of tokens in the order in which they were learned."""
        self._of_byte = np.array([vocabulary.get(LETTERS[byte], _NONE) for byte in range(256)], dtype=np.uint32)
        self._never = len(merges)  # the rank of pairs that are not joined
        self._joined = np.array([vocabulary[a + b] for a, b in merges], dtype=np.uint32)  # by rank
        # Of a pair that comes twice the last rank counts, as in the library.
        ranks = {(vocabulary[a], vocabulary[b]): rank for rank, (a, b) in enumerate(merges)}
        pairs = np.array(list(ranks), dtype=np.uint32).reshape(-1, 2)
        self._ranks = KeyTable()
        self._ranks.add(*_keys(pairs[:, 0], pairs[:, 1]), np.array(list(ranks.values()), dtype=np.int64) + 1)

    def ids(self, words: np.ndarray, lengths: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The token ids of all words, uint32 [n], and how many each has, int64 [w].

        words: their bytes, uint8 [w, longest]; lengths: in bytes, at least 1, int64 [w]. A word with a byte that has no
        token has no ids here.
        """
        tokens = self._of_byte[words.T]  # [longest, w]: operations on all words at a place of theirs
        inside = np.arange(len(tokens))[:, None] < lengths
        without = ((tokens == _NONE) & inside).any(axis=0)
        tokens[~inside | without] = _NONE
        ranks = self._find(tokens[:-1], tokens[1:])  # of each token with the one after it, [longest - 1, w]
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
        """In each word the tokens `at` and `at + 1` become one, and those after them move a place to the front."""
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
        """The rank of each pair, int32; `_never` for a pair that is never joined."""
        ranks = np.full(left.shape, self._never, dtype=np.int32)
        both = right != _NONE
        found = self._ranks.find(*_keys(left[both], right[both])) - 1
        ranks[both] = np.where(found < 0, self._never, found)
        return ranks


def _keys(left: np.ndarray, right: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    key = left.astype(np.uint64) << np.uint64(32) | right
    return key + _ANY, np.full(len(key), _ANY)
