"""Prepared tokens on disk: the format of both text and tokenized examples, and functions that open it.

A folder of token bins holds
    meta.json            format version, dtype, vocab_size, tokenizer_hash, eos_id; each split's counts and shards, with
                         the SHA-256 of their files
    train_00000.bin      token ids, little endian uint16 or uint32, documents one after the other
    train_00000.docs     uint64, little endian: the end (exclusive, in tokens) of each document that ends in this shard
    train_00000.mask     examples only: one byte for each token, 1 where it is learned
    train_00000.labels   examples of some row formats only: int64, little endian, one for each document
    train_00000.texts    examples of some row formats only: UTF-8, a line for each document
    tokenizer/           the tokenizer, as save_pretrained writes it
A document lies in one shard unless it is longer than a whole shard. nanoGPT's folders (train.bin and val.bin, without
meta.json and .docs files) can be read too.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NotRequired, TypedDict, cast

import numpy as np

from lmtrain.data.store import contents
from lmtrain.data.store.shards import SIDES, Shard
from lmtrain.errors import UserError
from lmtrain.files import read_regular

FORMAT_VERSION = 1
META = "meta.json"


class ShardMeta(TypedDict):
    """One shard of a split: the name of its file, its counts, and the SHA-256 of it and its side files, if recorded."""

    file: str
    tokens: int
    documents: int
    sha256: NotRequired[str]
    docs_sha256: NotRequired[str]
    mask_sha256: NotRequired[str]  # examples only
    labels_sha256: NotRequired[str]  # examples with labels only
    texts_sha256: NotRequired[str]  # examples with texts only


class SplitMeta(TypedDict):
    """Counts of one split; `bytes` are the UTF-8 bytes of its text (the denominator of bits per byte)."""

    tokens: int
    documents: int | None  # None, like `bytes`, for bins without meta.json
    bytes: int | None
    shards: list[ShardMeta]
    counts: NotRequired[dict[str, Any]]  # examples: how many rows were read, dropped, cut, ...
    parts: NotRequired[list[int]]  # examples: how many came from each source, in the sources' order


class Meta(TypedDict):
    """The contents of meta.json. `key` is everything that determined the tokens (see prepare.py)."""

    format_version: int
    dtype: str
    vocab_size: int
    tokenizer_hash: str
    eos_id: int | None
    splits: dict[str, SplitMeta]
    key: dict[str, Any]
    group: NotRequired[int]  # examples: the number that belong together, 2 for pairs
    words: NotRequired[str]  # examples: the detected format of the rows
    notes: NotRequired[list[str]]  # remarks from reading the source
    questions: NotRequired[list[dict[str, Any]]]  # examples: from the validation rows, see examples.row_format.Encoded


def is_complete(folder: Path) -> bool:
    """Returns whether a folder of prepared data has its metadata, which is written last."""
    return (folder / META).exists()


def save_meta(meta: Meta, folder: Path) -> None:
    """Writes meta.json, the last file of a folder of bins."""
    (folder / META).write_text(json.dumps(meta, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def load_meta(folder: Path) -> Meta:
    """Reads meta.json; raises UserError if it can't be read or has another format version."""
    path = folder / META
    try:
        meta = json.loads(read_regular(path))
        version = meta["format_version"]
        missing = set(Meta.__required_keys__) - set(meta)
        if not isinstance(meta.get("splits", {}), dict):
            raise TypeError(f"splits is {meta['splits']!r}, not a mapping")
    except (OSError, ValueError, TypeError, KeyError, RecursionError) as error:
        raise UserError(f"{path} can't be read as the sidecar of token bins: {error!r}") from None
    if version != FORMAT_VERSION or missing:
        raise UserError(f"{path} has format version {version}, lmtrain reads {FORMAT_VERSION}: prepare it again")
    return cast(Meta, meta)


@dataclass(frozen=True)
class SplitBins:
    """The shards of one split; `documents` and `bytes` are None without a meta.json."""

    shards: list[Shard]
    tokens: int
    documents: int | None
    bytes: int | None
    dtype: str
    meta: Meta | None

    def begins_with(self, start: list[Any]) -> bool:
        return self.tokens >= len(start) and self.shards[0].read(0, len(start)).tolist() == start


def has_split(folder: Path, split: str) -> bool:
    """Returns whether a folder of bins, lmtrain's or nanoGPT's, has that split."""
    if is_complete(folder):
        return split in load_meta(folder)["splits"]
    return (folder / f"{split}.bin").exists()


def open_bins(folder: Path, split: str) -> SplitBins:
    """Opens the bins of split "train" or "val" in a folder of lmtrain's or nanoGPT's.

    Raises:
        UserError: there are no such bins, or a file disagrees with meta.json.
    """
    if not folder.is_dir():
        raise UserError(f"data.path={folder}: no such folder; give the folder that holds train.bin or {META}")
    if not has_split(folder, split):
        names = ", ".join(sorted(p.name for p in folder.iterdir())[:10]) or "nothing"
        raise UserError(f"{folder} holds no {split} bins, neither in {META} nor as {split}.bin (it holds {names})")
    return _open_prepared(folder, split) if is_complete(folder) else _open_plain(folder, split)


def _open_prepared(folder: Path, split: str) -> SplitBins:
    meta = load_meta(folder)
    try:
        counts = meta["splits"][split]
        shards = open_shards(folder, meta["dtype"], counts)
        return SplitBins(shards, counts["tokens"], counts["documents"], counts["bytes"], meta["dtype"], meta)
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        raise UserError(f"{folder / META} can't be read as the sidecar of token bins: {error!r}") from None


def open_shards(folder: Path, dtype: str, split: SplitMeta) -> list[Shard]:
    """Opens the files of a split that a BinWriter wrote."""
    shards = []
    for entry in split["shards"]:
        shards.append(Shard(folder / entry["file"], dtype, entry["tokens"], side_files(folder, entry)))
        if shards[-1].documents != entry["documents"]:
            raise UserError(f"{shards[-1].docs} and {folder / META} disagree: delete {folder} and prepare again")
    return shards


def side_files(folder: Path, entry: ShardMeta) -> dict[str, Path]:
    """Returns the side files of a shard: its document ends, and its loss mask, labels and texts if it has them."""
    sides = [side for side in SIDES if side == "docs" or f"{side}_sha256" in entry]
    return {side: (folder / entry["file"]).with_suffix(f".{side}") for side in sides}


def _open_plain(folder: Path, split: str) -> SplitBins:
    file, dtype = folder / f"{split}.bin", "uint16"  # as nanoGPT writes it
    tokens, rest = divmod(file.stat().st_size, np.dtype(dtype).itemsize)
    if rest:
        raise UserError(f"{file} is not a whole number of {dtype} tokens ({file.stat().st_size} bytes)")
    if tokens == 0:
        raise UserError(f"{file} is empty")
    if (other := _other_layout(file)) is not None:
        advice = f"write it as {dtype} without a header, or prepare the text with lmtrain.prepare"
        raise UserError(f"{file} holds {other}, where nanoGPT's {dtype} is read: {advice}")
    return SplitBins([Shard(file, dtype, tokens, {})], tokens, None, None, dtype, None)


def _other_layout(file: Path) -> str | None:
    """Returns what other programs' tokens a file without metadata looks like, or None for uint16.

    Read as a wider type, tokens of uint16 are huge numbers: no tokenizer has so many ids.
    """
    start = np.fromfile(file, dtype="<u2", count=_LOOKED_AT)
    magic = int(start[:2].view("<u4")[0]) if len(start) > 1 else 0
    if magic in _HEADERS:
        return f"the header of {_HEADERS[magic]} and then tokens"
    is_small = int(start.max()) < _MOST_IDS >> 16  # the tokens of a vocabulary that small are of any width
    for dtype in () if is_small else map(np.dtype, ("<u8", "<u4", ">u8", ">u4")):
        size = len(start) * start.itemsize
        ids = start[: size // dtype.itemsize * dtype.itemsize // start.itemsize].view(dtype)
        if len(ids) >= _ENOUGH and int(ids.max()) < _MOST_IDS:
            order = ", big endian" if dtype.str[0] == ">" else ""
            return f"tokens of {dtype.itemsize} bytes each (such as {dtype.name} or int{8 * dtype.itemsize}{order})"
    return None


_LOOKED_AT = 1 << 20  # 16-bit words of a file without metadata
_ENOUGH = 64  # tokens that tell a file's layout
_MOST_IDS = 2**20  # no tokenizer has more
_HEADERS = {20240520: "llm.c and modded-nanogpt", 20240801: "llm.c for Llama 3"}  # the first of 256 int32


def largest_token(bins: SplitBins, chunk: int = 1 << 22) -> int:
    """Returns the largest token id, reading chunk by chunk."""
    return max(
        int(shard.read(start, min(chunk, shard.tokens - start)).max())
        for shard in bins.shards
        for start in range(0, shard.tokens, chunk)
    )


def check_tokenizer(made_with: str, found: str, where: Path | str, tokenizer_name: str) -> None:
    """Raises UserError if bins were made with another tokenizer, in which case their ids would be noise to train on.

    Args:
        made_with: the hash of the bins' tokenizer.
        found: the hash of the tokenizer that is used.
    """
    if made_with != found:
        advice = f"use theirs, tokenizer=hub tokenizer.name_or_path={where}/tokenizer, or prepare them again"
        raise UserError(f"the bins in {where} were made with another tokenizer than {tokenizer_name}: {advice}")


def recorded_hashes(meta: Meta) -> dict[str, str | None]:
    """Returns the SHA-256 recorded in meta.json for each file of a folder of token bins; None for files without one."""
    return {file: digest for split in meta["splits"].values() for shard in split["shards"]
            for file, digest in _files(shard, split["documents"] is not None)}  # fmt: skip


def _files(shard: ShardMeta, has_documents: bool) -> list[tuple[str, str | None]]:
    """Returns a shard's file and its side files, in the order of SIDES, each with its recorded SHA-256."""
    sides = side_files(Path(), shard) if has_documents else {}
    recorded = [(str(file), shard.get(f"{side}_sha256")) for side, file in sides.items()]
    return [(shard["file"], shard.get("sha256")), *recorded]  # type: ignore[list-item]


def fingerprint(meta: Meta, hashes: dict[str, str]) -> str:
    """Returns a fingerprint of counts, tokens, document ends, masks, labels and texts, wherever the folder lies.

    hashes: SHA-256 of the folder's files, by name.
    """
    return contents.fingerprint(
        [[name, meta["dtype"], [[s["tokens"], *(hashes.get(file) for file, _ in _files(s, has_documents=True))]
                                for s in split["shards"]]]
         for name, split in meta["splits"].items()]
    )  # fmt: skip
