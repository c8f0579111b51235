"""Token bins on disk: the format, and reading it without ever mapping or loading a file whole.

A folder of bins holds
    meta.json          format version, dtype, vocab_size, tokenizer_hash, eos_id; each split's counts and shards
    train_00000.bin    token ids, little endian uint16 or uint32, documents one after the other
    train_00000.docs   uint64, little endian: where each document that ends in this shard ends (exclusive, in tokens)
    tokenizer/         the tokenizer, as save_pretrained writes it
A document lies in one shard unless it is longer than a whole shard. nanoGPT's folders (train.bin and val.bin, no
sidecar) are read too. Reads are `pread` calls: resident memory doesn't grow with what was touched, as it does with a
memory map, and a file that was cut short is an error message instead of a SIGBUS.
"""

import json
import os
from dataclasses import dataclass
from functools import lru_cache
from hashlib import sha256
from pathlib import Path
from typing import Any, TypedDict, cast

import numpy as np

from lmtrain.errors import RunError, UserError

FORMAT_VERSION = 1
META = "meta.json"
END_BYTES = 8  # one uint64 per document
_OPEN_FILES = 256  # well under the usual limit of 1024 per process, whatever the number of shards
_BLOCK_ENDS = 512  # document ends per read: 4 KiB


class ShardMeta(TypedDict):
    """One file of a split, by its name in the folder."""

    file: str
    tokens: int
    documents: int


class SplitMeta(TypedDict):
    """Counts of one split; `bytes` are UTF-8 bytes of its text (bits per byte divide by them)."""

    tokens: int
    documents: int | None  # None, as `bytes`, for bins without a sidecar
    bytes: int | None
    shards: list[ShardMeta]


class Meta(TypedDict):
    """The sidecar meta.json. `key` is everything that shaped the tokens (see prepare.py)."""

    format_version: int
    dtype: str
    vocab_size: int
    tokenizer_hash: str
    eos_id: int | None
    splits: dict[str, SplitMeta]
    key: dict[str, Any]


def save_meta(meta: Meta, folder: Path) -> None:
    """Writes meta.json, the last file of a folder of bins."""
    (folder / META).write_text(json.dumps(meta, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def load_meta(folder: Path) -> Meta:
    """Raises UserError where meta.json can't be read or is of another format version."""
    path = folder / META
    try:
        meta = json.loads(path.read_text(encoding="utf-8"))
        version = meta["format_version"]
        missing = set(Meta.__required_keys__) - set(meta)
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise UserError(f"{path} can't be read as the sidecar of token bins: {error!r}") from None
    if version != FORMAT_VERSION or missing:
        raise UserError(
            f"{path} has format version {version}, this lmtrain reads version {FORMAT_VERSION}: prepare the data again"
        )
    return cast(Meta, meta)


class _File:
    """An open file descriptor, closed when nobody refers to it any more."""

    def __init__(self, path: str) -> None:
        self.fd = os.open(path, os.O_RDONLY | getattr(os, "O_CLOEXEC", 0))

    def __del__(self) -> None:
        fd = getattr(self, "fd", None)
        if fd is not None:
            os.close(fd)


@lru_cache(maxsize=_OPEN_FILES)
def _open(path: str, _version: tuple[int, ...]) -> _File:
    # Descriptors survive a fork and pread has no position to share, so loader workers need no care.
    return _File(path)


def _pread(path: Path, version: tuple[int, ...], offset: int, size: int) -> bytes:
    try:
        file = _open(str(path), version)
        parts = []
        while size > 0 and (part := os.pread(file.fd, size, offset)):
            parts.append(part)
            offset, size = offset + len(part), size - len(part)
    except OSError as error:
        raise RunError(f"{path} can't be read any more: {error}") from None
    if size > 0:
        raise RunError(f"{path} ends at byte {offset}, {size} bytes before it should: it was changed while in use")
    return b"".join(parts)


def _version(path: Path) -> tuple[int, ...]:
    stat = path.stat()
    return (stat.st_ino, stat.st_size, stat.st_mtime_ns)


class Shard:
    """One file of tokens. Small, picklable, and safe to use after a fork: files are opened where they are read."""

    def __init__(self, path: Path | str, dtype: str, tokens: int, docs: Path | str | None = None) -> None:
        """Raises UserError where a file is missing or its size is not what `tokens` says."""
        self.path, self.tokens = Path(path), tokens
        self.dtype = np.dtype(dtype).newbyteorder("<")
        self.docs = None if docs is None else Path(docs)
        self.documents = 0
        try:
            self._version = _version(self.path)
            self._docs_version = _version(self.docs) if self.docs else ()
        except OSError as error:
            raise UserError(f"token bin {error.filename} is missing or unreadable: {error.strerror}") from None
        found, wanted = self._version[1], tokens * self.dtype.itemsize
        if found != wanted:
            raise UserError(
                f"{self.path} has {found} bytes, but {tokens} {dtype} tokens take {wanted}: the file was cut short or "
                f"belongs to other data; delete its folder and prepare again"
            )
        if self.docs:
            self.documents, rest = divmod(self._docs_version[1], END_BYTES)
            if rest:
                raise UserError(f"{self.docs} was cut short: delete its folder and prepare again")

    def read(self, start: int, count: int) -> np.ndarray:
        """Tokens start .. start + count - 1, as an array [count] of the shard's dtype."""
        if start < 0 or count < 0 or start + count > self.tokens:
            raise IndexError(f"tokens {start}..{start + count} of {self.path}, which has {self.tokens}")
        size = self.dtype.itemsize
        return np.frombuffer(_pread(self.path, self._version, start * size, count * size), dtype=self.dtype)

    def document_ends(self, start: int, stop: int) -> np.ndarray:
        """Ends (exclusive token offsets in this shard, int64, ascending) of documents with start <= end < stop."""
        if self.docs is None:
            raise UserError(
                f"{self.path} comes without document borders (a .docs file): set data.isolate_documents=false, or "
                f"prepare the text with lmtrain"
            )
        first = self._first_end_at_least(start)
        found = []
        while first < self.documents:
            ends = self._ends(first, min(_BLOCK_ENDS, self.documents - first))
            found.append(ends[ends < stop])
            if len(found[-1]) < len(ends):
                break
            first += len(ends)
        return np.concatenate(found) if found else np.empty(0, dtype=np.int64)

    def _ends(self, first: int, count: int) -> np.ndarray:
        assert self.docs is not None
        raw = _pread(self.docs, self._docs_version, first * END_BYTES, count * END_BYTES)
        return np.frombuffer(raw, dtype="<u8").astype(np.int64)

    def _first_end_at_least(self, value: int) -> int:
        """Index of the first document whose end is >= value, by bisection over blocks of the .docs file."""
        low, high = 0, self.documents
        while high - low > _BLOCK_ENDS:
            middle = (low + high) // 2
            if int(self._ends(middle, 1)[0]) < value:
                low = middle + 1
            else:
                high = middle
        return low + int(np.searchsorted(self._ends(low, high - low), value)) if high > low else low


@dataclass(frozen=True)
class SplitBins:
    """The shards of one split; `documents` and `bytes` are None where there is no sidecar."""

    shards: list[Shard]
    tokens: int
    documents: int | None
    bytes: int | None
    dtype: str
    meta: Meta | None


def has_split(path: Path | str, split: str) -> bool:
    """Whether a folder of bins, ours or nanoGPT's, has that split."""
    folder = Path(path).expanduser()
    if (folder / META).exists():
        return split in load_meta(folder)["splits"]
    return (folder / f"{split}.bin").exists()


def open_bins(path: Path | str, split: str, *, seq_len: int | None = None, dtype: str = "uint16") -> SplitBins:
    """The bins of split "train" or "val" in a folder of ours or of nanoGPT's.

    Args:
        path: the folder.
        split: one that the folder has (`has_split`).
        seq_len: where given, a split without room for one row (seq_len tokens and the label of the last) is refused.
        dtype: of plain .bin files without a sidecar (nanoGPT writes uint16).

    Raises:
        UserError: no bins there, a file that disagrees with the sidecar, or too few tokens.
    """
    folder = Path(path).expanduser()
    if not folder.is_dir():
        raise UserError(f"data.path={path}: no such folder; give the folder that holds train.bin or {META}")
    if not has_split(folder, split):
        names = ", ".join(sorted(p.name for p in folder.iterdir())[:10]) or "nothing"
        raise UserError(f"{folder} holds no {split} bins, neither in {META} nor as {split}.bin (it holds {names})")
    found = _open_prepared(folder, split) if (folder / META).exists() else _open_plain(folder, split, dtype)
    longest = max((s.tokens for s in found.shards), default=0)
    if seq_len is not None and longest < seq_len + 1:
        raise UserError(
            f"{folder}: the {split} split has {found.tokens} tokens (longest shard {longest}), fewer than one row of "
            f"data.seq_len={seq_len} and the label of its last token: set data.seq_len={max(1, longest - 1)} or less, "
            f"or use more text"
        )
    return found


def _open_prepared(folder: Path, split: str) -> SplitBins:
    meta = load_meta(folder)
    counts = meta["splits"][split]
    shards = []
    for entry in counts["shards"]:
        file = folder / entry["file"]
        shards.append(Shard(file, meta["dtype"], entry["tokens"], docs=file.with_suffix(".docs")))
        if shards[-1].documents != entry["documents"]:
            raise UserError(f"{shards[-1].docs} and {folder / META} disagree: delete {folder} and prepare again")
    return SplitBins(shards, counts["tokens"], counts["documents"], counts["bytes"], meta["dtype"], meta)


def _open_plain(folder: Path, split: str, dtype: str) -> SplitBins:
    file = folder / f"{split}.bin"
    tokens, rest = divmod(file.stat().st_size, np.dtype(dtype).itemsize)
    if rest:
        raise UserError(f"{file} is not a whole number of {dtype} tokens ({file.stat().st_size} bytes)")
    if tokens == 0:
        raise UserError(f"{file} is empty")
    return SplitBins([Shard(file, dtype, tokens)], tokens, None, None, dtype, None)


def largest_token(bins: SplitBins, chunk: int = 1 << 22) -> int:
    """The largest token id, read chunk by chunk."""
    return max(
        int(shard.read(start, min(chunk, shard.tokens - start)).max())
        for shard in bins.shards
        for start in range(0, shard.tokens, chunk)
    )


def check_tokenizer(meta: Meta, found_hash: str, where: Path | str, tokenizer_name: str) -> None:
    """Raises UserError where bins were made with another tokenizer: training on them would be training on noise."""
    if meta["tokenizer_hash"] != found_hash:
        raise UserError(
            f"the bins in {where} were made with another tokenizer (hash {meta['tokenizer_hash'][:12]}) than "
            f"{tokenizer_name} (hash {found_hash[:12]}): use the one they came with, tokenizer=hub "
            f"tokenizer.name_or_path={where}/tokenizer, or prepare them again"
        )


def fingerprint(splits: list[SplitBins], samples: int = 16) -> str:
    """Identity of token data wherever it lies: sizes and up to `samples` blocks of each shard, not the whole of it."""
    digest = sha256()
    for bins in splits:
        digest.update(f"split {bins.dtype} {bins.tokens}\n".encode())
        for shard in bins.shards:
            count = min(2048, shard.tokens)
            digest.update(f"shard {shard.tokens} {shard.documents}\n".encode())
            for i in range(samples):
                digest.update(shard.read((shard.tokens - count) * i // max(1, samples - 1), count).tobytes())
    return digest.hexdigest()
