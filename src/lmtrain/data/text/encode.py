"""Converts documents to token ids, with bounded memory, on all cores.

A long document is cut into segments that are tokenized separately. A cut is made only where tokenizers end a word
anyway: after a newline before a letter or digit, or behind a letter or digit before white space or a symbol other than
an apostrophe; and only where tokenizing the surroundings whole and in two parts gives the same ids. A segment after a
cut is tokenized with a word that it can't continue before it ("\\n" or "a", by its first character), whose ids are then
dropped, so that tokenizers that treat the start of a text specially (Llama's puts a space there) don't see the segment
as one.
"""

import re
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple

import numpy as np
from transformers import PreTrainedTokenizerFast

from lmtrain.config.schema_data import DataConfig
from lmtrain.data.fast_ids import TextIds
from lmtrain.data.framing import between_documents
from lmtrain.data.sources.pieces import Piece
from lmtrain.data.tokenizers import plain_backend, unknown_token
from lmtrain.errors import UserError

SEGMENT = 1 << 16  # characters; long enough that checking a cut is cheap, short enough to feed many threads
# Characters tokenized at a time: long arrays need few operations, but the tokenizers library takes about 100 bytes for
# each of their tokens.
PART = 1 << 20
_SURROUNDINGS = 48  # characters compared on either side of a cut: longer than any token
_TRIES = 8
# Where to cut: between lines or words, else, in text without such places, before other white space and symbols.
_CUTS = (re.compile(r"(?<=\S)\n(?=[^\W_])|(?<=[^\W_])(?= [^\W_])"), re.compile(r"(?<=[^\W_])(?=[^\w'’])"))


class Segment(NamedTuple):
    """A text that is tokenized as a whole; `continues` if it follows a cut, `ends` if it ends a document."""

    text: str
    continues: bool
    ends: bool


class EncodedSegment(NamedTuple):
    """Token ids [n] of a segment, the UTF-8 bytes and characters of its text, and whether it ends a document."""

    ids: np.ndarray
    text_bytes: int
    ends: bool
    characters: int


def make_encoder(tokenizer: PreTrainedTokenizerFast, cfg: DataConfig) -> "Encoder":
    """Builds the encoder of `cfg`, with what stands before documents (framing.py) and an end-of-text token after them.

    Raises:
        UserError: the tokenizer has no such token.
    """
    if cfg.append_eos and tokenizer.eos_token_id is None:
        raise UserError("the tokenizer has no end-of-text token: set data.append_eos=false, or choose one that has")
    return Encoder(tokenizer, tokenizer.eos_token_id if cfg.append_eos else None, between_documents(tokenizer, cfg))


class Encoder:
    """A tokenizer of streams of documents; special tokens that occur in the text are encoded as plain text."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast, eos_id: int | None, start: Sequence[int] = ()) -> None:
        """eos_id, start: the ids put after and before each document."""
        # "<|endoftext|>" written in a document is text, not the end of it
        self.ids = TextIds(plain_backend(tokenizer))
        end = [] if eos_id is None else [eos_id]
        self.start, self.eos = (np.array(ids, dtype=np.uint32) for ids in (start, end))
        self.unk = unknown_token(tokenizer)
        self.end: str | None = tokenizer.eos_token
        self.unknown = self.written_ends = 0  # how many of these tokens, and of these words, were found so far
        self.before = {text: self.ids.of(text) for text in ("\n", "a")}

    def encode(self, pieces: Iterable[Piece], continues: bool = False) -> Iterator[EncodedSegment]:
        """Yields the documents' token ids, in order; `continues` if the first piece begins at a cut in a document."""
        begun: tuple[list[Segment], Future[list[np.ndarray]]] | None = None  # encoded while the next part is read
        with ThreadPoolExecutor(1) as pool:
            for part in _parts(self.segments(pieces, continues), PART):
                found = pool.submit(self.ids, [_before(s.text) + s.text if s.continues else s.text for s in part])
                if begun is not None:
                    yield from self._finish(*begun)
                begun = part, found
            if begun is not None:
                yield from self._finish(*begun)

    def segments(self, pieces: Iterable[Piece], continues: bool = False) -> Iterator[Segment]:
        """Cuts documents where it doesn't change their tokens, into segments of SEGMENT characters or somewhat more."""
        text = ""
        done = searched = 0  # text[:done] has been yielded; there is no safe cut before `searched`
        for piece in pieces:
            text = text[done:] + piece.text
            searched = max(0, searched - done)
            done = 0
            while len(text) - done >= 2 * SEGMENT:
                cut = self._find_cut(text, max(done + SEGMENT, searched))
                if cut is None:  # wait for more text rather than change the tokens
                    searched = len(text) - _SURROUNDINGS
                    break
                yield Segment(text[done:cut], continues, ends=False)
                done, continues = cut, True
            if piece.ends:
                yield Segment(text[done:], continues, ends=True)
                text = ""
                continues = False
                done = 0
                searched = 0

    def _find_cut(self, text: str, start: int) -> int | None:
        """Returns where to cut, at `start` or later; None if no place was found, of _TRIES in each SEGMENT."""
        last = len(text) - _SURROUNDINGS
        for begin in range(start, last, SEGMENT):
            for pattern in _CUTS:
                found = pattern.finditer(text, begin, min(begin + SEGMENT, last))
                for _, match in zip(range(_TRIES), found, strict=False):
                    if self._is_safe(text, match.end()):
                        return match.end()
        return None

    def _is_safe(self, text: str, cut: int) -> bool:
        left, right = text[cut - _SURROUNDINGS : cut], text[cut : cut + _SURROUNDINGS]
        first = self.before[_before(right)]
        after = self.ids.of(_before(right) + right)
        starts_alike = after[: len(first)] == first
        return starts_alike and self.ids.of(left + right) == self.ids.of(left) + after[len(first) :]

    def _finish(self, part: list[Segment], found: Future[list[np.ndarray]]) -> Iterator[EncodedSegment]:
        for segment, ids in zip(part, found.result(), strict=True):
            ids = ids[len(self.before[_before(segment.text)]) :] if segment.continues else ids
            self.unknown += 0 if self.unk is None else int(np.count_nonzero(ids == self.unk))
            self.written_ends += segment.text.count(self.end) if self.end else 0
            ids = ids if segment.continues else np.concatenate([self.start, ids])
            ids = np.concatenate([ids, self.eos]) if segment.ends else ids
            yield EncodedSegment(ids, len(segment.text.encode()), segment.ends, len(segment.text))


def _before(text: str) -> str:
    """Returns what is put before a segment after a cut: a word that the segment doesn't continue."""
    return "\n" if text[:1].isalnum() else "a"


def _parts(segments: Iterable[Segment], least: int) -> Iterator[list[Segment]]:
    """Groups segments into parts of `least` characters or somewhat more."""
    part: list[Segment] = []
    size = 0
    for segment in segments:
        part.append(segment)
        size += len(segment.text)
        if size >= least:
            yield part
            part, size = [], 0
    if part:
        yield part
