"""Text that tasks have tokenized: each task the documents of its files, and one process the corpus of all of them.

A task can't know which documents are held out, so it tokenizes all of them and notes of each what the choice needs.
Per split of the source it writes <split>.ids (token ids, nothing between documents) and <split>.facts (FACTS).
"""

import hashlib
from collections import deque
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from lmtrain.config.schema_data import DataConfig
from lmtrain.data.sources.choose import Source
from lmtrain.data.sources.pieces import Piece, are_held_out, at_least, split_of
from lmtrain.data.sources.reading import note_reading
from lmtrain.data.store.parts import parts_in
from lmtrain.data.text.encode import Encoder
from lmtrain.errors import UserError

FACTS = np.dtype(
    [(name, "<i8") for name in ("tokens", "characters", "bytes", "unknown", "written_ends")] + [("digest", "<u8")]
)
_READ = 1 << 20  # tokens per read
_AT_ONCE = 1 << 16  # documents whose facts are held in memory


def encode_part(folder: Path, source: Source, cfg: DataConfig, encoder: Encoder, dtype: str) -> None:
    """Tokenizes the documents of a source's share, those shorter than data.min_length left out."""
    for name in ("train", "val"):
        pieces = source.pieces(name)
        if pieces is None:
            continue
        digests: deque[int] = deque()
        with open(folder / f"{name}.ids", "wb") as ids, open(folder / f"{name}.facts", "wb") as facts:
            fact = np.zeros(1, FACTS)
            unknown, written = encoder.unknown, encoder.written_ends
            for segment in encoder.encode(_watched(at_least(pieces, cfg.min_length or 0), digests)):
                ids.write(np.ascontiguousarray(segment.ids, np.dtype(dtype).newbyteorder("<")).tobytes())
                fact["tokens"] += len(segment.ids)
                fact["characters"] += segment.characters
                fact["bytes"] += segment.text_bytes
                if segment.ends:
                    fact["unknown"], fact["written_ends"] = encoder.unknown - unknown, encoder.written_ends - written
                    unknown, written = encoder.unknown, encoder.written_ends
                    fact["digest"] = digests.popleft()
                    facts.write(fact.tobytes())
                    fact = np.zeros(1, FACTS)
    note_reading(folder)


def _watched(pieces: Iterable[Piece], digests: deque[int]) -> Iterator[Piece]:
    """Passes on documents and appends a hash of each one's text, by which copies are counted."""
    digest = hashlib.blake2b(digest_size=8)
    for piece in pieces:
        digest.update(piece.text.encode())
        if piece.ends:
            digests.append(int.from_bytes(digest.digest(), "little"))
            digest = hashlib.blake2b(digest_size=8)
        yield piece


class PartDocuments(NamedTuple):
    """Adjacent documents of a part: their facts [n], which of them are kept [n], and the file with their token ids."""

    facts: np.ndarray
    kept: np.ndarray
    ids: Path
    first_token: int


class TextParts:
    """The documents of all parts, in the source's order."""

    def __init__(self, folder: Path, cfg: DataConfig, dtype: str, left_out: list[int]) -> None:
        """left_out: numbers of training documents, as data.dedup finds them, which no split gets."""
        self.parts, self.cfg, self.dtype = parts_in(folder), cfg, np.dtype(dtype).newbyteorder("<")
        self.left_out = np.array(left_out, dtype=np.int64)

    def blocks(self, name: str) -> Iterator[PartDocuments] | None:
        """Yields the documents of split "train" or "val"; None if there is to be no validation split.

        Raises:
            UserError: there are too few documents to hold some of them out.
        """
        own = any((part / "val.facts").exists() for part in self.parts)
        if own or self.cfg.val_fraction == 0:
            return self._all(name) if own or name == "train" else None
        totals = [(block.kept.sum(), block.facts["characters"][block.kept].sum()) for block in self._all("train")]
        documents, characters = (int(sum(values)) for values in zip(*totals, strict=True)) if totals else (0, 0)
        share, cut = split_of(documents, characters, self.cfg.val_fraction, self.cfg.min_val_rows)
        if cut is not None:
            found = f"data.val_fraction={self.cfg.val_fraction} of {documents:,} documents cuts one in two"
            raise UserError(f"{found}, which tasks can't: set data.val_path, data.val_fraction=0, or no prepare.tasks")
        return self._held_out(share, name == "val")

    def _held_out(self, share: float, held_out: bool) -> Iterator[PartDocuments]:
        index = 0
        for block in self._all("train"):
            number = index + np.cumsum(block.kept) - block.kept
            index += int(block.kept.sum())
            yield block._replace(kept=block.kept & (are_held_out(number, share) == held_out))

    def _all(self, name: str) -> Iterator[PartDocuments]:
        documents = 0
        for part in self.parts:
            tokens = 0
            with open(part / f"{name}.facts", "rb") as file:
                while len(facts := np.frombuffer(file.read(_AT_ONCE * FACTS.itemsize), FACTS)):
                    number = documents + np.arange(len(facts))
                    kept = ~np.isin(number, self.left_out) if name == "train" else np.ones(len(facts), bool)
                    yield PartDocuments(facts, kept, part / f"{name}.ids", tokens)
                    documents += len(facts)
                    tokens += int(facts["tokens"].sum())

    def segments(self, block: PartDocuments) -> Iterator[tuple[np.ndarray, bool, Any]]:
        """Yields the token ids of the documents that are kept, whether a document ends with them, and its facts."""
        begins = block.first_token + np.cumsum(block.facts["tokens"]) - block.facts["tokens"]
        with open(block.ids, "rb") as file:
            for at in np.flatnonzero(block.kept):
                fact, left = block.facts[at], int(block.facts["tokens"][at])
                file.seek(int(begins[at]) * self.dtype.itemsize)
                while True:
                    ids = np.frombuffer(file.read(min(left, _READ) * self.dtype.itemsize), self.dtype)
                    left -= len(ids)
                    yield ids, left == 0, fact
                    if left == 0:
                        break
