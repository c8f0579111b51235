"""Token ids of texts: by fastokens where it gives the ids of the tokenizers library, in about a thirtieth of its time.

fastokens reads a tokenizer.json by rules of its own, so it is used only after it gave the same ids on a sample of the
data and on a fixed list of texts that tokenizers often read differently.
"""

import functools
import itertools
import json
import random
from collections.abc import Callable
from typing import Any

import numpy as np
from tokenizers import Tokenizer
from transformers.convert_slow_tokenizer import bytes_to_unicode

from lmtrain.config import safe_yaml
from lmtrain.errors import first_line

try:
    import fastokens
except ImportError:  # there is no wheel for this machine
    fastokens = None

ENOUGH = 1 << 20  # characters; loading fastokens takes longer than it saves on less text
_SAMPLE, _SAMPLES = 4096, 8  # characters of a text, and texts, that are compared
_PARTS: list[str] = safe_yaml.table(__file__, "hostile.yaml")


@functools.cache
def hostile_texts(special: tuple[str, ...]) -> list[str]:
    """Returns short texts of controls, joiners, rare white space, many scripts and `special` tokens, and long runs."""
    draw = random.Random(0)
    parts = [*_PARTS, *special]
    pairs = ["".join(pair) for pair in itertools.product(("a", "1", " ", ".", "\n", "日"), parts)]
    mixed = ["".join(draw.choices(parts, k=draw.randint(1, 24))) for _ in range(400)]
    runs = [part * 600 for part in ("a", "1", " ", "\n", ".", "日", " \n", "\t", "\u0301", "\u200d", "ab", "'s")]
    return ["", *parts, *pairs, *mixed, *runs, *(f"x{run}y" for run in runs)]


class TextIds:
    """Gives texts the ids of a tokenizer, without adding special tokens; `by` is the library in use.

    It begins with the tokenizers library and tries to change to fastokens (`hurry`) once it was given ENOUGH text.
    Texts that fastokens refuses later on (its regular expressions have limits) are left to the tokenizers library.
    """

    has_threads = False  # whether one of them has tried fastokens, whose threads a forked process lacks

    def __init__(self, backend: Tokenizer) -> None:
        """backend: a tokenizer without truncation and padding; `encode_special_tokens` says how to read those."""
        self.by, self._backend = "tokenizers", backend
        self._fast: Callable[[list[str]], list[np.ndarray]] | None = None
        self._tried, self._characters = False, 0

    def __call__(self, texts: list[str]) -> list[np.ndarray]:
        """Returns the token ids of each text, uint32 [n]."""
        self._count(texts)
        if self._fast is not None:
            try:
                return self._fast(texts)
            except Exception as error:
                self.by = f"fastokens, but for texts that it refused: {first_line(error)}"
        encodings = self._backend.encode_batch_fast(texts, add_special_tokens=False)
        return [np.array(encoding.ids, dtype=np.uint32) for encoding in encodings]

    def of(self, text: str) -> list[int]:
        """Returns the token ids of a short text, by the tokenizers library, which has no threads to wake for it."""
        return list(self._backend.encode(text, add_special_tokens=False).ids)

    def with_offsets(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        """Returns the token ids of a text, and the characters [start, end) of each token.

        fastokens doesn't know the characters. Where its tokens' bytes are those of the text, they follow from them.
        """
        self._count([text])
        if self._fast is not None and self._token_bytes is not None:
            (found,), raw = self([text]), text.encode()
            ids: list[int] = found.tolist()
            if b"".join(map(self._token_bytes.__getitem__, ids)) == raw:
                return ids, _offsets(raw, self._token_lengths[found])
        encoding = self._backend.encode(text, add_special_tokens=False)
        return encoding.ids, encoding.offsets

    def _count(self, texts: list[str]) -> None:
        self._characters += sum(map(len, texts))
        if self._characters >= ENOUGH:
            self.hurry(texts)

    @functools.cached_property
    def _token_bytes(self) -> list[bytes] | None:
        """The bytes of each token of a byte-level tokenizer, None for others and if offsets leave out white space."""
        settings = json.loads(self._backend.to_str())
        if '"ByteLevel"' not in json.dumps(settings["pre_tokenizer"]) or settings["model"]["type"] != "BPE":
            return None
        if '"trim_offsets": true' in json.dumps(settings["post_processor"]):
            return None
        byte_of = {letter: byte for byte, letter in bytes_to_unicode().items()}
        table = [b"\xff"] * self._backend.get_vocab_size()  # a byte that no text has
        for token, i in self._backend.get_vocab(with_added_tokens=False).items():
            if all(letter in byte_of for letter in token):
                table[i] = bytes(byte_of[letter] for letter in token)
        for i, added in self._backend.get_added_tokens_decoder().items():
            table[i] = added.content.encode()
        return table

    @functools.cached_property
    def _token_lengths(self) -> np.ndarray:
        return np.array([len(token) for token in self._token_bytes or ()])

    def hurry(self, texts: list[str]) -> None:
        """Changes to fastokens, once, if it gives the same ids on the beginnings of `texts` and on hostile texts."""
        if self._tried:
            return
        self._tried = TextIds.has_threads = True
        special = {token.content for token in self._backend.get_added_tokens_decoder().values()}
        probes = [*hostile_texts(tuple(sorted(special)[:64])), *(text[:_SAMPLE] for text in texts[:_SAMPLES])]
        expected = [ids.tolist() for ids in self(probes)]
        try:
            fast = _fast(self._backend)
            same = [ids.tolist() for ids in fast(probes)] == expected
        except Exception as error:  # of any kind: it has none of its own
            self.by = f"tokenizers, as fastokens can't load this tokenizer ({first_line(error)})"
        else:
            self.by, self._fast = ("fastokens", fast) if same else ("tokenizers, as fastokens gives other ids", None)


def _fast(backend: Tokenizer) -> Callable[[list[str]], list[np.ndarray]]:
    """Returns fastokens' function from texts to ids; raises what fastokens raises for tokenizers it can't load."""
    if fastokens is None:
        raise ImportError("it is not installed")
    tokenizer: Any = fastokens.Tokenizer.from_json_str(backend.to_str())

    def encode(texts: list[str]) -> list[np.ndarray]:
        ids, ends = tokenizer.encode_batch_flat(texts, split_special_tokens=backend.encode_special_tokens)
        return np.split(np.frombuffer(ids, np.uint32), np.frombuffer(ends, np.uint64)[1:-1].astype(np.int64))

    return encode


def _offsets(raw: bytes, lengths: np.ndarray) -> list[tuple[int, int]]:
    """Returns the characters [start, end) of tokens of `lengths` bytes each, at least one, which together are `raw`."""
    ends = np.cumsum(lengths)
    starts = ends - lengths
    if not raw.isascii():
        character = np.cumsum((np.frombuffer(raw, np.uint8) & 0xC0) != 0x80) - 1  # of each byte
        starts, ends = character[starts], character[ends - 1] + 1
    return list(zip(starts.tolist(), ends.tolist(), strict=True))
