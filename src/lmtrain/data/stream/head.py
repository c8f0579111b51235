"""The head of a stream: its first tokens, held out for validation and kept as bins, and the tokenizer."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path

from lmtrain.config.schema_data import DataConfig, TokenizerConfig
from lmtrain.data import tokenizers
from lmtrain.data.sources.choose import refuse_changed
from lmtrain.data.store import bins, contents
from lmtrain.data.store.prepared import PreparedData, folder_key, folder_of, new_meta, prepare_folder
from lmtrain.data.store.progress import PrepareProgress
from lmtrain.data.store.writer import BinWriter
from lmtrain.data.stream.source import Place, StreamSource, open_stream, segments
from lmtrain.data.text.encode import Encoder, make_encoder
from lmtrain.errors import UserError
from lmtrain.files import read_regular

VERSION = 1
_BEGIN = "begin.json"  # the place where training begins


@dataclass(frozen=True)
class Head:
    """A stream whose validation split is prepared; training begins at `begin` in every epoch."""

    source: StreamSource
    prepared: PreparedData
    begin: Place
    cfg: DataConfig

    @cached_property
    def encoder(self) -> Encoder:
        """The encoder, built when first used by the rank that reads the stream: it copies the tokenizer."""
        return make_encoder(self.prepared.tokenizer, self.cfg)

    @property
    def fingerprint(self) -> str:
        return contents.fingerprint([self.prepared.fingerprint, self.source.identity])


def prepare_head(cfg: DataConfig, tokenizer_cfg: TokenizerConfig, progress: bool = True) -> Head:
    """Reads the head of the stream once; later runs find it in the cache.

    Raises:
        UserError: the source or the tokenizer is missing or invalid, or there is less text than is to be held out.
    """
    source, named = open_stream(cfg), tokenizers.identity(tokenizer_cfg)
    key = folder_key(
        cfg,
        tokenizer_cfg,
        stream=VERSION,
        val_tokens=cfg.ring_val_tokens,
        source=source.identity,
        made_with=named.settings,
        resolved=named.resolved,
    )
    target = folder_of(cfg, f"{source.label}-stream-{named.label}", key)
    with PrepareProgress(progress) as show:

        def fill(folder: Path) -> None:
            watch = partial(show.watch, total_bytes=tokenizer_cfg.train_characters)
            made = tokenizers.load_or_train(tokenizer_cfg, lambda _: _text(source), named, watch)
            tokenizer = tokenizers.kept(made, folder)
            _write_head(folder, cfg, source, make_encoder(tokenizer, cfg), new_meta(tokenizer, key), show)

        prepared = prepare_folder(target, fill, lambda: refuse_changed(source), source.notes, cfg, show)
    return Head(source, prepared, Place(**json.loads(read_regular(target / _BEGIN))), cfg)


def _text(source: StreamSource) -> Iterator[str]:
    return (block.text for part in range(source.parts) for block in source.rows(part, 0))


def _write_head(
    folder: Path, cfg: DataConfig, source: StreamSource, encoder: Encoder, meta: bins.Meta, show: PrepareProgress
) -> None:
    """Writes the first whole segments, at least data.ring_val_tokens tokens, and the place where they end."""
    wanted = cfg.ring_val_tokens or 0
    show.start("the head", None)
    with BinWriter(folder, "val", meta["dtype"], cfg.shard_tokens or 2**30) as writer:
        for segment in segments(source, encoder, Place()):
            last = writer.tokens + len(segment.ids) >= wanted  # the rest of its document is trained on
            writer.append(segment.ids, ends_document=segment.ends or last, text_bytes=segment.text_bytes)
            show.advance(segment.text_bytes, len(segment.ids))
            if last:
                begin = segment.place._replace(skip=len(segment.ids))
                break
        else:
            found = f"only {writer.tokens:,} tokens" if writer.tokens else "no text"
            held_out = f"but its first data.ring_val_tokens={wanted} tokens are held out for validation"
            raise UserError(f"{source.label} holds {found}, {held_out}: use more text, or lower data.ring_val_tokens")
        meta["splits"]["val"] = writer.close()
    (folder / _BEGIN).write_text(json.dumps(begin._asdict()), encoding="utf-8")
    bins.save_meta(meta, folder)
    show.finish(encoder.ids.by)
