"""Writes one split of token bins (the format is described in bins.py)."""

import os
import shutil
from pathlib import Path
from typing import IO

import numpy as np

from lmtrain.data.bins import END_BYTES, ShardMeta, SplitMeta


def dtype_for(vocab_size: int) -> str:
    """The smallest dtype that holds every id: uint16 would wrap from 65,537 ids on."""
    return "uint16" if vocab_size <= 1 << 16 else "uint32"


class BinWriter:
    """Appends documents, piece by piece, to shards of at most `shard_tokens` tokens.

    A document that would not fit into what is left of a shard moves to the next one; only a document longer than a
    whole shard is cut. Nothing but the current piece and one shard's document ends is held in memory.
    """

    def __init__(self, folder: Path, split: str, dtype: str, shard_tokens: int) -> None:
        self.folder, self.split, self.shard_tokens = folder, split, shard_tokens
        self.dtype = np.dtype(dtype).newbyteorder("<")
        self.tokens = self.documents = self.bytes = 0
        self.shards: list[ShardMeta] = []
        self._file: IO[bytes] | None = None
        self._ends: list[int] = []  # of documents that end in the open shard
        self._shard_tokens = 0  # tokens in the open shard
        self._document_start = 0  # where the open document starts in the open shard
        self._document_tokens = 0  # tokens of the open document, in all shards

    def append(self, ids: np.ndarray, *, ends_document: bool, text_bytes: int = 0) -> None:
        """Adds token ids [n] to the open document, and closes it if `ends_document`."""
        self.bytes += text_bytes
        if self._document_start > 0 and self._shard_tokens + len(ids) > self.shard_tokens:
            self._move_document_to_new_shard()
        done = 0
        while done < len(ids):
            if self._file is None or self._shard_tokens == self.shard_tokens:
                self._finish_shard()
                self._start_shard()
            room = self.shard_tokens - self._shard_tokens
            self._write(ids[done : done + room])
            done += room
        self._document_tokens += len(ids)
        if ends_document and self._document_tokens:
            self.documents += 1
            self._ends.append(self._shard_tokens)
            self._document_start, self._document_tokens = self._shard_tokens, 0

    def close(self) -> SplitMeta:
        """Finishes the last shard, synced to disk; returns the counts for meta.json."""
        self._finish_shard()
        return {
            "tokens": self.tokens,
            "documents": self.documents,
            "bytes": self.bytes,
            "shards": self.shards,
        }

    def abort(self) -> None:
        """Closes the open file without finishing it."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _write(self, ids: np.ndarray) -> None:
        assert self._file is not None
        self._file.write(np.ascontiguousarray(ids, dtype=self.dtype).tobytes())
        self._shard_tokens += len(ids)
        self.tokens += len(ids)

    def _start_shard(self, index: int | None = None) -> None:
        name = f"{self.split}_{len(self.shards) if index is None else index:05d}.bin"
        self._file = open(self.folder / name, "wb+")  # noqa: SIM115
        self._ends, self._shard_tokens, self._document_start = [], 0, 0

    def _move_document_to_new_shard(self) -> None:
        """Takes the open document's tokens out of the full shard and starts the next shard with them."""
        full, start, moved = self._file, self._document_start, self._shard_tokens - self._document_start
        ends = self._ends
        assert full is not None
        full.flush()
        self._start_shard(index=len(self.shards) + 1)
        new = self._file
        assert new is not None
        with open(full.name, "rb") as source:
            source.seek(start * self.dtype.itemsize)
            shutil.copyfileobj(source, new)
        full.truncate(start * self.dtype.itemsize)
        self._file, self._ends, self._shard_tokens = full, ends, start
        self._finish_shard()
        self._file, self._ends, self._shard_tokens, self._document_start = new, [], moved, 0

    def _finish_shard(self) -> None:
        if self._file is None:
            return
        name = Path(self._file.name)
        _sync_close(self._file)
        self._file = None
        docs = open(name.with_suffix(".docs"), "wb")  # noqa: SIM115
        docs.write(np.asarray(self._ends, dtype=f"<u{END_BYTES}").tobytes())
        _sync_close(docs)
        self.shards.append({"file": name.name, "tokens": self._shard_tokens, "documents": len(self._ends)})


def _sync_close(file: IO[bytes]) -> None:
    try:
        file.flush()
        os.fsync(file.fileno())
    finally:
        file.close()
