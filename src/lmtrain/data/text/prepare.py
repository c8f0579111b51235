"""Tokenizes source text into a folder with tokenizer and bins, found again by a hash of everything that shaped them.

Existing bins (data=bins) are opened: a folder that lmtrain prepared, or nanoGPT's train.bin and val.bin.
"""

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerFast

from lmtrain.config.schema_data import DataConfig, TokenizerConfig
from lmtrain.data import tokenizers
from lmtrain.data.sources import choose as sources
from lmtrain.data.sources.addresses import is_address
from lmtrain.data.sources.pieces import Piece
from lmtrain.data.store import bins
from lmtrain.data.store.contents import Facts
from lmtrain.data.store.prepared import PreparedData, find_folder, folder_key, new_meta, open_folder, prepare_folder
from lmtrain.data.store.progress import PrepareProgress
from lmtrain.data.store.writer import BinWriter
from lmtrain.data.text.encode import Encoder, make_encoder
from lmtrain.data.text.repeats import RUN_BYTES, RepeatCounter, without_repeats
from lmtrain.data.tokenizers import Identity
from lmtrain.errors import UserError

# To be raised when the same text and settings give other tokens than before, so that older bins are no longer used.
PREPARE_VERSION = 2


def prepare(cfg: DataConfig, tokenizer_cfg: TokenizerConfig, progress: bool = True) -> PreparedData:
    """Tokenizes the text that `cfg` names into <cache_dir>/<label>-<hash>, or opens it there; opens existing bins.

    Raises:
        UserError: the text, a column, the tokenizer or the bins are missing or wrong, or the cache can't be written.
        RunError: the disk is full.
    """
    with PrepareProgress(progress) as show:
        if cfg.source == "bins":
            return open_folder(*open_ready(cfg, tokenizer_cfg, show.say), [], cfg, show)
        source = without_repeats(sources.open_source(cfg), cfg, show)
        named = tokenizers.identity(tokenizer_cfg)
        key = folder_key(
            cfg,
            tokenizer_cfg,
            version=PREPARE_VERSION,
            source=source.settings,
            made_with=named.settings,
            resolved={"source": source.resolved, "tokenizer": named.resolved},
            **sources.min_val_rows(cfg),
        )
        target = find_folder(cfg, f"{source.label}-{named.label}", key, show)
        filling = _Filling(cfg, tokenizer_cfg, source, named, show)

        def refuse_changed() -> None:
            sources.refuse_changed(source)
            tokenizers.refuse_changed(tokenizer_cfg, named)

        return prepare_folder(target, lambda folder: filling.fill(folder, key), refuse_changed, source.notes, cfg, show)


def pieces_of(cfg: DataConfig, name: str) -> Iterator[Piece] | None:
    """Returns the documents of a split as `prepare` tokenizes them, without those that data.dedup leaves out.

    Returns None if there is no such split.
    """
    with PrepareProgress(show=True) as show:
        return sources.pieces(without_repeats(sources.open_source(cfg), cfg, show), cfg, name)


@dataclass(frozen=True)
class _Filling:
    """Fills an empty folder with a tokenizer and the tokens of a source."""

    cfg: DataConfig
    tokenizer_cfg: TokenizerConfig
    source: sources.Source
    named: Identity
    show: PrepareProgress

    def fill(self, folder: Path, key: dict[str, Any]) -> None:
        tokenizer = self.tokenizer(folder)
        encoder, meta = make_encoder(tokenizer, self.cfg), new_meta(tokenizer, key)
        repeats = RepeatCounter()
        for name in ("train", "val"):
            counts = self.write_split(folder, name, encoder, meta["dtype"], repeats)
            if counts is not None:
                meta["splits"][name] = counts
        notes = meta["notes"] = [*getattr(self.source, "notes_of_reading", list)()]
        if encoder.unknown:
            found = f"{encoder.unknown:,} tokens stand for characters that the tokenizer lacks"
            notes.append(f"{found}, all read as {tokenizer.unk_token}")
        if encoder.written_ends:
            found = f"{encoder.end} is written in the text, {encoder.written_ends:,} times, and read as text"
            notes.append(f"{found}: to end documents there, give each a row of its own (JSON lines with a text)")
        if self.cfg.dedup != "near":  # which leaves no copies to count
            train = meta["splits"]["train"]
            length = max(4, round(RUN_BYTES * train["tokens"] / (train["bytes"] or train["tokens"])))
            notes += repeats.notes(bins.open_shards(folder, meta["dtype"], train), length)
        bins.save_meta(meta, folder)

    def tokenizer(self, folder: Path) -> PreTrainedTokenizerFast:
        if self.cfg.num_proc:
            # The tokenizers library starts its threads at first use and reads their number only then.
            os.environ["RAYON_NUM_THREADS"] = str(self.cfg.num_proc)
        if self.tokenizer_cfg.kind == "bpe" and self.tokenizer_cfg.vocab_size:
            self.show.say(f"training a BPE of {self.tokenizer_cfg.vocab_size:,} tokens on {self.source.label}")

        def texts(name: str) -> Iterator[str]:
            return (piece.text for piece in sources.pieces(self.source, self.cfg, name) or ())

        def watch(text: Iterator[str]) -> Iterator[str]:
            known, most = sources.expected_bytes(self.source, self.cfg, "train"), self.tokenizer_cfg.train_characters
            return self.show.watch(text, None if known is None else min(known, most or known))

        return kept(tokenizers.load_or_train(self.tokenizer_cfg, texts, self.named, watch), folder)

    def write_split(
        self, folder: Path, name: str, encoder: Encoder, dtype: str, repeats: RepeatCounter
    ) -> bins.SplitMeta | None:
        """Tokenizes one split and returns its counts, or None if there is no such split or no text is left in it."""
        cfg, source, show = self.cfg, self.source, self.show
        pieces = sources.pieces(source, cfg, name)
        if pieces is None:
            return None
        if name == "train":
            pieces = repeats.watch(pieces)
        show.start(name, sources.expected_bytes(source, cfg, name))
        with BinWriter(folder, name, dtype, cfg.shard_tokens or 2**30) as writer:
            for part in encoder.encode(pieces):
                writer.append(part.ids, ends_document=part.ends, text_bytes=part.text_bytes)
                show.advance(part.text_bytes, len(part.ids))
            counts = writer.close()
        if counts["tokens"] > 0:
            show.finish(encoder.ids.by)
            return counts
        if name == "train":
            keys = ("min_length", "num_samples", "val_fraction")
            filters = ", ".join(f"data.{key}={getattr(cfg, key)}" for key in keys)
            raise UserError(f"{source.label}: no text is left to train on ({filters}): a filter too strict?")
        show.say(f"{source.label}: no text is left for validation (data.val_fraction={cfg.val_fraction})")
        return None


def kept(tokenizer: PreTrainedTokenizerFast, folder: Path) -> PreTrainedTokenizerFast:
    """Saves a tokenizer in `folder`/tokenizer and loads it from there, as later runs will."""
    tokenizers.save(tokenizer, folder / "tokenizer")
    return tokenizers.load_folder(folder / "tokenizer")


def open_ready(
    cfg: DataConfig, tokenizer_cfg: TokenizerConfig, say: Callable[[str], None]
) -> tuple[Path, bins.Meta, PreTrainedTokenizerFast]:
    """Opens existing bins; returns the folder, its metadata (made up if there is no meta.json) and their tokenizer.

    Raises:
        UserError: there are no bins, or they were made with another tokenizer than the requested one or hold ids it
            lacks.
    """
    if not cfg.path or not isinstance(cfg.path, str):
        raise UserError("data=bins needs data.path=<folder>: one that lmtrain prepared, or with train.bin and val.bin")
    if is_address(cfg.path):
        raise UserError(f"data.path={cfg.path}: bins are read from a disk: copy the folder to one and name it there")
    folder = Path(cfg.path).expanduser()
    train = bins.open_bins(folder, "train")
    if train.meta is not None:
        if any(shard.mask is not None for shard in train.shards):
            raise UserError(f"{folder} holds examples with a loss mask, and data=bins reads text: name bins of text")
        tokenizer = tokenizers.load_folder(folder / "tokenizer")
        own = tokenizers.tokenizer_hash(tokenizer)
        bins.check_tokenizer(train.meta["tokenizer_hash"], own, folder, f"{folder}/tokenizer")
        _check_asked(train.meta, tokenizer, tokenizer_cfg, folder)
        return folder, train.meta, tokenizer
    return _open_plain(cfg, tokenizer_cfg, folder, train, say)


def _check_asked(meta: bins.Meta, own: PreTrainedTokenizerFast, cfg: TokenizerConfig, folder: Path) -> None:
    """Checks that a tokenizer requested by name is the bins' own; one that is made from a corpus is not made again."""
    if cfg.kind in ("bpe", "char"):
        return
    named = tokenizers.identity(cfg)
    if cfg.kind == "hub" and named.unreachable and meta["key"].get("made_with") == named.settings:
        return
    asked = tokenizers.tokenizer_hash(tokenizers.load_or_train(cfg, lambda _: iter(()), named))
    bins.check_tokenizer(tokenizers.tokenizer_hash(own), asked, folder, f"tokenizer {named.label}")


def _open_plain(
    cfg: DataConfig, tokenizer_cfg: TokenizerConfig, folder: Path, train: bins.SplitBins, say: Callable[[str], None]
) -> tuple[Path, bins.Meta, PreTrainedTokenizerFast]:
    """Opens nanoGPT's layout. Its meta.pkl is never read: unpickling can run any code."""
    splits = {"train": train}
    if bins.has_split(folder, "val"):
        splits["val"] = bins.open_bins(folder, "val")
    facts = Facts(cfg.cache_dir)
    largest = max(facts.of(s.shards[0].path, "largest_token", partial(bins.largest_token, s)) for s in splits.values())
    tokenizer = _plain_tokenizer(tokenizer_cfg, folder, largest, say)
    meta = new_meta(tokenizer, {}) | {"dtype": train.dtype}
    for name, split in splits.items():
        file: bins.ShardMeta = {"file": split.shards[0].path.name, "tokens": split.tokens, "documents": 0}
        meta["splits"][name] = {"tokens": split.tokens, "documents": None, "bytes": None, "shards": [file]}
    return folder, meta, tokenizer


def _plain_tokenizer(
    cfg: TokenizerConfig, folder: Path, largest: int, say: Callable[[str], None]
) -> PreTrainedTokenizerFast:
    """Returns the folder's tokenizer, or the requested one if it needs no corpus, or one that shows ids as numbers."""
    reason = f"tokenizer.kind={cfg.kind} can't be made without the text"
    tokenizer: PreTrainedTokenizerFast | None = None
    if (folder / "tokenizer").is_dir():
        tokenizer, name = tokenizers.load_folder(folder / "tokenizer"), f"{folder}/tokenizer"
    elif cfg.kind in ("hub", "bytes"):
        named: Identity = tokenizers.identity(cfg)
        name = named.label
        try:
            tokenizer = tokenizers.load_or_train(cfg, lambda _: iter(()), named)
        except UserError as error:
            if not named.unreachable:
                raise
            reason = str(error)
    if tokenizer is None:
        say(f"{folder} comes without a tokenizer ({reason}): samples will show token ids as numbers")
        return tokenizers.numbers(largest + 1)
    if largest >= tokenizers.vocab_size(tokenizer):
        found = f"the bins in {folder} hold token id {largest}, but tokenizer {name} has only"
        ids = tokenizers.vocab_size(tokenizer)
        raise UserError(f"{found} {ids} ids: they were made with another one; set tokenizer=... to that one")
    return tokenizer
