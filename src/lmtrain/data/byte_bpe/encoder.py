"""Vectorized byte-level BPE tokenizers: same ids as the tokenizers library, several times as fast.

Such a tokenizer splits a text into words by a regular expression and then tokenizes each word by itself. Here the words
are found by array operations (words.py) and looked up in a table (tables.py). Words missing from the table are
tokenized in one batch and added to it; words too long for the table are tokenized by the library.

Python and the library may classify a character differently (they have tables of different Unicode versions), so each
character is checked in both, next to other characters, before the first text that contains it is encoded here.
"""

import functools
import json
import unicodedata
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from lmtrain.data.byte_bpe import words
from lmtrain.data.byte_bpe.tables import (
    LETTERS,
    LONGEST,
    Merges,
    WordTable,
    is_plain,
    key_bytes,
    token_bytes,
    word_keys,
)

_PROBES = ("{0}", "{0}{0}", "a{0}a", "1{0}1", " {0} ", ".{0}.", "'{0}", "\n{0}\n", "  {0}")
_END = "\0"  # separates texts
_ROOM = _END * (LONGEST + 1)  # padding after the last text, for array operations that look ahead
_NEW = 255  # the kind of a character that has not been checked yet
_ASCII = bytes(words.kind_of(chr(n)) for n in range(128)) + bytes(128)
_IN_TABLE = 1 << 20  # maximum number of words in the table: up to 120 MB
_MANY = 1 << 17  # maximum number of cached words that are too long for the table
_LONG = 64  # bytes; longer words are not cached, as they rarely occur twice


class ByteBPE:
    """Encodes texts to the ids that the tokenizer gives without special tokens; see `covers`. Not thread-safe."""

    def __init__(self, backend: Tokenizer) -> None:
        """backend: a tokenizer for which `covers` is true."""
        settings: dict[str, Any] = json.loads(backend.to_str())
        model, begins = settings["model"], _begins(settings["pre_tokenizer"])
        assert begins is not None
        self._backend, self._begins = backend, begins
        self._nfc = settings["normalizer"] is not None
        self._kinds = np.full(0x110000, _NEW, dtype=np.uint8)  # the kind of each code point
        self._kinds[0] = words.END
        self._strange = {_END}  # texts with one of these characters are encoded by the library
        self._merges = Merges(model["vocab"], model["merges"])
        self._whole = model["vocab"] if model["ignore_merges"] else {}  # these words are tokens whatever merging gives
        self._table = self._new_table()
        self._cached = functools.lru_cache(_MANY)(self._tokenize)  # for words that the table can't hold
        self._learn("".join(map(chr, range(128))))

    @staticmethod
    def covers(backend: Tokenizer) -> bool:
        """Returns whether this class can reproduce the tokenizer's ids."""
        settings = json.loads(backend.to_str())
        plain = settings["normalizer"] is None or settings["normalizer"]["type"] == "NFC"
        added = any(not token["special"] for token in settings["added_tokens"])
        return plain and not added and is_plain(settings["model"]) and _begins(settings["pre_tokenizer"]) is not None

    def encode(self, texts: list[str]) -> list[np.ndarray]:
        """Returns the token ids of each text, uint32 [n]."""
        self._learn("".join(text for text in texts if not text.isascii()))
        found: dict[int, np.ndarray] = {}
        covered = [n for n, text in enumerate(texts) if self._covers(text)]
        for ascii_only in (True, False):  # separately: ASCII takes less work
            some = [n for n in covered if texts[n].isascii() is ascii_only]
            found |= zip(some, self._encode([texts[n] for n in some]), strict=True)
        rest = [n for n in range(len(texts)) if n not in found]
        encodings = self._backend.encode_batch_fast([texts[n] for n in rest], add_special_tokens=False)
        found |= {n: np.array(e.ids, dtype=np.uint32) for n, e in zip(rest, encodings, strict=True)}
        return [found[n] for n in range(len(texts))]

    def _covers(self, text: str) -> bool:
        """Returns whether `_encode` gives the tokenizer's ids for this text."""
        if self._nfc and not unicodedata.is_normalized("NFC", text):
            return False
        return not any(character in text for character in self._strange)

    def _encode(self, texts: list[str]) -> list[np.ndarray]:
        if not texts:
            return []
        joined = _END.join(texts) + _ROOM
        raw = joined.encode()
        begins, ends = self._find_words(joined, self._kinds, len(texts))
        if not joined.isascii():
            begins = np.flatnonzero((np.frombuffer(raw, np.uint8) & 0xC0) != 0x80)[begins]  # in bytes
        ids, counts = self._ids(raw, begins[:-1], np.diff(begins))
        return np.split(ids, np.cumsum(counts)[ends[:-1]])

    def _find_words(self, joined: str, kind_of: np.ndarray, texts: int) -> tuple[np.ndarray, np.ndarray]:
        """Returns the characters where words begin, and the indices of begins that are text ends; the last is one."""
        if joined.isascii():
            raw = joined.encode()
            characters, kinds = np.frombuffer(raw, np.uint8), np.frombuffer(raw.translate(_ASCII), np.uint8)
        else:
            characters = np.frombuffer(joined.encode("utf-32-le"), np.uint32)
            kinds = kind_of[characters]
        begins = np.flatnonzero(self._begins(characters, kinds))
        ends = np.flatnonzero(kinds[begins] == words.END)[:texts]
        return begins[: ends[-1] + 1], ends

    def _ids(self, raw: bytes, begins: np.ndarray, lengths: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Returns the ids of all words, and the number of ids of each word, which is 0 for the end of a text."""
        table, text = self._table, np.frombuffer(raw, np.uint8)
        keys = word_keys(text, begins, lengths)
        places, counts = table.find(keys)
        missing = np.flatnonzero((counts == 0) & (text[begins] != 0))
        short = missing[lengths[missing] <= LONGEST]
        if len(short):
            self._add(keys[:, short], lengths[short])
            places[short], counts[short] = table.find(keys[:, short])
            missing = missing[counts[missing] == 0]
        begin, end = begins[missing], begins[missing] + lengths[missing]
        rest = [raw[a:b] for a, b in zip(begin.tolist(), end.tolist(), strict=True)]
        theirs = [self._cached(word) if len(word) <= _LONG else self._tokenize(word) for word in rest]
        counts[missing] = [len(ids) for ids in theirs]
        ids = table.ids(_ranges(places, counts))
        at = np.cumsum(counts) - counts
        ids[_ranges(at[missing], counts[missing])] = [i for ids in theirs for i in ids]
        if len(table) > _IN_TABLE:
            self._table = self._new_table()
        return ids, counts

    def _add(self, keys: np.ndarray, lengths: np.ndarray) -> None:
        """Adds words missing from the table; they may repeat. Words with a byte that has no token are not added."""
        _, once = np.unique(keys[0] * np.uint64(31) ^ keys[1], return_index=True)  # of colliding words, only one
        keys = keys[:, once]
        ids, counts = self._merges.ids(key_bytes(keys), lengths[once])
        new = counts > 0
        self._table.add(keys[:, new], ids[np.repeat(new, counts)], counts[new])

    def _new_table(self) -> WordTable:
        tokens = {token_bytes(token): i for token, i in self._whole.items()}
        tokens = {word: i for word, i in tokens.items() if 0 < len(word) <= LONGEST and 0 not in word}
        lengths = np.array([len(word) for word in tokens], dtype=np.int64)
        text = np.frombuffer(b"".join(tokens) + bytes(LONGEST), np.uint8)
        table = WordTable()
        keys = word_keys(text, np.cumsum(lengths) - lengths, lengths)
        table.add(keys, np.array(list(tokens.values()), dtype=np.uint32), np.ones_like(lengths))
        return table

    def _tokenize(self, word: bytes) -> list[int]:
        """Returns the ids of a word from the library."""
        return [token.id for token in self._backend.model.tokenize(word.decode("latin-1").translate(LETTERS))]

    def _learn(self, text: str) -> None:
        """Checks the text's new characters: whether words next to other characters begin where the library's do."""
        codes = np.frombuffer(text.encode("utf-32-le"), np.uint32)
        codes = codes[self._kinds[codes] == _NEW]
        if not len(codes):
            return
        new = [chr(code) for code in np.unique(codes)]
        kinds = self._kinds.copy()
        kinds[[ord(character) for character in new]] = [words.kind_of(character) for character in new]
        probes = [probe.format(character) for character in new for probe in _PROBES]
        begins, ends = self._find_words(_END.join(probes) + _ROOM, kinds, len(probes))
        # The library may have a newer Unicode version, in which NFC changes characters that Python's has unassigned.
        strange = {c for c in new if self._nfc and unicodedata.category(c) == "Cn"}
        for n, found in enumerate(np.split(begins, ends[:-1] + 1)):
            expected = [begin for _, (begin, _) in self._backend.pre_tokenizer.pre_tokenize_str(probes[n])]
            if (found[:-1] - found[0]).tolist() != expected:
                strange.add(new[n // len(_PROBES)])
        self._strange, self._kinds = self._strange | strange, kinds


def _begins(pre_tokenizer: dict[str, Any] | None) -> words.Begins | None:
    """Returns the function that finds where this pre-tokenizer's words begin, or None if it is not supported."""
    if pre_tokenizer is None:
        return None
    *before, last = pre_tokenizer.get("pretokenizers", [pre_tokenizer])
    if last["type"] != "ByteLevel" or last["add_prefix_space"] or len(before) > 1:
        return None
    if not before:
        return words.gpt2 if last["use_regex"] else None
    first = before[0]
    if first["type"] == "Digits" and first["individual_digits"]:
        return words.gpt2_digits if last["use_regex"] else None
    if first["type"] != "Split" or first["behavior"] != "Isolated" or first["invert"] or last["use_regex"]:
        return None
    return words.PATTERNS.get(first["pattern"].get("Regex"))


def _ranges(begins: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """Returns the concatenated ranges begin, begin + 1, ... of `counts` numbers each, int64 [sum of counts]."""
    return np.repeat(begins - (np.cumsum(counts) - counts), counts) + np.arange(counts.sum())
