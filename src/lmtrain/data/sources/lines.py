"""Opens, decompresses and decodes files line by line; read errors become one message with file and line."""

import bz2
import codecs
import contextlib
import gzip
import io
import lzma
import zlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import IO, Any

from lmtrain.data.sources import encodings
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
_BUFFER = 1 << 20  # bytes per read: a document is often longer than Python's default of 8 KiB
BOM = "\ufeff"  # some Windows programs begin UTF-8 files with it


def open_binary(path: File) -> IO[bytes]:
    """Opens the file, decompressing it if its suffix names a compression.

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
    """Yields the file's text, `characters` at a time, from byte `start` (uncompressed) on.

    Raises:
        UserError: it can't be read, or is not UTF-8.
    """
    with open_binary(path) as raw, explained(path):
        _skip(raw, start)
        with io.TextIOWrapper(raw, encoding="utf-8", newline="") as file:
            while block := file.read(characters):
                yield block


def decoded_blocks(path: File, size: int) -> Iterator[str]:
    """Yields the file's text in blocks of about `size` bytes, in any encoding that can be detected (encodings.py).

    A byte order mark at the beginning is no part of the text.

    Raises:
        UserError: it can't be read, or is neither UTF-8 nor in a detectable encoding.
    """
    with open_binary(path) as file, explained(path), contextlib.ExitStack() as stack:
        part = file.read(size)
        name = encodings.marked(part)
        decoder = encodings.Decoder(lambda: stack.enter_context(open_binary(path)), name)
        if part.startswith(codecs.BOM_UTF8):
            part, decoder.was_ascii = part.removeprefix(codecs.BOM_UTF8), False
        yield decoder.decode(part.removeprefix(encodings.MARKS[name]) if name else part)
        while part := file.read(size):
            yield decoder.decode(part)
        yield decoder.decode(b"", True)
        if decoder.encoding != "utf-8":
            not_utf8[str(path)] = decoder.encoding


not_utf8: dict[str, str] = {}  # encodings of the files other than UTF-8 that this process has read


def encoding_notes(paths: Iterable[File]) -> list[str]:
    """Returns a note for the plan: how many of the files were not read as UTF-8, with the names of the first ones."""
    found = [(str(path), not_utf8[str(path)]) for path in paths if str(path) in not_utf8]
    if not found:
        return []
    shown = ", ".join(f"{path} ({name})" for path, name in found[:3]) + (" ..." if len(found) > 3 else "")
    files = "1 file is" if len(found) == 1 else f"{len(found):,} files are"
    return [f"{files} not UTF-8; read in the detected encoding: {shown}"]


def raw_lines(path: File) -> Iterator[str]:
    """Yields the lines with their line ends, as in the file, in any encoding that can be detected.

    Raises:
        UserError: see `decoded_blocks`.
    """
    held: list[str] = []
    for block in decoded_blocks(path, _BUFFER):
        *whole, rest = block.split("\n")
        for line in whole:
            yield "".join([*held, line, "\n"])
            held.clear()
        if rest:
            held.append(rest)
    if held:
        yield "".join(held)


@contextlib.contextmanager
def explained(path: File) -> Iterator[None]:
    """Turns decoding and read errors into one UserError or ReadError that names the file."""
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
    """Returns the lines of a JSON file, which is UTF-8, without a byte order mark at the beginning."""
    return (line for _, line in located_data_lines(path))


def located_data_lines(path: File, start: int = 0) -> Iterator[tuple[int, str]]:
    """Yields the lines of a UTF-8 file from byte `start` (uncompressed) on, each with the byte at which it begins.

    A byte order mark at the beginning of the file is left out.
    """
    with open_binary(path) as file, explained(path):
        _skip(file, start)
        for raw in file:
            line = raw.decode("utf-8")
            yield start, line if start else line.removeprefix(BOM)
            start += len(raw)


def _explain_encoding(path: File) -> str:
    with open_binary(path) as file:
        for number, line in enumerate(file, start=1):
            try:
                line.decode("utf-8")
            except UnicodeDecodeError as error:
                around = line[max(0, error.start - 20) : error.start + 20]
                return f"{path}, line {number}: not UTF-8 ({error.reason}): {around!r}; convert the file with iconv"
    return f"{path} is not UTF-8; convert it with iconv"
