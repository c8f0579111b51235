"""Rows with columns from one file: JSON lines, a JSON list, CSV, TSV, Parquet, Arrow.

Each reader yields (location, row) in bounded memory, except for a JSON list, which can only be read as a whole. If a
row can't be read but those after it can, a string that describes the error is yielded in place of the row.

JSON and CSV are read here because pyarrow's readers, which take three quarters of the time (0.46 s of 0.60 s for 83 MB
of JSON lines), refuse a column of two types, name a row of a block instead of the file's line, and take a quote that is
never closed for data. `datasets` takes 5.6 times as long and names no place.
"""

import bisect
import contextlib
import difflib
import itertools
import json
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lmtrain.data.sources.addresses import File, opened
from lmtrain.data.sources.lines import data_lines, explained, located_data_lines, open_binary
from lmtrain.data.sources.separated import read_separated
from lmtrain.errors import ReadError, UserError
from lmtrain.files import is_arrow_stream

if TYPE_CHECKING:
    import pyarrow as pa

# A row's location (for error messages) and the row, or a string that says why the row can't be read.
Record = tuple[str, dict[str, Any] | str]


class ArrowRow(dict[str, Any]):
    """A row that Arrow held: its structs have every key that any row of the file has, null where the row had none.

    own_nulls: the columns in which every null is the data's own.
    """

    own_nulls: frozenset[str]

    def __init__(self, row: Mapping[str, Any], own_nulls: frozenset[str] = frozenset()) -> None:
        super().__init__(row)
        self.own_nulls = own_nulls

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (dict(self), self.own_nulls)


_END_OF_STREAM = b"\xff\xff\xff\xff\0\0\0\0"  # a stream cut between two batches lacks it, and reads as a shorter one
_ROWS = 256  # rows of a columnar file read at a time
_NEEDED = "a list of objects, or an object per line, is needed"
_BLANK = re.compile(r"[ \t\n\r]*")


def read_table(
    path: File, format: str, columns: list[str] | None = None, header: bool | None = None
) -> Iterator[Record]:
    """Yields the rows of a file of `format`, csv, tsv or a key of READERS.

    Args:
        columns: the columns to read from columnar files; None reads all.
        header: of CSV and TSV, see `read_separated`.

    Raises:
        UserError: the file can't be read, or lacks a column.
    """
    if format in ("csv", "tsv"):
        yield from _separated(path, columns, header, "\t" if format == "tsv" else None)
    else:
        yield from READERS[format](path, columns)


def _json_lines(path: File, columns: list[str] | None) -> Iterator[Record]:
    decoder = _Decoder(checked=columns is None)
    for number, line in enumerate(data_lines(path), start=1):
        if line and not line.isspace():
            yield f"{path}, line {number}", _row_of(line, decoder)


def json_lines_from(path: File, start: int) -> Iterator[tuple[int, dict[str, Any] | str]]:
    """Yields the rows of JSON lines from byte `start` on, each with the byte where it begins, or an error text.

    Raises:
        UserError: the file can't be read.
    """
    decoder = _Decoder(checked=False)
    return ((at, _row_of(line, decoder)) for at, line in located_data_lines(path, start) if line and not line.isspace())


def _row_of(line: str, decoder: "_Decoder") -> dict[str, Any] | str:
    """Returns the object in a line of JSON, or a description of what is wrong with it."""
    try:
        row, end = decoder.read(line, _start(line, 0))
    except json.JSONDecodeError as error:
        return f"malformed JSON ({error.msg}, column {error.colno}): {_excerpt(line)}"
    except (ValueError, RecursionError) as error:
        return f"{_unreadable(error)}: {_excerpt(line)}"
    after = _start(line, end)
    return row if after == len(line) else f"malformed JSON (Extra data, column {after + 1}): {_excerpt(line)}"


def _json(path: File, columns: list[str] | None) -> Iterator[Record]:
    """Yields the rows of a list of objects, or of one object per line."""
    if _has_lines(path):
        _refuse_one_object(path)
        yield from _json_lines(path, columns)
        return
    # A list: its text is read whole, and one entry after the other becomes a row.
    text, decoder = "".join(data_lines(path)), _Decoder(checked=columns is None)
    at = _start(text, 0)
    if not text.startswith("[", at):
        raise UserError(f"{path} holds {_excerpt(text[:200])}; {_NEEDED}")
    number = 0
    line = 1
    counted = 0
    at = _start(text, at + 1)
    while not (text.startswith("]", at) and number == 0):
        line, counted = line + text.count("\n", counted, at), at
        where = f"{path}, entry {number} (line {line})"
        try:
            row, at = decoder.read(text, at)
            at = _start(text, at)
            if text[at : at + 1] not in (",", "]"):
                raise json.JSONDecodeError("Expecting ',' or ']'", text, at)
        except json.JSONDecodeError as error:
            reason = f"malformed JSON ({error.msg}): {_excerpt(text.split(chr(10))[error.lineno - 1])}"
            raise UserError(f"{path}, line {error.lineno}: {reason}") from None
        except (ValueError, RecursionError) as error:  # the end of the entry, and so the start of the next, is unknown
            raise UserError(f"{where}: {_unreadable(error)}") from None
        yield where, row
        if text[at] == "]":
            break
        number, at = number + 1, _start(text, at + 1)
    if text[at + 1 :].strip():
        raise UserError(f"{path}: malformed JSON (after the list there is more): {_excerpt(text[at + 1 :][:200])}")


def _has_lines(path: File) -> bool:
    """Returns whether a .json file holds one object per line instead of one list."""
    with open_binary(path) as file, explained(path):
        return file.read(4096).removeprefix(b"\xef\xbb\xbf").lstrip().startswith(b"{")


def _refuse_one_object(path: File) -> None:
    """Raises UserError if the file is one object written over several lines."""
    with contextlib.suppress(ValueError, RecursionError):
        json.loads(next((line for line in data_lines(path) if line.strip()), ""))
        return
    try:
        whole = json.loads("".join(data_lines(path)))
    except (ValueError, RecursionError):
        return  # lines of objects, of which the first is malformed
    lists = [f"; its key {key!r} has a list: write that alone" for key in whole if type(whole[key]) is list]
    keys = ", ".join(map(repr, whole)) or "no keys"
    raise UserError(f"{path} holds one object with {keys}; {_NEEDED}{''.join(lists[:1])}")


def _start(text: str, at: int) -> int:
    """Returns the index of the first character from `at` on that is not JSON white space."""
    found = _BLANK.match(text, at)
    return found.end() if found else at


class _Decoder:
    """A decoder of JSON objects; if `checked`, it refuses duplicate keys in an object, as one value would be lost."""

    def __init__(self, checked: bool) -> None:
        self._twice: list[str] = []
        self._decoder = json.JSONDecoder(object_pairs_hook=self._object if checked else None)

    def read(self, text: str, at: int) -> tuple[dict[str, Any] | str, int]:
        """Returns the object that begins at `at`, or a description of what is wrong with it, and where it ends."""
        self._twice.clear()
        row, end = self._decoder.raw_decode(text, at)
        if self._twice:
            return f"the key {self._twice[0]!r} appears twice in one object", end
        if not isinstance(row, dict):
            return f"a JSON object with columns is needed, found {_excerpt(text[at : min(end, at + 200)])}", end
        return row, end

    def _object(self, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) < len(pairs):
            names = [name for name, _ in pairs]
            self._twice += [name for name in names if names.count(name) > 1]
        return found


def _unreadable(error: Exception) -> str:
    if isinstance(error, RecursionError):
        return "JSON that is nested too deep to be read"
    if "integer string conversion" in str(error):
        return f"JSON with a number of more than {sys.get_int_max_str_digits():,} digits"
    return str(error)


def _excerpt(line: str) -> str:
    line = line.strip()
    return line if len(line) <= 80 else line[:77] + "..."


read_otherwise: dict[str, str] = {}  # notes on the files that this process has read otherwise than their names say


def _separated(
    path: File, columns: list[str] | None, header: bool | None = None, sign: str | None = None
) -> Iterator[Record]:
    missing = columns or []
    for where, row in read_separated(path, missing, header, sign, read_otherwise):
        if missing and isinstance(row, dict):
            check_columns(missing, row, str(path))
            missing = []  # all rows have the same columns
        yield where, row


@contextlib.contextmanager
def read_as(format: str, path: File) -> Iterator[None]:
    """Turns errors of reading a columnar file into one UserError or ReadError that names it."""
    import pyarrow as pa

    try:
        yield
    except (pa.ArrowException, OSError) as error:
        kind = UserError if isinstance(error, pa.ArrowInvalid) else ReadError
        raise kind(f"{path} can't be read as {format}: {error}") from None
    except (ValueError, OverflowError) as error:  # a column's name that is not UTF-8; a date that Python doesn't have
        raise UserError(f"{path} can't be read as {format}: {error}") from None


def _rows_of(batch: "pa.RecordBatch") -> Iterator[dict[str, Any] | str]:
    """Yields the rows of a batch of a columnar file, or why a row can't be read: its text is not UTF-8.

    Raises:
        pyarrow.ArrowInvalid: offsets or indices point outside of the batch, whose rows would be other memory.
    """
    try:
        batch.validate(full=True)
    except ValueError as error:
        if not _is_encoding(error):
            raise
        for at in range(len(batch)):
            yield from _row_alone(batch.slice(at, 1))
        return
    yield from map(ArrowRow, batch.to_pylist())


def _is_encoding(error: ValueError) -> bool:
    return "Invalid UTF8" in str(error)


def _row_alone(row: "pa.RecordBatch") -> list[dict[str, Any] | str]:
    for name, column in zip(row.schema.names, row.columns, strict=True):
        try:
            column.take([0]).validate(full=True)  # copied: of a list, a slice still has the items of all rows
        except ValueError as error:
            if not _is_encoding(error):
                raise
            return [f"column {name!r} is not UTF-8: write the text as UTF-8, or drop that row"]
    return [ArrowRow(one) for one in row.to_pylist()]


def _parquet(path: File, columns: list[str] | None) -> Iterator[Record]:
    return ((f"{path}, row {number}", row) for number, row in parquet_from(path, columns, 0))


def parquet_from(path: File, columns: list[str] | None, start: int) -> Iterator[tuple[int, dict[str, Any] | str]]:
    """Yields the rows from number `start` on, or error texts, with their numbers; row groups before it are not read.

    Raises:
        UserError: the file can't be read, or lacks a column.
    """
    import pyarrow.parquet as pq

    with read_as("parquet", path), pq.ParquetFile(path if isinstance(path, Path) else opened(path)) as file:
        _check_names(columns, file.schema_arrow.names, str(path))
        sizes = [file.metadata.row_group(g).num_rows for g in range(file.num_row_groups)]
        ends = list(itertools.accumulate(sizes))
        group = bisect.bisect_right(ends, start)  # the row group that contains row `start`
        number = ends[group - 1] if group else 0
        groups = range(group, len(sizes))
        for batch in file.iter_batches(batch_size=_ROWS, columns=columns, row_groups=groups):
            yield from ((n, row) for n, row in enumerate(_rows_of(batch), start=number) if n >= start)
            number += len(batch)


def _arrow(path: File, columns: list[str] | None) -> Iterator[Record]:
    """Yields the rows of an Arrow stream, which `datasets` writes, or of an Arrow file."""
    with read_as("Arrow", path):
        rows = (row for batch in arrow_batches(path, columns) for row in _rows_of(batch))
        yield from ((f"{path}, row {number}", row) for number, row in enumerate(rows))


def arrow_batches(path: File, columns: list[str] | None) -> Iterator["pa.RecordBatch"]:
    """Yields the record batches of an Arrow stream or file, as they are stored: not validated.

    Raises:
        UserError: the file lacks a column, or is a stream without its end.
        pyarrow.ArrowException, OSError: it can't be read.
    """
    import pyarrow as pa

    with pa.OSFile(str(path)) if isinstance(path, Path) else pa.PythonFile(opened(path), "r") as source:
        if is_arrow_stream(source):
            source.seek(-min(8, source.size()), 2)
            if source.read() != _END_OF_STREAM:
                raise UserError(f"{path} has no end of an Arrow stream: it was cut, or is still being written")
            source.seek(0)
            batches: Iterable[pa.RecordBatch] = (reader := pa.ipc.open_stream(source))
        else:
            reader = pa.ipc.open_file(source)
            batches = map(reader.get_batch, range(reader.num_record_batches))
        _check_names(columns, reader.schema.names, str(path))
        yield from (batch.select(columns or reader.schema.names) for batch in batches)


def _check_names(wanted: list[str] | None, found: list[str], where: str) -> None:
    """Raises UserError if a wanted column is missing or there are two of its name, of which one would be lost."""
    check_columns(wanted or [], found, where)
    twice = next((name for name in wanted or found if found.count(name) > 1), None)
    if twice is not None:
        raise UserError(f"{where} has several columns named {twice!r}: rename all but one of them")


READERS: dict[str, Callable[[File, list[str] | None], Iterator[Record]]] = {
    "jsonl": _json_lines,
    "json": _json,
    "parquet": _parquet,
    "arrow": _arrow,
}


_SHOWN = 50  # maximum number of columns in a message


def columns_of(text_column: Any) -> list[str]:
    """Returns data.text_column as a list, whether it is one column or several."""
    return [text_column] if isinstance(text_column, str) else [str(c) for c in text_column]


def check_columns(wanted: list[str], found: Iterable[str], where: str) -> None:
    """Raises UserError if a wanted column is missing, listing the columns that exist."""
    found = list(found)
    for column in wanted:
        if column not in found:
            near = difflib.get_close_matches(column, found, n=1, cutoff=0.5)
            best = near[0] if near else (found[0] if found else "...")
            known = ", ".join(found[:_SHOWN]) + (f" and {len(found) - _SHOWN} more" if len(found) > _SHOWN else "")
            raise UserError(f"{where} has no column {column!r}; it has: {known or 'none'}: data.text_column={best}")


def text_of(row: Mapping[str, Any] | str, columns: list[str], separator: str, where: str) -> str:
    """Returns the text columns of a row, joined by `separator`; null values are skipped.

    Raises:
        UserError: the row can't be read, or a column is missing or holds something other than text.
    """
    if isinstance(row, str):
        raise UserError(f"{where}: {row}")
    parts = []
    for column in columns:
        if column not in row:
            check_columns(columns, row, where)
        value = row[column]
        if value is None:
            continue
        if not isinstance(value, str):
            held = f"{where}: column {column!r} holds {type(value).__name__} ({str(value)[:60]!r}), not text"
            raise UserError(f"{held}; set data.text_column to a column of text (this row has: {', '.join(row)})")
        parts.append(value)
    text = separator.join(parts)
    if not text.isascii():
        try:
            text.encode()
        except UnicodeEncodeError:
            raise UserError(f"{where}: the text holds half a surrogate pair: remove that row") from None
    return text
