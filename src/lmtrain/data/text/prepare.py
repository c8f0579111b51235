"""Tokenizes source text into a folder with tokenizer and bins, found again by a hash of everything that shaped them.

Existing tokens (data=bins) are opened: see ready.py.
"""

import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerFast

from lmtrain.config.schema_data import DataConfig, TokenizerConfig
from lmtrain.data import tokenizers
from lmtrain.data.sources import choose as sources
from lmtrain.data.sources.pieces import Piece
from lmtrain.data.sources.reading import recall_reading
from lmtrain.data.store import bins
from lmtrain.data.store.parts import Tasks, check_divisible
from lmtrain.data.store.prepared import PreparedData, find_folder, folder_key, new_meta, prepare_folder
from lmtrain.data.store.progress import PrepareProgress
from lmtrain.data.store.writer import BinWriter, dtype_for
from lmtrain.data.text.encode import Encoder, make_encoder
from lmtrain.data.text.parts import TextParts, encode_part
from lmtrain.data.text.ready import open_ready
from lmtrain.data.text.repeats import RUN_BYTES, RepeatCounter, without_repeats
from lmtrain.data.tokenizers import Identity
from lmtrain.errors import UserError

# To be raised when the same text and settings give other tokens than before, so that older bins are no longer used.
PREPARE_VERSION = 2


def prepare(
    cfg: DataConfig, tokenizer_cfg: TokenizerConfig, progress: bool = True, tasks: Tasks | None = None
) -> PreparedData:
    """Tokenizes the text that `cfg` names into <cache_dir>/<label>-<hash>, or opens it there; opens existing bins.

    Args:
        tasks: what tokenizes the files in shares, if it is to be several processes; the result is the same.

    Raises:
        UserError: the text, a column, the tokenizer or the bins are missing or wrong, or the cache can't be written.
        RunError: the disk is full.
    """
    with PrepareProgress(progress) as show:
        if cfg.source == "bins":
            return open_ready(cfg, tokenizer_cfg, show)
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
        if tasks is not None and not bins.is_complete(target):
            check_divisible(source, cfg)
            filling = replace(filling, parts=tasks.encode(target, filling.tokenizer, filling.encode_part))

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
    parts: Path | None = None  # the folder of what tasks have tokenized

    def encode_part(self, folder: Path, rank: int, tasks: int) -> None:
        """Tokenizes share `rank` of the source into an empty folder beside that of what all tasks read."""
        tokenizer = tokenizers.load_folder(folder.with_name("shared") / "tokenizer")
        part: sources.Source = self.source.share(rank, tasks)  # type: ignore[attr-defined]  # check_divisible
        encoder = make_encoder(tokenizer, self.cfg)
        encode_part(folder, part, self.cfg, encoder, dtype_for(tokenizers.vocab_size(tokenizer)))

    def fill(self, folder: Path, key: dict[str, Any]) -> None:
        if self.parts is None:
            tokenizer = self.tokenizer(folder)
        else:
            shutil.copytree(self.parts / "shared" / "tokenizer", folder / "tokenizer")
            tokenizer = tokenizers.load_folder(folder / "tokenizer")
            recall_reading(self.parts)
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

        return tokenizers.kept(tokenizers.load_or_train(self.tokenizer_cfg, texts, self.named, watch), folder)

    def write_split(
        self, folder: Path, name: str, encoder: Encoder, dtype: str, repeats: RepeatCounter
    ) -> bins.SplitMeta | None:
        """Tokenizes one split and returns its counts, or None if there is no such split or no text is left in it."""
        cfg, source, show = self.cfg, self.source, self.show
        write = self._encode if self.parts is None else self._join
        with BinWriter(folder, name, dtype, cfg.shard_tokens or 2**30) as writer:
            if not write(name, writer, encoder, repeats):
                return None
            counts = writer.close()
        if counts["tokens"] > 0:
            show.finish(encoder.ids.by if self.parts is None else "")
            return counts
        if name == "train":
            keys = ("min_length", "num_samples", "val_fraction")
            filters = ", ".join(f"data.{key}={getattr(cfg, key)}" for key in keys)
            raise UserError(f"{source.label}: no text is left to train on ({filters}): a filter too strict?")
        show.say(f"{source.label}: no text is left for validation (data.val_fraction={cfg.val_fraction})")
        return None

    def _encode(self, name: str, writer: BinWriter, encoder: Encoder, repeats: RepeatCounter) -> bool:
        """Tokenizes a split into the writer; returns False if there is no such split."""
        pieces = sources.pieces(self.source, self.cfg, name)
        if pieces is None:
            return False
        if name == "train":
            pieces = repeats.watch(pieces)
        self.show.start(name, sources.expected_bytes(self.source, self.cfg, name))
        for part in encoder.encode(pieces):
            writer.append(part.ids, ends_document=part.ends, text_bytes=part.text_bytes)
            self.show.advance(part.text_bytes, len(part.ids))
        return True

    def _join(self, name: str, writer: BinWriter, encoder: Encoder, repeats: RepeatCounter) -> bool:
        """Does the same with what tasks have tokenized."""
        assert self.parts is not None
        parts = TextParts(self.parts, self.cfg, str(writer.dtypes["bin"]), getattr(self.source, "left_out", []))
        blocks = parts.blocks(name)
        if blocks is None:
            return False
        self.show.start(name, None, doing="join")
        for block in blocks:
            for ids, ends, fact in parts.segments(block):
                text_bytes = int(fact["bytes"]) if ends else 0
                writer.append(ids, ends_document=ends, text_bytes=text_bytes)
                self.show.advance(text_bytes, len(ids))
                if ends and name == "train":
                    repeats.add(int(fact["digest"]))
            encoder.unknown += int(block.facts["unknown"][block.kept].sum())
            encoder.written_ends += int(block.facts["written_ends"][block.kept].sum())
        return True
