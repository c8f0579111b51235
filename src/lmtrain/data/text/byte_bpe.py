"""Byte-level BPE tokenizers computed by tiktoken: the ids of the tokenizers library, several times as fast.

tiktoken merges the neighbours whose union has the lowest rank (Sennrich et al. 2016); the tokenizers library merges the
pair that stands first in its list. Both give the same ids where each token's merges stand next to one another in the
list and the token's own text is tokenized as that token: two neighbours that give it can then only be the listed pair,
because neighbours in an encoding are also the encoding of their text alone. Tokens that no text gives are left out.

The two libraries' regular expressions may sort a character differently (they carry tables of different versions of
Unicode), so each character is tried in both before the first text that has it is encoded here.
"""

import json
import unicodedata
from typing import Any

import numpy as np
import tiktoken
from tokenizers import Tokenizer

# The letter that stands for each byte in such a vocabulary: itself where it can be seen, the next above 255 where not.
_SEEN = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
LETTERS = {byte: chr(byte) for byte in _SEEN}
LETTERS |= {byte: chr(256 + n) for n, byte in enumerate(b for b in range(256) if b not in _SEEN)}
_BYTES = {letter: byte for byte, letter in LETTERS.items()}
_NO_ID = 2**32 - 1
_LONGEST = 1 << 16  # characters: tiktoken gives up where it has to go back over a million (a run of spaces)
_PLAIN = {"continuing_subword_prefix": "", "end_of_word_suffix": "", "dropout": 0, "byte_fallback": False,
          "ignore_merges": False, "unk_token": ""}  # fmt: skip

GPT2 = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
# After `Digits`, which ends the white space before each digit.
GPT2_DIGITS = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+|\s+(?=\p{N})|\s+(?!\S)|\s+"
# `Split` patterns that leave no character out: Qwen2's and Qwen3's.
SPLITS = [
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
]
_PROBES = ("{0}", "{0}{0}", "a{0}a", "1{0}1", " {0} ", ".{0}.", "'{0}", "\n{0}\n", "  {0}")


class ByteBPE:
    """Encodes text as the tokenizer does without special tokens; see `of`."""

    def __init__(self, backend: Tokenizer, encoding: tiktoken.Encoding, ids: np.ndarray, nfc: bool) -> None:
        """ids: the tokenizer's id of each of `encoding`'s, uint32 [n]; nfc: the tokenizer normalizes text to NFC."""
        self._backend, self._encoding, self._ids, self._nfc = backend, encoding, ids, nfc
        self._known: set[str] = set()
        self._strange: set[str] = set()  # characters that the two treat differently

    @classmethod
    def of(cls, backend: Tokenizer) -> "ByteBPE | None":
        """The same tokenizer; None where it is of another kind or its merges are in no order that tiktoken knows."""
        settings = json.loads(backend.to_str())
        pattern = _pattern(settings["pre_tokenizer"])
        nfc = (settings["normalizer"] or {}).get("type") == "NFC"
        plain = nfc or settings["normalizer"] is None
        if pattern is None or not plain or not all(token["special"] for token in settings["added_tokens"]):
            return None
        found = _ranks(backend, settings["model"]) if settings["model"]["type"] == "BPE" else None
        if found is None:
            return None
        ranks, ids = found
        encoding = tiktoken.Encoding("lmtrain", pat_str=pattern, mergeable_ranks=ranks, special_tokens={})
        made = cls(backend, encoding, ids, nfc)
        made._try(set(map(chr, range(128))))
        return made

    def covers(self, text: str) -> bool:
        """Whether `encode` gives the tokenizer's ids for this text."""
        if len(text) > _LONGEST:
            return False
        if not text.isascii():
            if self._nfc and not unicodedata.is_normalized("NFC", text):
                return False
            if new := set(text) - self._known:
                self._try(new)
        return not any(character in text for character in self._strange)

    def encode(self, text: str) -> np.ndarray:
        """Token ids of a text that it covers, uint32 [n]. Other threads run meanwhile."""
        return self._ids[self._encoding.encode_to_numpy(text, disallowed_special=())]

    def _try(self, characters: set[str]) -> None:
        """Compares what both give for each character beside others of each kind."""
        ordered = sorted(characters)
        probes = [probe.format(character) for character in ordered for probe in _PROBES]
        expected = self._backend.encode_batch_fast(probes, add_special_tokens=False)
        for index, (text, encoding) in enumerate(zip(probes, expected, strict=True)):
            character = ordered[index // len(_PROBES)]
            unassigned = self._nfc and unicodedata.category(character) == "Cn"  # may compose in a newer Unicode
            if unassigned or self.encode(text).tolist() != encoding.ids:
                self._strange.add(character)
        self._known |= characters


def _pattern(pre_tokenizer: dict[str, Any] | None) -> str | None:
    """The one regular expression whose matches are the words that the pre-tokenizer makes; None for other kinds."""
    if pre_tokenizer is None:
        return None
    *before, last = pre_tokenizer.get("pretokenizers", [pre_tokenizer])
    if last["type"] != "ByteLevel" or last["add_prefix_space"] or len(before) > 1:
        return None
    if not before:
        return GPT2 if last["use_regex"] else None
    first = before[0]
    if first["type"] == "Digits" and first["individual_digits"]:
        return GPT2_DIGITS if last["use_regex"] else None
    isolated = first["type"] == "Split" and first["behavior"] == "Isolated" and not first["invert"]
    pattern = first["pattern"].get("Regex") if isolated else None
    return pattern if pattern in SPLITS and not last["use_regex"] else None


def _ranks(backend: Tokenizer, model: dict[str, Any]) -> tuple[dict[bytes, int], np.ndarray] | None:
    """The rank of each token's bytes, and the tokenizer's id for each rank; None for another order of merges."""
    if any((model.get(key) or plain) != plain for key, plain in _PLAIN.items()):
        return None
    vocabulary = model["vocab"]
    ranks = {bytes([byte]): byte for byte in range(256)}
    ids = [vocabulary.get(LETTERS[byte], _NO_ID) for byte in range(256)]
    last, seen = "", set(_BYTES)
    for left, right in model["merges"]:
        token = left + right
        if token == last:
            continue
        if token in seen or not _BYTES.keys() >= set(token):
            return None
        seen.add(token)
        last = token
        if [part.id for part in backend.model.tokenize(token)] == [vocabulary[token]]:
            ranks[bytes(_BYTES[letter] for letter in token)] = len(ids)
            ids.append(vocabulary[token])
    return ranks, np.array(ids, dtype=np.uint32)
