"""Byte-level BPE tokenizers over arrays: the ids of the tokenizers library, several times as fast.

Such a tokenizer cuts a text into words by a regular expression and then tokenizes each word by itself. Here the words
are found by array operations (words.py) and looked up in a table (word_table.py); those that are not in it the library
tokenizes.

Python and the library may sort a character differently (they carry tables of different versions of Unicode), so each
character is tried in both, beside others, before the first text that has it is encoded here.
"""

import json
import threading
import unicodedata
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from lmtrain.data.text import words
from lmtrain.data.text.word_table import LONGEST, WordTable

# The letter that stands for each byte in such a vocabulary: itself where it can be seen, the next above 255 where not.
_SEEN = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
LETTERS = {byte: chr(byte) for byte in _SEEN}
LETTERS |= {byte: chr(256 + n) for n, byte in enumerate(b for b in range(256) if b not in _SEEN)}
_PROBES = ("{0}", "{0}{0}", "a{0}a", "1{0}1", " {0} ", ".{0}.", "'{0}", "\n{0}\n", "  {0}")
_END = "\0"  # between texts
_ROOM = _END * (LONGEST + 1)  # after the last, for what looks ahead
_NEW = 255  # the kind of a character that has not been tried
_ASCII = bytes(words.kind_of(chr(n)) for n in range(128)) + bytes(128)
_IN_TABLE = 1 << 20  # words: about 100 MB
_MANY = 1 << 17  # words beside it
_LONG = 64  # bytes; longer words hardly come twice


class ByteBPE:
    """Encodes texts as the tokenizer does without special tokens; see `of`. Threads may share one."""

    def __init__(self, backend: Tokenizer, begins: words.Begins, nfc: bool) -> None:
        """begins: where the tokenizer's words begin; nfc: it normalizes text to NFC."""
        self._backend, self._begins, self._nfc = backend, begins, nfc
        self._kinds = np.full(0x110000, _NEW, dtype=np.uint8)  # of each code point
        self._kinds[0] = words.END
        self._strange = {_END}  # characters whose texts the library encodes
        self._table = WordTable.empty()
        self._waiting: dict[bytes, list[int]] = {}  # words for the next table
        self._others: dict[bytes, list[int]] = {}  # words that no table holds
        self._lock = threading.RLock()
        self._learn("".join(map(chr, range(128))))

    @classmethod
    def of(cls, backend: Tokenizer) -> "ByteBPE | None":
        """The same tokenizer; None for one of another kind."""
        settings = json.loads(backend.to_str())
        begins = _begins(settings["pre_tokenizer"])
        nfc = (settings["normalizer"] or {}).get("type") == "NFC"
        plain = nfc or settings["normalizer"] is None
        random = settings["model"].get("dropout")
        if begins is None or not plain or random or not all(token["special"] for token in settings["added_tokens"]):
            return None
        return cls(backend, begins, nfc)

    def encode(self, texts: list[str]) -> list[np.ndarray]:
        """The token ids of each text, uint32 [n]. Other threads run meanwhile."""
        self._learn("".join(text for text in texts if not text.isascii()))
        found: dict[int, np.ndarray] = {}
        covered = [n for n, text in enumerate(texts) if self._covers(text)]
        for ascii_only in (True, False):  # apart: ASCII takes less work
            some = [n for n in covered if texts[n].isascii() is ascii_only]
            found |= zip(some, self._encode([texts[n] for n in some]), strict=True)
        rest = [n for n in range(len(texts)) if n not in found]
        encodings = self._backend.encode_batch_fast([texts[n] for n in rest], add_special_tokens=False)
        found |= {n: np.array(e.ids, dtype=np.uint32) for n, e in zip(rest, encodings, strict=True)}
        return [found[n] for n in range(len(texts))]

    def _covers(self, text: str) -> bool:
        """Whether `_encode` gives the tokenizer's ids for this text."""
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
        """Where words begin, in characters, and which of these begins are the ends of texts; the last is one."""
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
        """The ids of all words, and how many each word has; none where it is the end of a text."""
        table, text = self._table, np.frombuffer(raw, np.uint8)
        places, counts = table.find(text, begins, lengths)
        missing = np.flatnonzero((counts == 0) & (text[begins] != 0))
        begin, end = begins[missing], begins[missing] + lengths[missing]
        theirs = self._look_up([raw[a:b] for a, b in zip(begin.tolist(), end.tolist(), strict=True)])
        counts[missing] = [len(ids) for ids in theirs]
        ids = table.ids.take(_ranges(places, counts), mode="clip") if len(table) else np.empty(counts.sum(), np.uint32)
        at = np.cumsum(counts) - counts
        ids[_ranges(at[missing], counts[missing])] = [i for ids in theirs for i in ids]
        return ids, counts

    def _look_up(self, missing: list[bytes]) -> list[list[int]]:
        """The ids of words that the table doesn't have."""
        waiting, others, tokenize = self._waiting, self._others, self._backend.model.tokenize
        found: list[list[int]] = []
        new: dict[bytes, list[int]] = {}
        for word in missing:
            ids = waiting.get(word) or others.get(word) or new.get(word)
            if ids is None:
                ids = new[word] = [token.id for token in tokenize(word.decode("latin-1").translate(LETTERS))]
            found.append(ids)
        if new:
            self._keep(new)
        return found

    def _keep(self, new: dict[bytes, list[int]]) -> None:
        """For later texts. What other threads may be reading is replaced, never shortened."""
        with self._lock:
            for word, ids in new.items():
                if len(word) <= LONGEST and ids:
                    self._waiting[word] = ids
                elif len(word) <= _LONG:
                    self._others[word] = ids
            if len(self._waiting) >= min(max(4096, len(self._table) // 8), _MANY):
                if len(self._table) < _IN_TABLE:
                    self._table = self._table.with_words(self._waiting)
                self._waiting = {}
            if len(self._others) >= _MANY:
                self._others = {}

    def _learn(self, text: str) -> None:
        """Tries the text's new characters: whether words end where the library's do, beside others of each kind."""
        codes = np.frombuffer(text.encode("utf-32-le"), np.uint32)
        codes = codes[self._kinds[codes] == _NEW]
        if not len(codes):
            return
        with self._lock:  # another thread may have tried them meanwhile: then they are tried again
            new = [chr(code) for code in np.unique(codes)]
            kinds = self._kinds.copy()
            kinds[[ord(character) for character in new]] = [words.kind_of(character) for character in new]
            probes = [probe.format(character) for character in new for probe in _PROBES]
            begins, ends = self._find_words(_END.join(probes) + _ROOM, kinds, len(probes))
            # In a newer Unicode, which the library may have, NFC may change what isn't assigned in Python's.
            strange = {c for c in new if self._nfc and unicodedata.category(c) == "Cn"}
            for n, found in enumerate(np.split(begins, ends[:-1] + 1)):
                expected = [begin for _, (begin, _) in self._backend.pre_tokenizer.pre_tokenize_str(probes[n])]
                if (found[:-1] - found[0]).tolist() != expected:
                    strange.add(new[n // len(_PROBES)])
            self._strange, self._kinds = self._strange | strange, kinds


def _begins(pre_tokenizer: dict[str, Any] | None) -> words.Begins | None:
    """Where the words begin that the pre-tokenizer makes; None for other kinds."""
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
    """begin, begin + 1, ... of each range, int64 [sum of counts]."""
    return np.repeat(begins - (np.cumsum(counts) - counts), counts) + np.arange(counts.sum())
