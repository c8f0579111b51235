"""Helpers that join the documents of a source into whole strings, which lmtrain itself never does."""

from collections.abc import Iterable, Iterator

from lmtrain.config.schema_data import DataConfig
from lmtrain.data.sources import choose
from lmtrain.data.sources.pieces import Piece


def whole(pieces: Iterable[Piece]) -> Iterator[str]:
    parts: list[str] = []
    for piece in pieces:
        parts.append(piece.text)
        if piece.ends:
            yield "".join(parts)
            parts.clear()


def documents(cfg: DataConfig, split: str) -> Iterator[str]:
    yield from whole(choose.pieces(choose.open_source(cfg), cfg, split) or iter(()))
