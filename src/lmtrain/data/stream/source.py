"""What a stream is read from, from any place in it: local files or a dataset of the hub, part after part."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from lmtrain.config.schema_data import DataConfig
from lmtrain.data.hub import Unreachable, commit_of, explain_unreachable
from lmtrain.data.sources import files, hub
from lmtrain.data.sources.addresses import Address, File
from lmtrain.data.sources.lines import located_lines, text_blocks
from lmtrain.data.sources.rows import columns_of, text_of
from lmtrain.data.sources.tables import json_lines_from, parquet_from
from lmtrain.errors import UserError

_BLOCK = 1 << 20  # characters of a plain text file that is one document, read at a time


class Block(NamedTuple):
    """A document, or of a text file that is one document a part of it: `ends` with the last, which has no text.

    row: where it begins in its part of the source, the number that `rows(part, row)` starts again from.
    """

    row: int
    text: str
    ends: bool


class StreamSource(Protocol):
    """Text in parts (files, shards of the hub), each of which can be read from any row on."""

    label: str  # its name in messages and in the folder of what is held out of it
    identity: list[Any]  # plain values: what tells it from another, without reading it
    parts: int
    notes: list[str]  # what of a folder is not read

    def rows(self, part: int, start: int) -> Iterator[Block]:
        """The blocks of a part from row `start` on.

        Raises:
            ReadError: reading broke, and may work again.
            UserError: a row can't be read.
        """


def open_stream(cfg: DataConfig) -> StreamSource:
    """The source that `cfg` names; UserError where there is none."""
    return _Files(cfg) if cfg.source == "files" or cfg.path else _Hub(cfg)


class _Files:
    def __init__(self, cfg: DataConfig) -> None:
        self.cfg = cfg
        found, self.notes = files.find_files(cfg.path, cfg.format)
        self.files, self.parts = found, len(found)
        self.label = Path(str(cfg.path if isinstance(cfg.path, str) else cfg.path[0]).split("*")[0]).name or "files"
        self.identity = [[*_told(path), format] for path, format in found]

    def rows(self, part: int, start: int) -> Iterator[Block]:
        path, format = self.files[part]
        if format == "text" and self.cfg.sample_by == "document":
            return self._document(path, start)
        return self._rows(path, format, start)

    def _document(self, path: File, start: int) -> Iterator[Block]:
        shortest = self.cfg.min_length or 0
        if start == 0 and shortest and not _reaches(path, shortest):
            return
        for text in text_blocks(path, _BLOCK, start):
            yield Block(start, text, False)
            start += len(text.encode())
        if start:  # a compressed file may hold nothing
            yield Block(start, "", True)

    def _rows(self, path: File, format: str, start: int) -> Iterator[Block]:
        for row, text in self._texts(path, format, start):
            if len(text) >= max(1, self.cfg.min_length or 0):
                yield Block(row, text, True)

    def _texts(self, path: File, format: str, start: int) -> Iterator[tuple[int, str]]:
        columns, separator = columns_of(self.cfg.text_column), self.cfg.column_separator or ""
        if format == "text" and self.cfg.sample_by == "line":
            yield from ((at, line.rstrip("\r\n")) for at, line in located_lines(path, start))
        elif format == "jsonl":
            for at, row in json_lines_from(path, start):
                where = f"{path}, byte {at}"
                if isinstance(row, str):
                    raise UserError(f"{where}: {row}")
                yield at, text_of(row, columns, separator, where)
        elif format == "parquet":
            for number, row in parquet_from(path, columns, start):
                yield number, text_of(row, columns, separator, f"{path}, row {number}")
        else:  # these can only be read from the file's beginning
            texts = enumerate(files.read_rows(path, format, self.cfg))
            yield from ((number, text) for number, text in texts if number >= start)


def _told(file: File) -> list[Any]:
    """Name, size and what a file system says of its version: to hash the files would be to read the stream."""
    return [str(file), file.size, file.version] if isinstance(file, Address) else [file.name, file.stat().st_size]


def _reaches(path: File, characters: int) -> bool:
    """Whether a text file has at least so many characters."""
    return len(next(text_blocks(path, characters), "")) >= characters


class _Hub:
    notes: list[str] = []  # noqa: RUF012

    def __init__(self, cfg: DataConfig) -> None:
        if not cfg.name:
            raise UserError("data.name is not set: name a dataset of the hub, data.name=..., or files, data.path=...")
        self.cfg, self.label = cfg, cfg.name.rstrip("/").split("/")[-1]
        folder = Path(cfg.name).expanduser()  # of a repository on this machine
        try:
            commit = None if folder.is_dir() else commit_of("dataset", cfg.name, cfg.revision)
        except Unreachable as error:
            raise UserError(explain_unreachable("dataset", cfg.name, str(error))) from None
        on_disk = sorted([p.name, p.stat().st_size] for p in folder.rglob("*") if p.is_file()) if commit is None else []
        self.identity = [cfg.config_name, cfg.train_split, commit, on_disk]
        splits = hub.load_splits(cfg, commit or "", "")
        hub.check_split(splits, cfg.train_split, cfg)
        self.dataset = splits[cfg.train_split]
        self.parts = self.dataset.num_shards

    def rows(self, part: int, start: int) -> Iterator[Block]:
        split = self.cfg.train_split
        texts = enumerate(
            hub.read_rows({split: self.dataset.shard(self.parts, part).skip(start)}, split, self.cfg), start
        )
        return (Block(n, text, True) for n, text in texts if len(text) >= max(1, self.cfg.min_length or 0))
