"""Writes one split of token bins (the format is described in bins.py)."""

import os
from hashlib import sha256
from pathlib import Path
from typing import Any, Self, cast

import numpy as np

from lmtrain.data.store.bins import ShardMeta, SplitMeta
from lmtrain.data.store.shards import END_BYTES

_CHUNK = 1 << 20  # bytes


def dtype_for(vocab_size: int) -> str:
    """Returns the smallest dtype that holds every id: uint16 would overflow from 65,537 ids on."""
    return "uint16" if vocab_size <= 1 << 16 else "uint32"


class _Stream:
    """A file with one number per token, with its SHA-256 so far and its SHA-256 before the open document."""

    def __init__(self, path: Path, dtype: np.dtype) -> None:
        self.path, self.dtype = path, dtype
        self.file = open(path, "wb+", buffering=_CHUNK)  # noqa: SIM115
        self.hash, self.hash_before = sha256(), sha256()

    def write(self, values: np.ndarray) -> None:
        self._append(np.ascontiguousarray(values, dtype=self.dtype).tobytes())

    def _append(self, raw: bytes) -> None:
        self.file.write(raw)
        self.hash.update(raw)

    def end_document(self) -> None:
        self.hash_before = self.hash.copy()

    def move(self, start: int, other: "_Stream") -> None:
        """Moves the open document, everything from token `start` on, to another file."""
        self.file.flush()
        with open(self.path, "rb") as source:
            source.seek(start * self.dtype.itemsize)
            while chunk := source.read(_CHUNK):
                other._append(chunk)
        self.file.truncate(start * self.dtype.itemsize)
        self.hash = self.hash_before

    def close(self) -> str:
        """Syncs the file to disk; returns its SHA-256."""
        try:
            self.file.flush()
            os.fsync(self.file.fileno())
        finally:
            self.file.close()
        return self.hash.hexdigest()


class _OpenShard:
    """The files of the shard that is being written."""

    def __init__(self, stem: Path, dtypes: dict[str, np.dtype]) -> None:
        self.stem = stem
        self.streams = {suffix: _Stream(stem.with_suffix(f".{suffix}"), dtype) for suffix, dtype in dtypes.items()}
        self.tokens = 0
        self.document_start = 0  # where the open document starts
        self.ends: list[int] = []  # ends of the documents that end in this shard
        self.labels: list[int] = []  # labels of those documents, if they have any
        self.texts: list[str] = []  # texts of those documents, if they have any

    def move_open_document(self, other: "_OpenShard") -> None:
        for suffix, stream in self.streams.items():
            stream.move(self.document_start, other.streams[suffix])
        other.tokens, self.tokens = self.tokens - self.document_start, self.document_start

    def close(self) -> ShardMeta:
        for suffix, numbers in (("docs", self.ends), ("labels", self.labels)):
            if suffix == "docs" or numbers:
                self.streams[suffix] = _Stream(self.stem.with_suffix(f".{suffix}"), np.dtype(f"<i{END_BYTES}"))
                self.streams[suffix].write(np.asarray(numbers, dtype=np.int64))
        if self.texts:
            self.streams["texts"] = _Stream(self.stem.with_suffix(".texts"), np.dtype("u1"))
            self.streams["texts"].write(np.frombuffer("\n".join([*self.texts, ""]).encode(), dtype=np.uint8))
        found: dict[str, Any] = {
            "file": f"{self.stem.name}.bin",
            "tokens": self.tokens,
            "documents": len(self.ends),
            "sha256": self.streams.pop("bin").close(),
            **{f"{suffix}_sha256": stream.close() for suffix, stream in self.streams.items()},
        }
        return cast(ShardMeta, found)


class BinWriter:
    """Appends documents, piece by piece, to shards of at most `shard_tokens` tokens.

    A document that does not fit into the rest of a shard moves to the next one; only a document longer than a whole
    shard is cut. Only the current piece and one shard's document ends, labels and texts are held in memory.

    Args:
        masked: whether each token comes with a loss mask value.
    """

    def __init__(self, folder: Path, split: str, dtype: str, shard_tokens: int, *, masked: bool = False) -> None:
        self.folder, self.split, self.shard_tokens = folder, split, shard_tokens
        self.dtypes = {"bin": np.dtype(dtype).newbyteorder("<")} | ({"mask": np.dtype("u1")} if masked else {})
        self.tokens = self.documents = self.bytes = 0
        self.shards: list[ShardMeta] = []
        self._open: _OpenShard | None = None
        self._document_tokens = 0  # tokens of the open document, in all shards

    def append(
        self,
        ids: np.ndarray,
        mask: np.ndarray | None = None,
        *,
        ends_document: bool,
        text_bytes: int = 0,
        label: int | None = None,
        text: str | None = None,
    ) -> None:
        """Appends token ids [n], and their loss mask [n] if there is one, to the open document.

        ends_document: closes the document; `label` and `text`, a line without a line break, belong to it. If some
            documents have a text, the others get an empty one.
        """
        self.bytes += text_bytes
        self.tokens += len(ids)
        self._document_tokens += len(ids)
        shard = self._open
        if shard is not None and shard.document_start > 0 and shard.tokens + len(ids) > self.shard_tokens:
            new = self._start_shard(index=len(self.shards) + 1)
            shard.move_open_document(new)
            self._finish_shard()
            self._open = new
        done = 0
        while done < len(ids):
            if self._open is None or self._open.tokens == self.shard_tokens:
                self._finish_shard()
                self._open = self._start_shard(index=len(self.shards))
            part = slice(done, done + self.shard_tokens - self._open.tokens)
            self._open.streams["bin"].write(ids[part])
            if mask is not None:
                self._open.streams["mask"].write(mask[part])
            self._open.tokens += len(ids[part])
            done += len(ids[part])
        if ends_document and self._document_tokens:
            self._end_document(label, text)

    def _end_document(self, label: int | None, text: str | None) -> None:
        assert self._open is not None
        self.documents += 1
        self._open.ends.append(self._open.tokens)
        if label is not None:
            self._open.labels.append(label)
        if text is not None or self._open.texts:
            before = len(self._open.ends) - 1 - len(self._open.texts)
            self._open.texts += [*[""] * before, text or ""]
        self._open.document_start, self._document_tokens = self._open.tokens, 0
        for stream in self._open.streams.values():
            stream.end_document()

    def close(self) -> SplitMeta:
        """Finishes the last shard, synced to disk; returns the counts for meta.json."""
        self._finish_shard()
        return {"tokens": self.tokens, "documents": self.documents, "bytes": self.bytes, "shards": self.shards}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Closes files that are still open, without finishing them."""
        for stream in self._open.streams.values() if self._open is not None else ():
            stream.file.close()
        self._open = None

    def _start_shard(self, index: int) -> _OpenShard:
        return _OpenShard(self.folder / f"{self.split}_{index:05d}", self.dtypes)

    def _finish_shard(self) -> None:
        if self._open is not None:
            self.shards.append(self._open.close())
            self._open = None
