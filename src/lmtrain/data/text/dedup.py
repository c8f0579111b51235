"""Training documents that repeat another one, word for word or nearly, are left out (data.dedup).

Repeated documents are learned by heart and make validation look better than it is where they stand in both splits (Lee
et al. 2022, arXiv:2107.06499). The first of those that are alike stays; one that is like a document of the validation
split that the source itself has is left out of training.

Two documents are nearly the same where the sets of their runs of _WORDS words have a Jaccard similarity of NEAR or
more. It is estimated from MinHash signatures (Broder 1997), which locality-sensitive hashing looks up.
"""

import hashlib
import json
import re
import zlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, Protocol

from lmtrain.config.schema_data import DataConfig
from lmtrain.data.sources.choose import Source, filtered
from lmtrain.data.sources.pieces import Piece
from lmtrain.data.store.prepared import folder_of, settings
from lmtrain.data.store.progress import PrepareProgress
from lmtrain.errors import UserError
from lmtrain.files import write_atomic

NEAR = 0.8
_WORDS = 5
_SIGNATURE = 128  # hashes; the standard error of a similarity of 0.8 is 0.035
_AT_ONCE = 4096  # runs of words that are hashed together: 4 MB
_COUNTED, _MANY = 1_000_000, 0.01  # some 100 MB of memory
_VERSION = 1  # raised when the same text comes to leave out other documents
_ENDS_WORD = re.compile(r"\s(?=\S*$)")


def without_repeats(source: Source, cfg: DataConfig, show: PrepareProgress) -> Source:
    """The source, or where data.dedup is set one whose training documents differ from each other.

    Raises:
        UserError: data.dedup=near without its package.
    """
    return source if cfg.dedup is None else _Deduplicated(source, cfg, show)


class _Deduplicated:
    """A source of text. What it leaves out is found once, and kept in the cache for later runs."""

    def __init__(self, source: Source, cfg: DataConfig, show: PrepareProgress) -> None:
        self.source, self.cfg, self.show = source, cfg, show
        self.index = _near if cfg.dedup == "near" else _exact
        self.index()  # a package that lacks is said before the text is read
        self.label, self.settings, self.resolved = source.label, source.settings, source.resolved
        self.notes = source.notes
        key = {"version": _VERSION, "data": settings(cfg), "source": source.settings, "resolved": source.resolved}
        # Where no hub has said which version the text is, nothing tells later whether it is still the same.
        self.kept_in = folder_of(cfg, "repeats", key).with_suffix(".json") if source.resolved is not None else None
        self.found: dict[str, Any] | None = None

    def pieces(self, name: str) -> Iterator[Piece] | None:
        found = filtered(self.source, self.cfg, name)
        return _without(found, set(self._repeats()["left_out"])) if name == "train" and found is not None else found

    def records(self, name: str) -> Iterator[Any] | None:
        return self.source.records(name)

    def text_bytes(self, name: str) -> int | None:
        return self.source.text_bytes(name)  # before documents are left out: a bar that ends early

    def notes_of_reading(self) -> list[str]:
        found = self._repeats()
        share = len(found["left_out"]) / max(1, found["documents"])
        words = f"{len(found['left_out']):,} of {found['documents']:,} documents ({share:.1%})"
        theirs: Callable[[], list[str]] = getattr(self.source, "notes_of_reading", list)
        return [*theirs(), f"data.dedup left out {words}, which repeat others"]

    def _repeats(self) -> dict[str, Any]:
        """{"documents": how many there are to train on, "left_out": the numbers of those that are left out}."""
        if self.found is None:
            self.found = _read(self.kept_in) or self._find()
        return self.found

    def _find(self) -> dict[str, Any]:
        index = self.index()
        for text in self._watched("val"):
            index.is_new(text)
        is_new = [index.is_new(text) for text in self._watched("train")]
        found = {"documents": len(is_new), "left_out": [i for i, new in enumerate(is_new) if not new]}
        if self.kept_in is not None:
            self.kept_in.parent.mkdir(parents=True, exist_ok=True)
            write_atomic(self.kept_in, json.dumps(found))
        return found

    def _watched(self, name: str) -> Iterator[Iterable[str]]:
        """The documents of a split, each as pieces of text to be read before the next is asked for."""
        pieces = iter(filtered(self.source, self.cfg, name) or ())
        self.show.start(name, self.source.text_bytes(name), doing="look for repeats in")
        for piece in pieces:
            yield self._text(piece, pieces)
        self.show.finish_bar()

    def _text(self, piece: Piece, pieces: Iterator[Piece]) -> Iterator[str]:
        """The text of the document that begins with `piece`."""
        while True:
            self.show.advance(len(piece.text.encode()), 0)
            yield piece.text
            if piece.ends:
                return
            piece = next(pieces)


def _read(file: Path | None) -> dict[str, Any] | None:
    return dict(json.loads(file.read_bytes())) if file is not None and file.is_file() else None


def _without(pieces: Iterable[Piece], left_out: set[int]) -> Iterator[Piece]:
    document = 0
    for piece in pieces:
        if document not in left_out:
            yield piece
        document += piece.ends


class RepeatCounter:
    """Counts documents that an earlier one equals, of the first _COUNTED of a split, while they are tokenized."""

    def __init__(self) -> None:
        self.seen: set[bytes] = set()
        self.documents = 0

    def watch(self, pieces: Iterable[Piece]) -> Iterator[Piece]:
        digest = hashlib.blake2b(digest_size=16)
        for piece in pieces:
            yield piece
            if self.documents == _COUNTED:
                continue
            digest.update(piece.text.encode())
            if piece.ends:
                self.seen.add(digest.digest())
                self.documents += 1
                digest = hashlib.blake2b(digest_size=16)

    def notes(self) -> list[str]:
        """For the plan, where they are a share of _MANY or more."""
        repeated = self.documents - len(self.seen)
        if repeated < _MANY * self.documents or not repeated:
            return []
        share = f"{repeated:,} of {self.documents:,} documents ({repeated / self.documents:.0%})"
        return [f"{share} are an earlier one again, letter for letter: data.dedup=exact leaves them out"]


class _Index(Protocol):
    """The documents seen so far."""

    def is_new(self, text: Iterable[str]) -> bool:
        """Whether none of them is like this one, which is then one of them."""


class _Exact:
    """Compares all words, so that white space does not count, by 128 bits of BLAKE2b."""

    def __init__(self) -> None:
        self.seen: set[bytes] = set()

    def is_new(self, text: Iterable[str]) -> bool:
        digest = hashlib.blake2b(digest_size=16)
        for words in _words(text):
            digest.update("".join(f"{word} " for word in words).encode())
        known = len(self.seen)
        self.seen.add(digest.digest())
        return len(self.seen) > known


class _Near:
    """Holds about 3 kB for each document that differs from those before it."""

    def __init__(self, empty: Any, lsh: Any) -> None:
        self.empty, self.lsh = empty, lsh
        self.signatures: list[Any] = []

    def is_new(self, text: Iterable[str]) -> bool:
        signature = self.empty.copy()
        for runs in _runs(text):
            signature.update_batch(runs)
        if any(signature.jaccard(self.signatures[found]) >= NEAR for found in self.lsh.query(signature)):
            return False
        self.lsh.insert(len(self.signatures), signature)
        self.signatures.append(signature)
        return True


def _exact() -> _Index:
    return _Exact()


def _near() -> _Index:
    try:
        from datasketch import MinHash, MinHashLSH
    except ImportError as error:
        raise UserError(
            f'data.dedup=near needs datasketch ({error}): pip install "lmtrain[dedup]"; data.dedup=exact needs nothing'
        ) from None
    empty = MinHash(num_perm=_SIGNATURE, hashfunc=zlib.crc32)
    return _Near(empty, MinHashLSH(threshold=NEAR, num_perm=_SIGNATURE))


def _words(text: Iterable[str]) -> Iterator[list[str]]:
    """The words of a document, some at a time, wherever its pieces are cut."""
    rest = ""
    for piece in text:
        rest += piece
        cut = _ENDS_WORD.search(rest)
        if cut is not None:
            yield rest[: cut.end()].split()
            rest = rest[cut.end() :]
    yield rest.split()


def _runs(text: Iterable[str]) -> Iterator[list[bytes]]:
    """All runs of _WORDS words of a document, in lower case; one run, of all of its words, where it has fewer."""
    held: list[str] = []
    any_run = False
    for words in _words(text):
        held += [word.lower() for word in words]
        while len(held) >= _WORDS:
            part, held = held[: _AT_ONCE + _WORDS - 1], held[max(1, min(_AT_ONCE, len(held) - _WORDS + 1)) :]
            yield [" ".join(part[i : i + _WORDS]).encode() for i in range(len(part) - _WORDS + 1)]
            any_run = True
    if not any_run:
        yield [" ".join(held).encode()]
