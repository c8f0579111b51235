"""A stream as token ids, from any place in it, epoch after epoch, and cut into shards of so many tokens."""

from collections import deque
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from lmtrain.data.sources.pieces import Piece
from lmtrain.data.stream.source import StreamSource
from lmtrain.data.text.encode import Encoder
from lmtrain.errors import ReadError, UserError


class Place(NamedTuple):
    """A token's place: `skip` tokens after a segment that begins `character` characters into a row of a part.

    inside: whether the segment goes on with a document. How a document is cut into segments from here on depends on
    nothing before, so reading from a place gives the tokens that reading from the beginning gives.
    """

    epoch: int = 0
    part: int = 0
    row: int = 0
    character: int = 0
    inside: bool = False
    skip: int = 0


class Segment(NamedTuple):
    """Token ids, uint32 [n]; whether a document ends with the last, the place of the first, the text's UTF-8 bytes."""

    ids: np.ndarray
    ends: bool
    place: Place
    text_bytes: int


class Shard(NamedTuple):
    """Token ids, uint32 [shard_tokens]; where documents end in it (exclusive, int64); the place of what follows."""

    ids: np.ndarray
    document_ends: np.ndarray
    end: Place


class _Reading:
    """The pieces of one epoch from a place on, and where the text that has come back from the encoder lay."""

    def __init__(self, source: StreamSource, start: Place) -> None:
        self.source, self.start = source, start
        self.blocks: deque[tuple[int, int, int, int]] = deque()  # part, row, first character of it read, how many
        self.done = 0  # characters of the first block that have come back
        self.error: ReadError | None = None  # where it broke off

    def pieces(self) -> Iterator[Piece]:
        """Ends where reading fails too, so that what was read before comes back."""
        try:
            yield from self._pieces()
        except ReadError as error:
            self.error = error

    def _pieces(self) -> Iterator[Piece]:
        part, row, character = self.start.part, self.start.row, self.start.character
        while part < self.source.parts:
            for block in self.source.rows(part, row):
                text = block.text[character:]
                if text:
                    self.blocks.append((part, block.row, character, len(text)))
                character = 0
                yield Piece(text, block.ends)
            part, row, character = part + 1, 0, 0

    def place(self, inside: bool) -> Place:
        """Of the next character to come back."""
        while self.done >= self.blocks[0][3]:
            self.done -= self.blocks.popleft()[3]
        part, row, first, _ = self.blocks[0]
        return Place(self.start.epoch, part, row, first + self.done, inside)


def segments(source: StreamSource, encoder: Encoder, start: Place) -> Iterator[Segment]:
    """One epoch of a stream, or what is left of it from `start` on.

    Raises:
        ReadError: reading broke, after the whole segments before that.
    """
    reading, inside, skip = _Reading(source, start), start.inside, start.skip
    for found in encoder.encode(reading.pieces(), start.inside):
        place = reading.place(inside)._replace(skip=skip)
        reading.done, inside = reading.done + found.characters, not found.ends
        yield Segment(found.ids[skip:], found.ends, place, found.text_bytes)
        skip = 0
    if reading.error is not None:
        raise reading.error


def endless(source: StreamSource, encoder: Encoder, begin: Place, start: Place) -> Iterator[Segment]:
    """The stream from `start` on, epoch after epoch; each begins at `begin`.

    Raises:
        UserError: there is no text after `begin`.
    """
    while True:
        tokens = 0
        for segment in segments(source, encoder, start):
            yield segment
            tokens += len(segment.ids)
        if not tokens and start == begin._replace(epoch=start.epoch):
            raise UserError(f"{source.label} holds no text after what data.ring_val_tokens holds out of it")
        start = begin._replace(epoch=start.epoch + 1)


def shards(stream: Iterator[Segment], shard_tokens: int) -> Iterator[Shard]:
    """Cuts a stream into shards."""
    parts: list[np.ndarray] = []
    ends: list[int] = []
    held = 0
    for ids, ends_document, place, _ in stream:
        used = 0
        while len(ids) - used >= shard_tokens - held:
            stop = used + shard_tokens - held
            if ends_document and stop == len(ids):
                ends.append(shard_tokens)
            end = place._replace(skip=place.skip + stop)
            yield Shard(np.concatenate([*parts, ids[used:stop]]), np.array(ends, dtype=np.int64), end)
            parts, ends, held, used = [], [], 0, stop
        if used < len(ids):
            parts.append(ids[used:])
            held += len(ids) - used
            if ends_document:
                ends.append(held)
