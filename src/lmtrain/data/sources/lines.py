"""Files opened, decompressed and decoded line by line; what can't be read becomes one message with file and line."""

import bz2
import gzip
import io
import lzma
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

from lmtrain.errors import UserError


def _open_zstd(path: Path, _mode: str) -> IO[bytes]:
    import pyarrow as pa

    return io.BufferedReader(pa.CompressedInputStream(pa.OSFile(str(path)), "zstd"), 1 << 20)


COMPRESSED: dict[str, Callable[[Path, str], Any]] = {
    ".gz": gzip.open,
    ".bz2": bz2.open,
    ".xz": lzma.open,
    ".zst": _open_zstd,
}
BROKEN = (OSError, EOFError, zlib.error, lzma.LZMAError)  # what decompressors raise for damaged files
_BOM = "\ufeff"  # some Windows programs begin UTF-8 files with it


def uncompressed_name(path: Path) -> str:
    """The file's name without .gz, .bz2, .xz or .zst."""
    return path.stem if path.suffix.lower() in COMPRESSED else path.name


def open_binary(path: Path) -> IO[bytes]:
    """The file, decompressed where its suffix says that it is compressed.

    Raises:
        UserError: it can't be opened.
    """
    try:
        opener: Callable[[Path, str], Any] = COMPRESSED.get(path.suffix.lower(), open)
        return opener(path, "rb")
    except OSError as error:
        raise UserError(f"{path} can't be read: {error.strerror or error}") from None


def text_blocks(path: Path, characters: int) -> Iterator[str]:
    """The file's text, `characters` at a time.

    Raises:
        UserError: it can't be read, or is not UTF-8.
    """
    with open_binary(path) as raw, io.TextIOWrapper(raw, encoding="utf-8", newline="") as file:
        try:
            while block := file.read(characters):
                yield block
        except UnicodeDecodeError:
            raise UserError(_explain_encoding(path)) from None
        except BROKEN as error:
            raise UserError(f"{path} can't be read: {error}") from None


def raw_lines(path: Path) -> Iterator[str]:
    """Lines with their ends, exactly as they stand in the file.

    Raises:
        UserError: it can't be read, or is not UTF-8.
    """
    with open_binary(path) as file:
        try:
            for line in file:
                yield line.decode("utf-8")
        except UnicodeDecodeError:
            raise UserError(_explain_encoding(path)) from None
        except BROKEN as error:
            raise UserError(f"{path} can't be read: {error}") from None


def data_lines(path: Path) -> Iterator[str]:
    """Lines of a file of rows: as `raw_lines`, without a byte order mark at the beginning."""
    lines = raw_lines(path)
    for line in lines:
        yield line.removeprefix(_BOM)
        break
    yield from lines


def _explain_encoding(path: Path) -> str:
    with open_binary(path) as file:
        for number, line in enumerate(file, start=1):
            try:
                line.decode("utf-8")
            except UnicodeDecodeError as error:
                around = line[max(0, error.start - 20) : error.start + 20]
                return f"{path}, line {number}: not UTF-8 ({error.reason}): {around!r}; convert the file with iconv"
    return f"{path} is not UTF-8; convert it with iconv"
