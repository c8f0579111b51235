"""Data files, local or at an address: finding them, telling their formats, and reading their documents and rows."""

import copy
import glob
import hashlib
import itertools
import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from lmtrain.config.override_text import shell_word
from lmtrain.config.proposers import suffix_of
from lmtrain.config.schema_data import DataConfig
from lmtrain.data.sources import addresses
from lmtrain.data.sources.addresses import Address, File, Found, size_of
from lmtrain.data.sources.lines import COMPRESSED, decoded_blocks, encoding_notes, raw_lines
from lmtrain.data.sources.pieces import Piece, join_rows
from lmtrain.data.sources.tables import Record, columns_of, read_otherwise, read_table, text_of
from lmtrain.data.store.contents import Content, Facts, joined_digest
from lmtrain.data.store.parts import share_of
from lmtrain.errors import UserError, nearest

FORMATS = {
    **dict.fromkeys((".txt", ".text", ".md", ".rst"), "text"),
    **dict.fromkeys((".jsonl", ".ndjson"), "jsonl"),
    **{f".{name}": name for name in ("json", "csv", "tsv", "parquet", "arrow")},
}
_ALIKE = (["json", "jsonl"], ["csv", "tsv"])  # formats that may be mixed in one folder
_MARKUP = (".md", ".rst")  # in a folder, read only if it holds no other data: a README describes data
_NOT_DATA = ("dataset_info.json", "state.json")  # written beside the Arrow files by `save_to_disk` of datasets
_LOCAL = ("file://", "local://")  # addresses of local files, which are read by their paths
_BLOCK = 1 << 20  # bytes of text per read
_NAMED = 5  # files that a note on unread files names


class FileSource:
    """Files of text or rows; those of data.val_path are the validation split."""

    def __init__(self, cfg: DataConfig) -> None:
        if not cfg.path:
            raise UserError("data.path is not set: name a file, a folder, a glob or a list of them, data.path=...")
        self.cfg, self.label = cfg, label_of(cfg.path)
        found, self.notes = find_files(cfg.path, cfg.format)
        self.splits = {"train": found}
        if cfg.val_path:
            self.splits["val"], notes = find_files(cfg.val_path, cfg.format, key="data.val_path")
            self.notes = [*self.notes, *(note for note in notes if note not in self.notes)]
        formats = sorted({format for _, format in found})
        self.settings: dict[str, Any] = {"kind": "files", "formats": formats, "sample_by": cfg.sample_by}
        files = [[path for path, _ in part] for part in self.splits.values()]
        local = [path for part in files for path in part if isinstance(path, Path)]
        self.content = Content(local, Facts(cfg.cache_dir))
        self.resolved: str | None = "+".join(digest(part, self.content.digests) for part in files)

    def refuse_changed(self) -> None:
        """Raises ReadError if a file was changed since the source was opened."""
        self.content.refuse_changed()
        for part in self.splits.values():
            addresses.refuse_changed([path for path, _ in part if isinstance(path, Address)])

    def share(self, rank: int, tasks: int) -> "FileSource":
        """Returns a source of the files of share `rank` of `tasks`; those of all shares, in their order, are all."""
        part = copy.copy(self)
        part.splits = {name: share_of(files, rank, tasks) for name, files in self.splits.items()}
        return part

    def pieces(self, name: str) -> Iterator[Piece] | None:
        return read_pieces(self.splits[name], self.cfg) if name in self.splits else None

    def records(self, name: str) -> Iterator[Record] | None:
        return read_records(self.splits[name], self.cfg.header) if name in self.splits else None

    def notes_of_reading(self) -> list[str]:
        """Returns notes for the plan, available after reading: encodings other than UTF-8, and odd tables."""
        paths = [path for part in self.splits.values() for path, _ in part]
        return encoding_notes(paths) + [read_otherwise[str(path)] for path in paths if str(path) in read_otherwise]

    def text_bytes(self, name: str) -> int | None:
        part = self.splits.get(name, [])
        plain = all(format == "text" and path.suffix.lower() not in COMPRESSED for path, format in part)
        sizes = [size_of(path) for path, _ in part]
        return sum(size or 0 for size in sizes) if plain and None not in sizes else None


def label_of(path: Any) -> str:
    """Returns the label of data.path in folder names: the last part of the first path, up to a glob's pattern."""
    first = path if isinstance(path, str) else str(next(iter(path)))
    return re.split(r"[*?\[]", first)[0].rstrip("/").split("/")[-1] or "files"


def find_files(path: Any, wanted: str, key: str = "data.path") -> tuple[list[tuple[File, str]], list[str]]:
    """Finds the files that a file, folder, glob or list of them names, each with its format, in a stable order.

    Returns:
        The files, and for each folder with files that are not read a line that counts and names those.

    Raises:
        UserError: nothing there, an empty file, an unknown format, or several formats together.
    """
    found: list[tuple[File, str]] = []
    notes: list[str] = []
    for part in [path] if isinstance(path, str | Path) else list(path):
        files, unread = _expand(str(part), wanted, key)
        found += files
        if unread:
            notes.append(_unread(str(part), unread))
    formats = sorted({format for _, format in found})
    if len(formats) > 1 and formats not in _ALIKE:
        raise UserError(f"{key}={path} holds {' and '.join(formats)} files: choose with data.format or a glob")
    if not found:
        raise UserError(f"{key} is empty: name a file, a folder, a glob or a list of them")
    return found, notes


def _expand(part: str, wanted: str, key: str) -> tuple[list[tuple[File, str]], list[File]]:
    """Returns the files to read, and those of a folder or glob that are not read."""
    kind, found = _find(part, key)
    if kind == "file":
        if size_of(found[0]) == 0:
            raise UserError(f"{key}={part} is empty: there is nothing to train on")
        return [(found[0], _format_of(found[0], wanted))], []
    if kind == "glob":
        full = [p for p in found if size_of(p) != 0]
        return [(p, _format_of(p, wanted)) for p in full], [p for p in found if size_of(p) == 0]
    files = [(p, _suffix_format(p)) for p in found if p.name not in _NOT_DATA and not p.name.startswith("cache-")]
    known = [(p, f) for p, f in files if f is not None and wanted in ("auto", f) and size_of(p) != 0]
    known = [(p, f) for p, f in known if suffix_of(p.name) not in _MARKUP] or known
    if not known:
        what = "file with a known suffix" if wanted == "auto" else f"{wanted} file"
        names = f"known: {', '.join(FORMATS)}"
        raise UserError(f"{key}={part} holds no {what} ({names}); for other names give a glob and data.format=text")
    read = {p for p, _ in known}
    return known, [p for p, _ in files if p not in read]


def _find(part: str, key: str) -> tuple[Found, list[File]]:
    """Returns whether a file, folder or glob is named, and all of its files, sorted."""
    if addresses.is_address(part) and not part.startswith(_LOCAL):
        kind, found = addresses.find(part, key)
        if kind == "folder" and any(p.name == "dataset_dict.json" for p in found):
            raise UserError(f"{key}={part} holds the splits of a dataset: name the folder of one of them")
        return kind, list(found)
    path = Path(part.partition("://")[2] if part.startswith(_LOCAL) else part).expanduser()
    if path.is_file():
        return "file", [path]
    if path.is_dir():
        if (path / "dataset_dict.json").exists():
            splits = sorted(p.name for p in path.iterdir() if p.is_dir())
            if not splits:
                raise UserError(f"{key}={part} has a dataset_dict.json and no splits beside it: save the dataset again")
            raise UserError(f"{part} holds the splits {', '.join(splits)}: set {key}={part}/{splits[0]}")
        if path.resolve() == Path(path.anchor or "/").resolve():
            raise UserError(f"{key}={part} is the whole file system: name the folder that holds the data")
        try:
            inside = [p for p in sorted(path.rglob("*")) if p.is_file()]  # but not .git, .cache and the like
            return "folder", [p for p in inside if "/." not in f"/{p.relative_to(path).as_posix()}"]
        except OSError as error:
            raise UserError(f"{key}={part} can't be searched for files: {error}") from None
    if path.exists():
        raise UserError(f"{key}={part} is a device, pipe or socket: name a file, a folder or a glob")
    return "glob", list(matching(part, key))


def matching(pattern: str, key: str) -> list[Path]:
    """Returns the files that a glob matches, sorted; raises UserError if there are none."""
    path = Path(pattern.partition("://")[2] if pattern.startswith(_LOCAL) else pattern).expanduser()
    found = sorted(Path(m) for m in glob.glob(str(path), recursive=True) if Path(m).is_file())
    if not found:
        near = nearest(path)
        hint = f"; did you mean {shell_word(key, near)}?" if near else ", and as a glob it matches nothing"
        raise UserError(f"{key}={pattern}: no such file or folder{hint}")
    return found


def digest(files: list[File], known: Mapping[Path, str]) -> str:
    """Returns one hash for the files: of the bytes of local ones, and of what file systems report on remote ones.

    known: the SHA-256 of the local ones.
    """
    if all(isinstance(file, Path) for file in files):
        return joined_digest(known[file] for file in files)  # type: ignore[index]
    parts = [
        hashlib.sha256(known[file].encode()).hexdigest() if isinstance(file, Path) else file.identity()
        for file in files
    ]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


def _unread(folder: str, files: list[File]) -> str:
    """Returns one line that counts and names the files of a folder that are not read."""
    names = [f"{p.name}{' (empty)' if size_of(p) == 0 else ''}" for p in files[:_NAMED]]
    more = f" and {len(files) - _NAMED:,} more" if len(files) > _NAMED else ""
    are = "file is" if len(files) == 1 else "files are"
    return f"{folder}: {len(files):,} {are} not read: {', '.join(names)}{more}"


def _suffix_format(path: File) -> str | None:
    format = FORMATS.get(suffix_of(path.name))
    compressed = path.suffix.lower() in COMPRESSED
    return None if compressed and format in ("parquet", "arrow") else format


def _format_of(path: File, wanted: str) -> str:
    if wanted != "auto":
        return wanted
    format = _suffix_format(path)
    if format is None:
        known = f"known: {', '.join(FORMATS)}, and of those that are text {', '.join(COMPRESSED)}"
        advice = "set data.format=text, jsonl, json, csv, tsv, parquet or arrow"
        raise UserError(f"{path}: the format can't be told from the suffix ({known}); {advice}")
    return format


def read_pieces(files: list[tuple[File, str]], cfg: DataConfig) -> Iterator[Piece]:
    """Yields the documents of the files, in order."""
    if cfg.document_start:
        rows = (row for path, format in files for row in read_rows(path, format, cfg))
        yield from join_rows(rows, cfg.document_start)
        return
    for path, format in files:
        if format == "text" and cfg.sample_by == "document":
            yield from (Piece(block, False) for block in decoded_blocks(path, _BLOCK))
            yield Piece("", True)
        else:
            yield from (Piece(row, True) for row in read_rows(path, format, cfg))


def read_rows(path: File, format: str, cfg: DataConfig) -> Iterator[str]:
    """Yields the text of each row of a file; the rows of a plain text file are its lines or paragraphs."""
    if format == "text":
        if cfg.sample_by == "paragraph":
            for is_text, lines in itertools.groupby(raw_lines(path), key=lambda line: bool(line.strip())):
                if is_text:
                    yield "".join(lines).rstrip("\r\n")
        else:  # lines keep their line ends if they are to be joined into documents
            yield from (line if cfg.document_start else line.rstrip("\r\n") for line in raw_lines(path))
        return
    columns = columns_of(cfg.text_column)
    for where, row in read_table(path, format, columns, cfg.header):
        yield text_of(row, columns, cfg.column_separator or "", where)


def read_records(files: list[tuple[File, str]], header: bool | None = None) -> Iterator[Record]:
    """Yields every row of the files with all columns and its location, or an error text for an unreadable row.

    header: of CSV and TSV, see `separated.read_separated`.
    """
    for path, format in files:
        if format == "text":
            raise UserError(f"{path}: rows with columns are needed (.jsonl, .json, .csv, .parquet), not plain text")
        yield from read_table(path, format, header=header)
