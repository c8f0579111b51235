"""Tokens of one file or several and their side files, read on demand with `pread`, never memory-mapped or loaded whole.

Resident memory doesn't grow with what was read, as it does with a memory map, and a truncated file leads to an error
message instead of a SIGBUS.
"""

import bisect
import io
import itertools
import os
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import numpy as np

from lmtrain.data.store.contents import version_of
from lmtrain.errors import RunError, UserError

SIDES = ("docs", "mask", "labels", "texts")  # suffixes of the side files of a file of tokens
END_BYTES = 8  # one uint64 per document
_OPEN_FILES = 256  # well under the usual limit of 1024 per process, whatever the number of shards
_BLOCK_ENDS = 512  # document ends per read: 4 KiB


def _little(dtype: str) -> str:
    return np.dtype(dtype).newbyteorder("<").str


@lru_cache(maxsize=_OPEN_FILES)
def _open(path: str, _version: tuple[int, ...]) -> io.FileIO:
    # Descriptors survive a fork and pread shares no file position, so this is safe in loader workers. A file is closed
    # when nothing refers to it any more.
    return io.FileIO(path)


def close_files() -> None:
    """Closes the files of all shards, as removed files free their disk space only then; reading opens them again."""
    _open.cache_clear()


def _pread(path: Path, version: tuple[int, ...], offset: int, size: int) -> bytes:
    try:
        file = _open(str(path), version)
        parts = []
        while size > 0 and (part := os.pread(file.fileno(), size, offset)):
            parts.append(part)
            offset, size = offset + len(part), size - len(part)
    except OSError as error:
        raise RunError(f"{path} can't be read any more: {error}") from None
    if size > 0:
        raise RunError(f"{path} ends at byte {offset}, {size} bytes before it should: it was changed while in use")
    return b"".join(parts)


class Extent(NamedTuple):
    """Tokens of a file, little endian, from byte `offset` to its end."""

    path: Path
    dtype: str
    offset: int
    tokens: int


class Shard:
    """Tokens in sequence. Small, picklable, and safe to use after a fork: files are opened when they are read."""

    def __init__(
        self, path: Path, dtype: str, tokens: int, sides: dict[str, Path], parts: Sequence[Extent] = ()
    ) -> None:
        """
        Args:
            sides: the side files that it has, by suffix, each one of SIDES.
            parts: the files that hold the tokens, one after the other; without them `path` does, from its first byte.

        Raises:
            UserError: a file is missing or its size does not match `tokens`.
        """
        self.path, self.tokens = path, tokens
        self.docs, self.mask, self.labels, self.texts = (sides.get(suffix) for suffix in SIDES)
        self.parts = [part._replace(dtype=_little(part.dtype)) for part in parts or [Extent(path, dtype, 0, tokens)]]
        self._starts = [0, *itertools.accumulate(part.tokens for part in self.parts)]  # of the parts, in tokens
        try:
            self._versions = {f: tuple(version_of(f)) for f in (*(p.path for p in self.parts), *sides.values())}
        except OSError as error:
            raise UserError(f"token bin {error.filename} is missing or unreadable: {error.strerror}") from None
        self.documents = self._size(self.docs) // END_BYTES
        self._check_size(self.docs, f"the ends of {self.documents} documents", self.documents * END_BYTES)
        for part in self.parts:
            size = part.offset + part.tokens * np.dtype(part.dtype).itemsize
            self._check_size(part.path, f"{part.tokens} {np.dtype(part.dtype).name} tokens", size)
        self._check_size(self.mask, f"the loss mask of {tokens} tokens", tokens)
        self._check_size(self.labels, f"labels of {self.documents} documents", self.documents * END_BYTES)

    def refuse_changed(self) -> None:
        """Raises UserError if a file was changed since it was opened: its hash would be that of other tokens."""
        for file, version in self._versions.items():
            if tuple(version_of(file)) != version:
                raise UserError(f"{file} was changed while it was read: start again once it is complete")

    def _check_size(self, file: Path | None, holds: str, wanted: int) -> None:
        if file is not None and self._size(file) != wanted:
            found = f"{file} has {self._size(file)} bytes, but {holds} take {wanted}"
            raise UserError(f"{found}: it was cut short or is of other data; delete its folder and prepare again")

    def _size(self, file: Path | None) -> int:
        return 0 if file is None else self._versions[file][0]

    def _array(self, file: Path | None, dtype: str, start: int, count: int, offset: int = 0) -> np.ndarray:
        assert file is not None  # asked only for what the shard has
        size = np.dtype(dtype).itemsize
        return np.frombuffer(_pread(file, self._versions[file], offset + start * size, count * size), dtype=dtype)

    def read(self, start: int, count: int) -> np.ndarray:
        """Returns tokens start .. start + count - 1, as an array [count] of the dtype of their files."""
        stop = start + count
        if start < 0 or count < 0 or stop > self.tokens:
            raise IndexError(f"tokens {start}..{stop} of {self.path}, which has {self.tokens}")
        found = []
        for number in range(bisect.bisect_right(self._starts, start, hi=len(self.parts)) - 1, len(self.parts)):
            part, begin = self.parts[number], self._starts[number]
            first, last = max(start - begin, 0), min(stop - begin, part.tokens)
            found.append(self._array(part.path, part.dtype, first, last - first, part.offset))
            if stop <= begin + part.tokens:
                break
        return found[0] if len(found) == 1 else np.concatenate(found)

    def read_mask(self, start: int, count: int) -> np.ndarray:
        """Returns which of the tokens start .. start + count - 1 are learned, bool [count]; requires a mask."""
        return self._array(self.mask, "u1", start, count).astype(bool)

    def read_labels(self) -> np.ndarray:
        """Returns the label of each document that ends in the shard, int64; requires labels."""
        return self._array(self.labels, "<i8", 0, self.documents).astype(np.int64)

    def read_texts(self) -> list[str]:
        """Returns the line of text of each document that ends in the shard; requires texts."""
        return self._array(self.texts, "u1", 0, self._size(self.texts)).tobytes().decode().split("\n")[:-1]

    def check_borders(self, instead: str) -> None:
        """Raises UserError if the file comes without document ends; `instead` is the setting that needs none."""
        if self.docs is None:
            raise UserError(f"{self.path} has no document borders (.docs): prepare it with lmtrain, or set {instead}")

    def document_ends(self, start: int, stop: int) -> np.ndarray:
        """Returns the document ends with start <= end < stop: int64, ascending, exclusive, in tokens of this shard."""
        self.check_borders("data.isolate_documents=false")
        found = [np.empty(0, dtype=np.int64)]
        blocks = range(0, self.documents, _BLOCK_ENDS)
        # The last block whose first end is before `start` may hold the first end that is not.
        before = bisect.bisect_left(blocks, start, key=lambda first: int(self._ends(first, 1)[0])) - 1
        for first in blocks[max(0, before) :]:
            ends = self._ends(first, min(_BLOCK_ENDS, self.documents - first))
            found.append(ends[(ends >= start) & (ends < stop)])
            if ends[-1] >= stop:
                break
        return np.concatenate(found)

    def _ends(self, first: int, count: int) -> np.ndarray:
        return self._array(self.docs, "<u8", first, count).astype(np.int64)
