"""Files opened, decompressed and decoded line by line; what can't be read becomes one message with file and line."""

import bz2
import contextlib
import gzip
import io
import lzma
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

from lmtrain.data.sources.addresses import File, opened
from lmtrain.errors import ReadError, UserError


def _open_zstd(file: Path | IO[bytes], _mode: str) -> IO[bytes]:
    import pyarrow as pa

    raw = pa.OSFile(str(file)) if isinstance(file, Path) else pa.PythonFile(file, "r")
    return io.BufferedReader(pa.CompressedInputStream(raw, "zstd"), 1 << 20)


COMPRESSED: dict[str, Callable[[Path | IO[bytes], str], Any]] = {
    ".gz": gzip.open,
    ".bz2": bz2.open,
    ".xz": lzma.open,
    ".zst": _open_zstd,
}
_BROKEN = (OSError, EOFError, zlib.error, lzma.LZMAError)  # what decompressors raise for damaged files
_BUFFER = 1 << 20  # bytes read at a time: a document is often longer than Python's own 8 KiB
_BOM = "\ufeff"  # some Windows programs begin UTF-8 files with it


def uncompressed_name(path: File) -> str:
    """The file's name without .gz, .bz2, .xz or .zst."""
    return path.stem if path.suffix.lower() in COMPRESSED else path.name


def open_binary(path: File) -> IO[bytes]:
    """The file, decompressed where its suffix says that it is compressed.

    Raises:
        UserError: it can't be opened.
    """
    try:
        opener: Callable[[Any, str], Any] | None = COMPRESSED.get(path.suffix.lower())
        if isinstance(path, Path):
            return open(path, "rb", buffering=_BUFFER) if opener is None else opener(path, "rb")
        return opened(path) if opener is None else opener(opened(path), "rb")
    except OSError as error:
        raise ReadError(f"{path} can't be read: {error.strerror or error}") from None


def text_blocks(path: File, characters: int, start: int = 0) -> Iterator[str]:
    """The file's text from byte `start` of what is uncompressed on, `characters` at a time.

    Raises:
        UserError: it can't be read, or is not UTF-8.
    """
    with open_binary(path) as raw, _explained(path):
        _skip(raw, start)
        with io.TextIOWrapper(raw, encoding="utf-8", newline="") as file:
            while block := file.read(characters):
                yield block


def raw_lines(path: File) -> Iterator[str]:
    """Lines with their ends, exactly as they stand in the file.

    Raises:
        UserError: as of `text_blocks`.
    """
    return (line for _, line in located_lines(path))


def located_lines(path: File, start: int = 0) -> Iterator[tuple[int, str]]:
    """Yields the lines of `raw_lines` from byte `start` (uncompressed) on, each with the byte where it begins."""
    with open_binary(path) as file, _explained(path):
        _skip(file, start)
        for line in file:
            yield start, line.decode("utf-8")
            start += len(line)


@contextlib.contextmanager
def _explained(path: File) -> Iterator[None]:
    """What goes wrong in reading as one message."""
    try:
        yield
    except UnicodeDecodeError:
        raise UserError(_explain_encoding(path)) from None
    except _BROKEN as error:
        raise ReadError(f"{path} can't be read: {error}") from None


def _skip(file: IO[bytes], start: int) -> None:
    if start and file.seekable():
        file.seek(start)
        return
    while start > 0 and (part := file.read(min(start, 1 << 20))):
        start -= len(part)


def data_lines(path: File) -> Iterator[str]:
    """As `raw_lines`, without a byte order mark at the beginning."""
    return (line for _, line in located_data_lines(path))


def located_data_lines(path: File, start: int = 0) -> Iterator[tuple[int, str]]:
    """As `located_lines`, without a byte order mark at the beginning."""
    return ((at, line if at else line.removeprefix(_BOM)) for at, line in located_lines(path, start))


def _explain_encoding(path: File) -> str:
    with open_binary(path) as file:
        for number, line in enumerate(file, start=1):
            try:
                line.decode("utf-8")
            except UnicodeDecodeError as error:
                around = line[max(0, error.start - 20) : error.start + 20]
                return f"{path}, line {number}: not UTF-8 ({error.reason}): {around!r}; convert the file with iconv"
    return f"{path} is not UTF-8; convert it with iconv"
