"""Converts documents to token ids, with bounded memory, on all cores.

A long document is cut into segments that are tokenized separately. A cut is made only where tokenizers end a word
anyway (after a single newline before a letter or digit, or before a single space between two), and only where
tokenizing the surroundings whole and in two parts gives the same ids. A segment after a cut is tokenized with a newline
before it, whose ids are then dropped, so that tokenizers that treat the start of a text specially (Llama's puts a space
there) don't see the segment as one.
"""

import functools
import os
import re
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple

import numpy as np
from transformers import PreTrainedTokenizerFast

from lmtrain.config.schema_data import DataConfig
from lmtrain.data.byte_bpe.encoder import ByteBPE
from lmtrain.data.byte_bpe.processes import EncodeProcesses
from lmtrain.data.sources.pieces import Piece
from lmtrain.data.tokenizers import plain_backend, unknown_token
from lmtrain.errors import UserError

SEGMENT = 1 << 15  # characters; long enough that checking a cut is cheap, short enough to feed many threads
# Characters tokenized at a time: long arrays need few operations, but the tokenizers library takes about 100 bytes for
# each of their tokens.
PART = 1 << 20
_PROCESSES = 4  # more would wait for this process to read the text
_SURROUNDINGS = 48  # characters compared on either side of a cut: longer than any token
_TRIES = 8
_CUT = re.compile(r"(?<=\S)\n(?=[^\W_])|(?<=[^\W_])(?= [^\W_])")


class Segment(NamedTuple):
    """A text that is tokenized as a whole; `continues` if it follows a cut, `ends` if it ends a document."""

    text: str
    continues: bool
    ends: bool


_Found = list[np.ndarray]  # token ids of each segment, uint32 [n]
_Begun = tuple[list[Segment], Future[_Found]]


class EncodedSegment(NamedTuple):
    """Token ids [n] of a segment, the UTF-8 bytes and characters of its text, and whether it ends a document."""

    ids: np.ndarray
    text_bytes: int
    ends: bool
    characters: int


def make_encoder(tokenizer: PreTrainedTokenizerFast, cfg: DataConfig) -> "Encoder":
    """Builds the encoder of `cfg`: with or without an end-of-text token after documents, data.num_proc processes at
    most.

    Raises:
        UserError: the tokenizer has no end-of-text token.
    """
    if cfg.append_eos and tokenizer.eos_token_id is None:
        raise UserError(
            "the tokenizer has no end-of-text token to put after each document: set data.append_eos=false, or choose "
            "one that has"
        )
    return Encoder(tokenizer, tokenizer.eos_token_id if cfg.append_eos else None, cfg.num_proc)


class Encoder:
    """A tokenizer of streams of documents; special tokens that occur in the text are encoded as plain text."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast, eos_id: int | None, processes: int | None = None) -> None:
        """eos_id: the token put after each document, None for none; processes: their maximum, None for one per core."""
        self.backend = plain_backend(tokenizer)  # "<|endoftext|>" written in a document is text, not the end of it
        self.eos = np.array([] if eos_id is None else [eos_id], dtype=np.uint32)
        self.unk = unknown_token(tokenizer)
        self.unknown = 0  # how many of its tokens were found so far
        self.newline = self._ids("\n")
        self.processes = min(processes or os.cpu_count() or 1, _PROCESSES)

    @functools.cached_property
    def fast(self) -> bool:
        """Whether ByteBPE gives the same ids; for less text than a part it isn't worth starting its processes."""
        return ByteBPE.covers(self.backend)

    def encode(self, pieces: Iterable[Piece], continues: bool = False) -> Iterator[EncodedSegment]:
        """Yields the documents' token ids, in order; `continues` if the first piece begins at a cut in a document."""
        begun: deque[_Begun] = deque()  # parts being encoded while the next are read
        fast = False
        with EncodeProcesses(self.backend) as processes, ThreadPoolExecutor(self.processes) as pool:
            for part in _parts(self.segments(pieces, continues), PART):
                fast = fast or (sum(len(s.text) for s in part) >= PART and self.fast)
                if not fast:
                    yield from self._finish(part, self._by_library(part))
                    continue
                begun.append((part, pool.submit(processes.encode, _texts(part))))
                if len(begun) > 2 * self.processes:
                    yield from self._finish_first(begun)
            while begun:
                yield from self._finish_first(begun)

    def segments(self, pieces: Iterable[Piece], continues: bool = False) -> Iterator[Segment]:
        """Cuts documents where it doesn't change their tokens, into segments of SEGMENT characters or somewhat more."""
        text = ""
        done = searched = 0  # text[:done] has been yielded; there is no safe cut before `searched`
        for piece in pieces:
            text, searched, done = text[done:] + piece.text, max(0, searched - done), 0
            while len(text) - done >= 2 * SEGMENT:
                cut = self._find_cut(text, max(done + SEGMENT, searched))
                if cut is None:  # wait for more text rather than change the tokens
                    searched = len(text) - _SURROUNDINGS
                    break
                yield Segment(text[done:cut], continues, ends=False)
                done, continues = cut, True
            if piece.ends:
                yield Segment(text[done:], continues, ends=True)
                text, continues, done, searched = "", False, 0, 0

    def _find_cut(self, text: str, start: int) -> int | None:
        """Returns where to cut, at `start` or later; None if none of the first _TRIES candidates is safe."""
        for _, match in zip(range(_TRIES), _CUT.finditer(text, start, len(text) - _SURROUNDINGS), strict=False):
            cut = match.end()
            left, right = text[cut - _SURROUNDINGS : cut], text[cut : cut + _SURROUNDINGS]
            after = self._ids("\n" + right)
            starts_alike = after[: len(self.newline)] == self.newline
            if starts_alike and self._ids(left + right) == self._ids(left) + after[len(self.newline) :]:
                return cut
        return None

    def _ids(self, text: str) -> list[int]:
        return self.backend.encode(text, add_special_tokens=False).ids

    def _finish_first(self, begun: deque[_Begun]) -> Iterator[EncodedSegment]:
        part, found = begun.popleft()
        yield from self._finish(part, found.result())

    def _by_library(self, part: list[Segment]) -> _Found:
        # A separate method, so that the encodings, 100 bytes per token, are freed when it returns.
        encodings = self.backend.encode_batch_fast(_texts(part), add_special_tokens=False)
        return [np.array(e.ids, dtype=np.uint32) for e in encodings]

    def _finish(self, part: list[Segment], found: _Found) -> Iterator[EncodedSegment]:
        for segment, ids in zip(part, found, strict=True):
            ids = ids[len(self.newline) :] if segment.continues else ids
            self.unknown += 0 if self.unk is None else int(np.count_nonzero(ids == self.unk))
            ids = np.concatenate([ids, self.eos]) if segment.ends else ids
            yield EncodedSegment(ids, len(segment.text.encode()), segment.ends, len(segment.text))


def _texts(segments: list[Segment]) -> list[str]:
    return ["\n" + s.text if s.continues else s.text for s in segments]


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
