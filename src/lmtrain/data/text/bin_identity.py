"""The fingerprint of a folder of token bins, from the hashes of its files; checkpoints keep it."""

from hashlib import sha256
from pathlib import Path

from lmtrain.data import contents
from lmtrain.data.text.bins import Meta, ShardMeta, SplitBins, side_files


def recorded_hashes(meta: Meta) -> dict[str, str | None]:
    """Every file of a folder of bins, with the SHA-256 it was written with; None where none was recorded."""
    return {file: digest for split in meta["splits"].values() for shard in split["shards"]
            for file, digest in _files(shard, split["documents"] is not None)}  # fmt: skip


def _files(shard: ShardMeta, has_documents: bool) -> list[tuple[str, str | None]]:
    """A shard's files, and what lies beside it in the order of SIDES, each with its recorded SHA-256."""
    sides = side_files(Path(), shard) if has_documents else {}
    recorded = [(str(file), shard.get(f"{side}_sha256")) for side, file in sides.items()]
    return [(shard["file"], shard.get("sha256")), *recorded]  # type: ignore[list-item]


def fingerprint(meta: Meta, hashes: dict[str, str]) -> str:
    """Counts, tokens, borders, masks and labels, wherever the folder lies; `hashes` are those of its files, by name."""
    return contents.fingerprint(
        [[name, meta["dtype"], [_identity(shard, hashes) for shard in split["shards"]]]
         for name, split in meta["splits"].items()]
    )  # fmt: skip


def _identity(shard: ShardMeta, hashes: dict[str, str]) -> list[int | str | None]:
    tokens, docs, *sides = (hashes.get(file) for file, _ in _files(shard, has_documents=True))
    return [shard["tokens"], tokens, docs, *sides]


def sampled_fingerprint(splits: list[SplitBins], samples: int = 16) -> str:
    """The fingerprint in checkpoints of earlier versions: sizes and up to `samples` blocks of each shard."""
    digest = sha256()
    for bins in splits:
        digest.update(f"split {bins.dtype} {bins.tokens}\n".encode())
        for shard in bins.shards:
            count = min(2048, shard.tokens)
            digest.update(f"shard {shard.tokens} {shard.documents}\n".encode())
            for i in range(samples):
                digest.update(shard.read((shard.tokens - count) * i // max(1, samples - 1), count).tobytes())
    return digest.hexdigest()
