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
A document lies in one shard unless it is longer than a whole shard. The tokens may lie elsewhere, in files of other
programs (`parts` of meta.json, see data/text/ready.py): the folder then holds the rest.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NotRequired, TypedDict, cast

from lmtrain.data.store import contents
from lmtrain.data.store.shards import SIDES, Extent, Shard
from lmtrain.errors import UserError
from lmtrain.files import read_regular

FORMAT_VERSION = 1
META = "meta.json"


class ShardMeta(TypedDict):
    """One shard of a split: the name of its file, its counts, and the SHA-256 of it and its side files, if recorded."""

    file: str
    tokens: int
    documents: int | None  # None: there is no .docs file, and nothing says where documents end
    sha256: NotRequired[str]
    docs_sha256: NotRequired[str]
    mask_sha256: NotRequired[str]  # examples only
    labels_sha256: NotRequired[str]  # examples with labels only
    texts_sha256: NotRequired[str]  # examples with texts only
    parts: NotRequired[list[tuple[str, str, int, int]]]  # tokens in other files: see shards.Extent


class SplitMeta(TypedDict):
    """Counts of one split; `bytes` are the UTF-8 bytes of its text (the denominator of bits per byte)."""

    tokens: int
    documents: int | None  # None, like `bytes`, if unknown
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
    """The shards of one split; `documents` and `bytes` are None if unknown."""

    shards: list[Shard]
    tokens: int
    documents: int | None
    bytes: int | None
    dtype: str
    meta: Meta | None

    def begins_with(self, start: list[Any]) -> bool:
        return self.tokens >= len(start) and self.shards[0].read(0, len(start)).tolist() == start


def open_bins(folder: Path, split: str) -> SplitBins:
    """Opens the bins of split "train" or "val" in a folder of lmtrain's.

    Raises:
        UserError: there are no such bins, or a file disagrees with meta.json.
    """
    meta = load_meta(folder)
    if split not in meta["splits"]:
        raise UserError(f"{folder} holds no {split} bins")
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
        parts = [Extent(folder / file, dt, offset, tokens) for file, dt, offset, tokens in entry.get("parts", ())]
        path = parts[0].path if parts else folder / entry["file"]
        shards.append(Shard(path, dtype, entry["tokens"], side_files(folder, entry), parts))
        if shards[-1].documents != (entry["documents"] or 0):
            raise UserError(f"{shards[-1].docs} and {folder / META} disagree: delete {folder} and prepare again")
    return shards


def side_files(folder: Path, entry: ShardMeta) -> dict[str, Path]:
    """Returns the side files of a shard: its document ends, and its loss mask, labels and texts if it has them."""
    has_ends = entry["documents"] is not None
    sides = [side for side in SIDES if (has_ends if side == "docs" else f"{side}_sha256" in entry)]
    return {side: (folder / entry["file"]).with_suffix(f".{side}") for side in sides}


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
            for file, digest in _files(shard)}  # fmt: skip


def _files(shard: ShardMeta) -> list[tuple[str, str | None]]:
    """Returns a shard's files and its side files, in the order of SIDES, each with its recorded SHA-256."""
    tokens = (
        [(part[0], None) for part in shard["parts"]] if "parts" in shard else [(shard["file"], shard.get("sha256"))]
    )
    return [*tokens, *((str(f), shard.get(f"{side}_sha256")) for side, f in side_files(Path(), shard).items())]


def fingerprint(meta: Meta, hashes: dict[str, str]) -> str:
    """Returns a fingerprint of counts, tokens, document ends, masks, labels and texts, wherever the folder lies.

    hashes: SHA-256 of the folder's files, by name.
    """
    return contents.fingerprint(
        [[name, meta["dtype"], [[s["tokens"], *(hashes.get(file) for file, _ in _files(s))]
                                for s in split["shards"]]]
         for name, split in meta["splits"].items()]
    )  # fmt: skip
