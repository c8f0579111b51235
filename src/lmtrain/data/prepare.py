"""From source text to a folder of tokenizer and bins, found again by a hash of everything that shaped them."""

import hashlib
import json
import os
import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerFast

from lmtrain.data import bins, sources, tokenizers
from lmtrain.data.bin_writer import BinWriter, dtype_for
from lmtrain.data.cache import build_once
from lmtrain.data.encode import Encoder
from lmtrain.data.progress import PrepareProgress
from lmtrain.data.ready_bins import open_ready
from lmtrain.errors import RunError, UserError, disk_full
from lmtrain.schema import Data, Tokenizer

# Raised when the same text and settings come to give other tokens, so that bins made before are not used any more.
PREPARE_VERSION = 1

# Settings that shape the tokens of any source; what a source itself was asked for is in its `settings`.
_SHAPING = (
    "text_column", "column_separator", "document_start", "min_length", "num_samples", "val_fraction", "append_eos",
    "shard_tokens",
)  # fmt: skip


@dataclass(frozen=True)
class PreparedData:
    """A folder of bins and its tokenizer; `fingerprint` names the tokens themselves, wherever the folder lies."""

    folder: Path
    meta: bins.Meta
    tokenizer: PreTrainedTokenizerFast
    fingerprint: str


def prepare(cfg: Data, tokenizer_cfg: Tokenizer, progress: bool = True) -> PreparedData:
    """Tokenizes the text that `cfg` names into <cache_dir>/<label>-<hash>, or finds it there; opens ready bins.

    Safe to call from several processes at once (one prepares, the others wait) and to kill at any moment (nothing that
    looks complete is left, and the next call starts over).

    Raises:
        UserError: the text, a column, the tokenizer or the bins are missing or wrong, or the cache can't be written.
        RunError: the disk is full.
    """
    show = PrepareProgress(progress)
    try:
        if cfg.source == "bins":
            return _opened(*open_ready(cfg, tokenizer_cfg, show.say))
        return _prepare(cfg, tokenizer_cfg, show)
    finally:
        show.stop()


def _prepare(cfg: Data, tokenizer_cfg: Tokenizer, show: PrepareProgress) -> PreparedData:
    source, named = sources.open_source(cfg), tokenizers.identity(tokenizer_cfg)
    key = _key(cfg, source, named)
    cache_dir = Path(cfg.cache_dir).expanduser()
    label = re.sub(r"[^A-Za-z0-9._-]+", "-", f"{source.label}-{named.label}")
    target = cache_dir / f"{label}-{key_hash(key)[:12]}"
    if None in key["resolved"].values() and not _is_complete(target):
        earlier = _prepared_before(cache_dir, label, key)
        if earlier is not None:
            show.say(f"the hub doesn't answer; using what was prepared from it before: {earlier}")
            target = earlier
    if not _is_complete(target):
        build_once(
            target, _is_complete, lambda folder: _build(folder, cfg, tokenizer_cfg, source, named, key, show), show.say
        )
    return _opened(target, bins.load_meta(target), tokenizers.load_folder(target / "tokenizer"))


def _opened(folder: Path, meta: bins.Meta, tokenizer: PreTrainedTokenizerFast) -> PreparedData:
    splits = [bins.open_bins(folder, name) for name in meta["splits"]]
    return PreparedData(folder, meta, tokenizer, bins.fingerprint(splits))


def _key(cfg: Data, source: sources.Source, named: tokenizers.Identity) -> dict[str, Any]:
    key = {
        "version": PREPARE_VERSION,
        "source": source.settings,
        "tokenizer": named.settings,
        "resolved": {"source": source.resolved, "tokenizer": named.resolved},
        **{name: getattr(cfg, name) for name in _SHAPING},
    }
    return dict(json.loads(json.dumps(key)))  # as it will be read back from meta.json


def key_hash(key: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()


def _is_complete(folder: Path) -> bool:
    return (folder / bins.META).exists()


def _prepared_before(cache_dir: Path, label: str, key: dict[str, Any]) -> Path | None:
    """The newest folder that differs from `key` only in what an unreachable hub couldn't tell."""
    unknown = [name for name, value in key["resolved"].items() if value is None]
    found = []
    for folder in cache_dir.glob(f"{label}-*"):
        if folder.suffix == ".tmp" or not _is_complete(folder):
            continue
        theirs = bins.load_meta(folder)["key"]
        resolved = {**theirs.get("resolved", {}), **dict.fromkeys(unknown)}
        if {**theirs, "resolved": resolved} == key:
            found.append(folder)
    return max(found, key=lambda f: (f / bins.META).stat().st_mtime_ns, default=None)


def _build(
    folder: Path,
    cfg: Data,
    tokenizer_cfg: Tokenizer,
    source: sources.Source,
    named: tokenizers.Identity,
    key: dict[str, Any],
    show: PrepareProgress,
) -> None:
    """Fills an empty folder: tokenizer, bins, and meta.json last."""
    if cfg.num_proc:
        # The tokenizers library starts its threads at first use and asks for their number only then.
        os.environ["RAYON_NUM_THREADS"] = str(cfg.num_proc)
    if tokenizer_cfg.kind == "bpe" and tokenizer_cfg.vocab_size:
        show.say(f"training a BPE of {tokenizer_cfg.vocab_size:,} tokens on {source.label}")
    try:
        made = tokenizers.load_or_train(
            tokenizer_cfg, lambda name: (p.text for p in sources.pieces(source, cfg, name) or ()), named
        )
        tokenizers.save(made, folder / "tokenizer")
        tokenizer = tokenizers.load_folder(folder / "tokenizer")
        meta = _meta(tokenizer, key, cfg, named)
        for name in ("train", "val"):
            counts = _write_split(folder, cfg, source, name, tokenizer, meta, show)
            if counts is not None:
                meta["splits"][name] = counts
        bins.save_meta(meta, folder)
    except Exception as error:
        if disk_full(error):
            raise RunError(_explain_full(folder, show)) from None
        raise


def _meta(tokenizer: PreTrainedTokenizerFast, key: dict[str, Any], cfg: Data, named: tokenizers.Identity) -> bins.Meta:
    eos_id = tokenizer.eos_token_id
    if cfg.append_eos and eos_id is None:
        raise UserError(
            f"tokenizer {named.label} has no end-of-text token to put after each document: set data.append_eos=false, "
            f"or choose a tokenizer that has one"
        )
    size = tokenizers.vocab_size(tokenizer)
    return {
        "format_version": bins.FORMAT_VERSION,
        "dtype": dtype_for(size),
        "vocab_size": size,
        "tokenizer_hash": tokenizers.tokenizer_hash(tokenizer),
        "eos_id": eos_id,
        "splits": {},
        "key": key,
    }


def _write_split(
    folder: Path,
    cfg: Data,
    source: sources.Source,
    name: str,
    tokenizer: PreTrainedTokenizerFast,
    meta: bins.Meta,
    show: PrepareProgress,
) -> bins.SplitMeta | None:
    """Tokenizes one split; None where there is no such split or nothing is left of it."""
    pieces = sources.pieces(source, cfg, name)
    if pieces is None:
        return None
    encoder = Encoder(tokenizer, meta["eos_id"] if cfg.append_eos else None)
    writer = BinWriter(folder, name, meta["dtype"], cfg.shard_tokens or 2**30)
    show.start(name, sources.expected_bytes(source, cfg, name))
    try:
        for part in encoder.encode(pieces):
            writer.append(part.ids, ends_document=part.ends, text_bytes=part.text_bytes)
            show.advance(part.text_bytes, len(part.ids))
        counts = writer.close()
    finally:
        writer.abort()
    if counts["tokens"] > 0:
        show.finish()
        return counts
    if name == "train":
        raise UserError(
            f"{source.label}: no text is left to train on (data.min_length={cfg.min_length}, "
            f"data.num_samples={cfg.num_samples}, data.val_fraction={cfg.val_fraction}): is the source empty, or a "
            f"filter too strict?"
        )
    show.say(f"{source.label}: no text is left for validation (data.val_fraction={cfg.val_fraction})")
    return None


def _explain_full(folder: Path, show: PrepareProgress) -> str:
    written = sum(f.stat().st_size for f in folder.rglob("*") if f.is_file())
    need = f"more than the {written / 1e6:,.1f} MB written so far"
    if show.total and show.text_bytes:
        need = f"about {written * max(1.0, show.total / show.text_bytes) / 1e6:,.1f} MB"
    free = shutil.disk_usage(folder).free
    return (
        f"the disk is full: preparing needs {need} in {folder.parent}, where {free / 1e6:,.1f} MB are left. "
        f"Free some space, or set data.cache_dir to a folder on another disk; what was written is "
        f"removed"
    )
