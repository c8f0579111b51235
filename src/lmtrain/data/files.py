"""Text from local files: txt, jsonl, json, parquet and Arrow; `.gz` of the first three."""

import glob
import gzip
import io
import json
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

import pyarrow as pa
import pyarrow.parquet as pq

from lmtrain.data.pieces import Piece, join_rows
from lmtrain.data.rows import check_columns, columns_of, text_of
from lmtrain.errors import UserError
from lmtrain.schema import Data

FORMATS = {
    ".txt": "text",
    ".text": "text",
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".json": "json",
    ".parquet": "parquet",
    ".arrow": "arrow",
}
_NOT_DATA = ("dataset_info.json", "state.json")  # beside the Arrow files of datasets' save_to_disk
_BLOCK = 1 << 20  # characters of text read at a time
_ROWS = 256  # rows of a columnar file read at a time


def find_files(path: Any, wanted: str, key: str = "data.path") -> list[tuple[Path, str]]:
    """The files of a file, folder, glob or a list of them, each with its format, in a stable order.

    Raises:
        UserError: nothing there, an empty file, a format that can't be told, or several formats in one folder.
    """
    found: list[tuple[Path, str]] = []
    for part in [path] if isinstance(path, str | Path) else list(path):
        found += _expand(str(part), wanted, key)
    formats = sorted({format for _, format in found})
    if len(formats) > 1 and formats != ["json", "jsonl"]:
        raise UserError(f"{key}={path} holds {' and '.join(formats)} files: choose with data.format or a glob")
    if not found:
        raise UserError(f"{key} is empty: name a file, a folder, a glob or a list of them")
    return found


def _expand(part: str, wanted: str, key: str) -> list[tuple[Path, str]]:
    path = Path(part).expanduser()
    if path.is_file():
        if path.stat().st_size == 0:
            raise UserError(f"{key}={part} is empty: there is nothing to train on")
        return [(path, _format_of(path, wanted))]
    if path.is_dir():
        if (path / "dataset_dict.json").exists():
            splits = sorted(p.name for p in path.iterdir() if p.is_dir())
            raise UserError(f"{part} holds the splits {', '.join(splits)}: set {key}={part}/{splits[0]}")
        files = [(p, _suffix_format(p)) for p in sorted(path.rglob("*")) if _is_data(p)]
        known = [(p, f) for p, f in files if f is not None and wanted in ("auto", f)]
        if not known:
            raise UserError(
                f"{key}={part} holds no {'file with a known suffix' if wanted == 'auto' else f'{wanted} file'} "
                f"(known: {', '.join(FORMATS)}); for other names give a glob and data.format=text"
            )
        return known
    matches = sorted(Path(m) for m in glob.glob(str(path), recursive=True) if Path(m).is_file())
    if not matches:
        raise UserError(f"{key}={part}: no such file or folder, and as a glob it matches nothing")
    return [(p, _format_of(p, wanted)) for p in matches if p.stat().st_size]


def _is_data(path: Path) -> bool:
    if path.name in _NOT_DATA or path.name.startswith((".", "cache-")):
        return False
    return path.is_file() and path.stat().st_size > 0


def _suffix_format(path: Path) -> str | None:
    name = path.name[:-3] if path.name.endswith(".gz") else path.name
    return FORMATS.get(Path(name).suffix.lower())


def _format_of(path: Path, wanted: str) -> str:
    if wanted != "auto":
        return wanted
    format = _suffix_format(path)
    if format is None:
        raise UserError(
            f"{path}: the format can't be told from the suffix (known: {', '.join(FORMATS)}); "
            f"set data.format=text, jsonl, json, parquet or arrow"
        )
    return format


def read_pieces(files: list[tuple[Path, str]], cfg: Data) -> Iterator[Piece]:
    """The documents of the files, in order."""
    if cfg.document_start:
        yield from join_rows(_all_rows(files, cfg), cfg.document_start)
        return
    for path, format in files:
        if format == "text" and cfg.sample_by == "document":
            yield from _text_blocks(path)
        else:
            yield from (Piece(row, True) for row in _rows(path, format, cfg))


def _all_rows(files: list[tuple[Path, str]], cfg: Data) -> Iterator[str]:
    for path, format in files:
        yield from _rows(path, format, cfg)


def _rows(path: Path, format: str, cfg: Data) -> Iterator[str]:
    if format == "text":
        # Lines keep their ends where they are to be joined again.
        yield from _paragraphs(path) if cfg.sample_by == "paragraph" else _lines(path, keep=bool(cfg.document_start))
        return
    columns = columns_of(cfg.text_column)
    readers: dict[str, Callable[[Path, list[str]], Iterator[tuple[str, dict[str, Any]]]]] = {
        "jsonl": _jsonl,
        "json": _json,
        "parquet": _parquet,
        "arrow": _arrow,
    }
    for where, row in readers[format](path, columns):
        yield text_of(row, columns, cfg.column_separator or "", where)


def open_binary(path: Path) -> IO[bytes]:
    """The file, decompressed where it ends in .gz."""
    try:
        return gzip.open(path, "rb") if path.name.endswith(".gz") else open(path, "rb")  # type: ignore[return-value]
    except OSError as error:
        raise UserError(f"{path} can't be read: {error.strerror}") from None


def _text_blocks(path: Path) -> Iterator[Piece]:
    with open_binary(path) as raw, io.TextIOWrapper(raw, encoding="utf-8", newline="") as file:
        try:
            while block := file.read(_BLOCK):
                yield Piece(block, False)
        except UnicodeDecodeError:
            raise UserError(_explain_encoding(path)) from None
        except (OSError, EOFError, zlib.error) as error:
            raise UserError(f"{path} can't be read: {error}") from None
    yield Piece("", True)


def _raw_lines(path: Path) -> Iterator[str]:
    """Lines with their ends, exactly as they stand in the file."""
    with open_binary(path) as file:
        try:
            for line in file:
                yield line.decode("utf-8")
        except UnicodeDecodeError:
            raise UserError(_explain_encoding(path)) from None
        except (OSError, EOFError, zlib.error) as error:
            raise UserError(f"{path} can't be read: {error}") from None


def _explain_encoding(path: Path) -> str:
    with open_binary(path) as file:
        for number, line in enumerate(file, start=1):
            try:
                line.decode("utf-8")
            except UnicodeDecodeError as error:
                around = line[max(0, error.start - 20) : error.start + 20]
                return f"{path}, line {number}: not UTF-8 ({error.reason}): {around!r}; convert the file with iconv"
    return f"{path} is not UTF-8; convert it with iconv"


def _lines(path: Path, keep: bool) -> Iterator[str]:
    for line in _raw_lines(path):
        yield line if keep else line.rstrip("\r\n")


def _paragraphs(path: Path) -> Iterator[str]:
    """Stretches between blank lines."""
    held: list[str] = []
    for line in _raw_lines(path):
        if line.strip():
            held.append(line)
        elif held:
            yield "".join(held).rstrip("\r\n")
            held = []
    if held:
        yield "".join(held).rstrip("\r\n")


def _jsonl(path: Path, _columns: list[str]) -> Iterator[tuple[str, dict[str, Any]]]:
    for where, row in _json_lines(path):
        if isinstance(row, str):
            raise UserError(f"{where}: {row}")
        yield where, row


def _json_lines(path: Path) -> Iterator[tuple[str, dict[str, Any] | str]]:
    """Each line's place and object, or what is wrong with the line."""
    for number, line in enumerate(_raw_lines(path), start=1):
        if not line.strip():
            continue
        where = f"{path}, line {number}"
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            yield where, f"malformed JSON ({error.msg}, column {error.colno}): {_excerpt(line)}"
            continue
        yield where, row if isinstance(row, dict) else _not_an_object(row)


def _json(path: Path, columns: list[str]) -> Iterator[tuple[str, dict[str, Any]]]:
    """A list of objects, which JSON allows to be read only as a whole, or one object per line."""
    if _has_lines(path):
        yield from _jsonl(path, columns)
        return
    text = "".join(_raw_lines(path))
    try:
        rows = json.loads(text)
    except json.JSONDecodeError as error:
        line = text.splitlines()[error.lineno - 1] if text.splitlines() else ""
        raise UserError(f"{path}, line {error.lineno}: malformed JSON ({error.msg}): {_excerpt(line)}") from None
    if not isinstance(rows, list):
        raise UserError(f"{path} holds a {type(rows).__name__}; a list of objects, or an object per line, is needed")
    for number, row in enumerate(rows):
        where = f"{path}, entry {number}"
        if not isinstance(row, dict):
            raise UserError(f"{where}: {_not_an_object(row)}")
        yield where, row


def _has_lines(path: Path) -> bool:
    """Whether a .json file holds an object per line instead of one list."""
    with open_binary(path) as file:
        return file.read(4096).lstrip().startswith(b"{")


def _not_an_object(row: Any) -> str:
    return f"a JSON object with columns is needed, found {_excerpt(json.dumps(row))}"


def read_records(files: list[tuple[Path, str]]) -> Iterator[tuple[str, dict[str, Any] | str]]:
    """Every row of the files with all its columns and its place; instead of a line that is no JSON, what is wrong."""
    for path, format in files:
        if format == "text":
            raise UserError(f"{path}: rows with columns are needed (.jsonl, .json, .parquet, .arrow), not plain text")
        if format == "jsonl" or (format == "json" and _has_lines(path)):
            yield from _json_lines(path)
        elif format == "json":
            yield from _json(path, [])
        else:
            rows = _parquet(path, None) if format == "parquet" else _arrow(path, None)
            yield from ((f"{where}, row {i}", row) for i, (where, row) in enumerate(rows))


def _excerpt(line: str) -> str:
    line = line.strip()
    return line if len(line) <= 80 else line[:77] + "..."


def _parquet(path: Path, columns: list[str] | None) -> Iterator[tuple[str, dict[str, Any]]]:
    try:
        with pq.ParquetFile(path) as file:
            check_columns(columns or [], file.schema_arrow.names, str(path))
            for batch in file.iter_batches(batch_size=_ROWS, columns=columns):
                yield from ((str(path), row) for row in batch.to_pylist())
    except (pa.ArrowException, OSError) as error:
        raise UserError(f"{path} can't be read as parquet: {error}") from None


def _arrow(path: Path, columns: list[str] | None) -> Iterator[tuple[str, dict[str, Any]]]:
    """Arrow streams, which `datasets` writes, and Arrow files."""
    try:
        with pa.OSFile(str(path)) as source:
            is_file = source.read(6) == b"ARROW1"
            source.seek(0)
            if is_file:
                reader = pa.ipc.open_file(source)
                batches: Iterator[pa.RecordBatch] = (reader.get_batch(i) for i in range(reader.num_record_batches))
            else:
                reader = pa.ipc.open_stream(source)
                batches = iter(reader)
            check_columns(columns or [], reader.schema.names, str(path))
            for batch in batches:
                yield from ((str(path), row) for row in batch.select(columns or reader.schema.names).to_pylist())
    except (pa.ArrowException, OSError) as error:
        raise UserError(f"{path} can't be read as Arrow: {error}") from None
