"""From source text to a folder of tokenizer and bins, found again by a hash of everything that shaped them."""

import os
from pathlib import Path
from typing import Any

from lmtrain.config.schema_data import DataConfig, TokenizerConfig
from lmtrain.data import tokenizers
from lmtrain.data.folder_key import folder_key
from lmtrain.data.progress import PrepareProgress
from lmtrain.data.sources import choose as sources
from lmtrain.data.text import bins
from lmtrain.data.text.bin_writer import BinWriter
from lmtrain.data.text.encode import Encoder, make_encoder
from lmtrain.data.text.prepared import PreparedData, fill_once, folder_of, is_complete, new_meta, open_folder
from lmtrain.data.text.ready_bins import open_ready
from lmtrain.errors import UserError

# Raised when the same text and settings come to give other tokens, so that bins made before are not used any more.
PREPARE_VERSION = 2


def prepare(cfg: DataConfig, tokenizer_cfg: TokenizerConfig, progress: bool = True) -> PreparedData:
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
            return open_folder(*open_ready(cfg, tokenizer_cfg, show.say), [], cfg, show)
        return _prepare(cfg, tokenizer_cfg, show)
    finally:
        show.stop()


def _prepare(cfg: DataConfig, tokenizer_cfg: TokenizerConfig, show: PrepareProgress) -> PreparedData:
    source, named = sources.open_source(cfg), tokenizers.identity(tokenizer_cfg)
    key = _key(cfg, tokenizer_cfg, source, named)
    target = folder_of(cfg, f"{source.label}-{named.label}", key)
    if None in key["resolved"].values() and not is_complete(target):
        earlier = _prepared_before(target, key)
        if earlier is not None:
            show.say(f"the hub doesn't answer; using what was prepared from it before: {earlier}")
            target = earlier
    fill_once(target, lambda folder: _fill(folder, cfg, tokenizer_cfg, source, named, key, show), cfg, show)
    tokenizer = tokenizers.load_folder(target / "tokenizer")
    return open_folder(target, bins.load_meta(target), tokenizer, source.notes, cfg, show)


def _key(
    cfg: DataConfig, tokenizer_cfg: TokenizerConfig, source: sources.Source, named: tokenizers.Identity
) -> dict[str, Any]:
    return folder_key(
        cfg,
        tokenizer_cfg,
        version=PREPARE_VERSION,
        source=source.settings,
        made_with=named.settings,
        resolved={"source": source.resolved, "tokenizer": named.resolved},
    )


def _prepared_before(target: Path, key: dict[str, Any]) -> Path | None:
    """The newest folder that differs from `target` only in what an unreachable hub couldn't tell."""
    unknown = [name for name, value in key["resolved"].items() if value is None]
    found = []
    for folder in target.parent.glob(f"{target.name.rpartition('-')[0]}-*"):
        if folder.suffix == ".tmp" or not is_complete(folder):
            continue
        theirs = bins.load_meta(folder)["key"]
        resolved = {**theirs.get("resolved", {}), **dict.fromkeys(unknown)}
        if {**theirs, "resolved": resolved} == key:
            found.append(folder)
    return max(found, key=lambda f: (f / bins.META).stat().st_mtime_ns, default=None)


def _fill(
    folder: Path,
    cfg: DataConfig,
    tokenizer_cfg: TokenizerConfig,
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
    made = tokenizers.load_or_train(
        tokenizer_cfg,
        lambda name: (p.text for p in sources.pieces(source, cfg, name) or ()),
        named,
        watch=lambda text: show.watch(text, _training_bytes(source, cfg, tokenizer_cfg)),
    )
    tokenizers.save(made, folder / "tokenizer")
    tokenizer = tokenizers.load_folder(folder / "tokenizer")
    encoder, meta = make_encoder(tokenizer, cfg), new_meta(tokenizer, key)
    for name in ("train", "val"):
        counts = _write_split(folder, cfg, source, name, encoder, meta["dtype"], show)
        if counts is not None:
            meta["splits"][name] = counts
    bins.save_meta(meta, folder)


def _training_bytes(source: sources.Source, cfg: DataConfig, tokenizer_cfg: TokenizerConfig) -> int | None:
    """About how many bytes of text a tokenizer is trained on; None where that isn't known."""
    known = sources.expected_bytes(source, cfg, "train")
    return None if known is None else min(known, tokenizer_cfg.train_characters or known)


def _write_split(
    folder: Path,
    cfg: DataConfig,
    source: sources.Source,
    name: str,
    encoder: Encoder,
    dtype: str,
    show: PrepareProgress,
) -> bins.SplitMeta | None:
    """Tokenizes one split; None where there is no such split or nothing is left of it."""
    pieces = sources.pieces(source, cfg, name)
    if pieces is None:
        return None
    writer = BinWriter(folder, name, dtype, cfg.shard_tokens or 2**30)
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
