"""The source of a stream, which can be read from any place on: files or a hub dataset, as text and as token ids.

A stream is read part by part and epoch by epoch, and cut into shards of a fixed number of tokens.
"""

from collections import deque
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np

from lmtrain.config.schema_data import DataConfig
from lmtrain.data.hub import commit_of, explain_unreachable
from lmtrain.data.sources import files, hub
from lmtrain.data.sources.addresses import Address, File
from lmtrain.data.sources.lines import BOM, located_data_lines, text_blocks
from lmtrain.data.sources.pieces import Piece
from lmtrain.data.sources.tables import columns_of, json_lines_from, parquet_from, text_of
from lmtrain.data.store.contents import version_of
from lmtrain.data.text.encode import Encoder
from lmtrain.errors import ReadError, UserError

_BLOCK = 1 << 20  # characters per read of a plain text file that is one document


class Block(NamedTuple):
    """A document, or a chunk of a text file that is one document; an empty block ends such a file.

    row: where the block begins in its part of the source; `rows(part, row)` reads from there again.
    """

    row: int
    text: str
    ends: bool


class StreamSource(Protocol):
    """Text in parts (files, shards of a hub dataset), each of which can be read from any row on."""

    label: str  # its name in messages and in the name of the folder of held-out tokens
    identity: list[Any]  # plain values that identify it, known without reading it
    parts: int
    notes: list[str]  # files of a folder that are not read

    def rows(self, part: int, start: int) -> Iterator[Block]:
        """Returns the blocks of a part from row `start` on.

        Raises:
            ReadError: reading failed, and may work if it is tried again.
            UserError: a row can't be read.
        """


def open_stream(cfg: DataConfig) -> StreamSource:
    """Opens the stream that `cfg` names; raises UserError if it doesn't exist."""
    return _FileStream(cfg) if cfg.source == "files" or cfg.path else _HubStream(cfg)


class _FileStream:
    def __init__(self, cfg: DataConfig) -> None:
        self.cfg = cfg
        found, self.notes = files.find_files(cfg.path, cfg.format)
        self.files, self.parts = found, len(found)
        self.label = files.label_of(cfg.path)
        self.identity = [[*_identity_of(path), format] for path, format in found]
        self._versions = {path: version_of(path) for path, _ in found if isinstance(path, Path)}

    def refuse_changed(self) -> None:
        """Raises ReadError if a file was changed since: by size, times and inode, as a stream is not read twice."""
        for path, version in self._versions.items():
            if version_of(path) != version:
                raise ReadError(f"{path} was changed while it was read: start again once it is complete")

    def rows(self, part: int, start: int) -> Iterator[Block]:
        path, format = self.files[part]
        if format == "text" and self.cfg.sample_by == "document":
            return self._document(path, start)
        return _blocks(self._texts(path, format, start), self.cfg)

    def _document(self, path: File, start: int) -> Iterator[Block]:
        shortest = self.cfg.min_length or 0
        if start == 0 and shortest and len(next(text_blocks(path, shortest + 1), "").removeprefix(BOM)) < shortest:
            return
        any_text = start > 0  # a compressed file may be empty inside
        for read in text_blocks(path, _BLOCK, start):
            text = read if start else read.removeprefix(BOM)
            if text:
                yield Block(start, text, False)
                any_text = True
            start += len(read.encode())
        if any_text:
            yield Block(start, "", True)

    def _texts(self, path: File, format: str, start: int) -> Iterator[tuple[int, str]]:
        columns, separator = columns_of(self.cfg.text_column), self.cfg.column_separator or ""
        if format == "text" and self.cfg.sample_by == "line":
            yield from ((at, line.rstrip("\r\n")) for at, line in located_data_lines(path, start))
        elif format == "jsonl":
            for at, row in json_lines_from(path, start):
                yield at, text_of(row, columns, separator, f"{path}, byte {at}")
        elif format == "parquet":
            for number, row in parquet_from(path, columns, start):
                yield number, text_of(row, columns, separator, f"{path}, row {number}")
        else:  # these can only be read from the file's beginning
            texts = enumerate(files.read_rows(path, format, self.cfg))
            yield from ((number, text) for number, text in texts if number >= start)


def _identity_of(file: File) -> list[Any]:
    """Returns name, size and the file system's version, if any: hashing files would mean reading the whole stream."""
    return [str(file), file.size, file.version] if isinstance(file, Address) else [file.name, file.stat().st_size]


class _HubStream:
    notes: list[str] = []  # noqa: RUF012

    def __init__(self, cfg: DataConfig) -> None:
        self.cfg = cfg
        name, self.label = hub.named(cfg)
        folder = Path(name).expanduser()  # exists for a local dataset repository
        commit, unreachable = (None, "") if folder.is_dir() else commit_of("dataset", name, cfg.revision)
        if unreachable:
            raise UserError(explain_unreachable("dataset", name, unreachable))
        on_disk = sorted([p.name, p.stat().st_size] for p in folder.rglob("*") if p.is_file()) if commit is None else []
        self.identity = [cfg.config_name, cfg.train_split, commit, on_disk]
        splits = hub.load_splits(cfg, commit or "", "")
        hub.check_split(splits, cfg.train_split, cfg)
        self.dataset = splits[cfg.train_split]
        self.parts = self.dataset.num_shards

    def rows(self, part: int, start: int) -> Iterator[Block]:
        split = self.cfg.train_split
        rest = {split: self.dataset.shard(self.parts, part).skip(start)}
        texts = enumerate(hub.read_rows(rest, split, self.cfg), start)
        return _blocks(texts, self.cfg)


def _blocks(texts: Iterable[tuple[int, str]], cfg: DataConfig) -> Iterator[Block]:
    """Returns the documents of rows, given by number and text, without empty ones and those that are too short."""
    return (Block(row, text, True) for row, text in texts if len(text) >= max(1, cfg.min_length or 0))


class Place(NamedTuple):
    """The position of a token in the stream: `skip` tokens into the segment at character `character` of a row.

    inside: whether the segment continues a document. How a document is cut into segments from here on depends on
    nothing before it, so reading from a place gives the same tokens as reading from the beginning.
    """

    epoch: int = 0
    part: int = 0
    row: int = 0
    character: int = 0
    inside: bool = False
    skip: int = 0


class StreamSegment(NamedTuple):
    """Token ids, uint32 [n]; whether a document ends with the last, the place of the first, the text's UTF-8 bytes."""

    ids: np.ndarray
    ends: bool
    place: Place
    text_bytes: int


class StreamShard(NamedTuple):
    """Token ids, uint32 [shard_tokens]; document ends in the shard (exclusive, int64); the place of the next token."""

    ids: np.ndarray
    document_ends: np.ndarray
    end: Place


class _StreamReading:
    """A reader of one epoch's pieces from a place on, which tracks where the text that the encoder has returned lay."""

    def __init__(self, source: StreamSource, start: Place) -> None:
        self.source, self.start = source, start
        self.blocks: deque[tuple[int, int, int, int]] = deque()  # part, row, index of the first character read, count
        self.done = 0  # characters of the first block that the encoder has returned
        self.error: ReadError | None = None  # what ended reading early

    def pieces(self) -> Iterator[Piece]:
        """Yields the pieces; ends if reading fails, too, so that the encoder still returns what was read before."""
        row, character = self.start.row, self.start.character
        try:
            for part in range(self.start.part, self.source.parts):
                for block in self.source.rows(part, row):
                    text = block.text[character:]
                    if text:
                        self.blocks.append((part, block.row, character, len(text)))
                    character = 0
                    yield Piece(text, block.ends)
                row, character = 0, 0
        except ReadError as error:
            self.error = error

    def place(self, inside: bool) -> Place:
        """Returns the place of the next character, from which reading can resume."""
        while self.done >= self.blocks[0][3]:
            self.done -= self.blocks.popleft()[3]
        part, row, first, _ = self.blocks[0]
        return Place(self.start.epoch, part, row, first + self.done, inside)


def segments(source: StreamSource, encoder: Encoder, start: Place) -> Iterator[StreamSegment]:
    """Yields the segments of one epoch of a stream, from `start` on.

    Raises:
        ReadError: reading failed; it is raised after the whole segments before the failure.
    """
    reading = _StreamReading(source, start)
    inside = start.inside
    skip = start.skip
    for found in encoder.encode(reading.pieces(), start.inside):
        place = reading.place(inside)._replace(skip=skip)
        reading.done, inside = reading.done + found.characters, not found.ends
        yield StreamSegment(found.ids[skip:], found.ends, place, found.text_bytes)
        skip = max(0, skip - len(found.ids))  # segments may be shorter than those of the version that saved the place
    if reading.error is not None:
        raise reading.error


def endless(source: StreamSource, encoder: Encoder, begin: Place, start: Place) -> Iterator[StreamSegment]:
    """Yields the segments of the stream from `start` on, epoch after epoch; each further epoch begins at `begin`.

    Raises:
        UserError: there is no text after `begin`.
    """
    while True:
        tokens = 0
        for segment in segments(source, encoder, start):
            yield segment
            tokens += len(segment.ids)
        if not tokens and start == begin._replace(epoch=start.epoch):
            raise UserError(f"{source.label} holds no text after the data.ring_val_tokens tokens held out to validate")
        start = begin._replace(epoch=start.epoch + 1)


def cut_shards(stream: Iterator[StreamSegment], shard_tokens: int) -> Iterator[StreamShard]:
    """Yields the stream's tokens as shards of `shard_tokens` tokens."""
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
            yield StreamShard(np.concatenate([*parts, ids[used:stop]]), np.array(ends, dtype=np.int64), end)
            parts = []
            ends = []
            held = 0
            used = stop
        if used < len(ids):
            parts.append(ids[used:])
            held += len(ids) - used
            if ends_document:
                ends.append(held)
