"""Duplicates: validation text that is also in training, and training documents that repeat others (data.dedup).

Models memorize repeated documents; documents that are in both splits make validation look better than it is (Lee et al.
2022, arXiv:2107.06499). Of similar documents, the first is kept; a document that is similar to one of the validation
split that the source itself has is left out of training.

Two documents are near duplicates if the sets of their n-grams of _WORDS words have a Jaccard similarity of NEAR or
more. It is estimated from MinHash signatures (Broder 1997), which rensa makes and looks up by locality-sensitive
hashing: candidates are those with which one of _BANDS bands of r = 6 hashes agrees, which finds 1 - (1 - s^r)^_BANDS of
the documents with a similarity of s: 99.8 % at 0.8, and 27 % at 0.5, which comparing the signatures rejects.
"""

import functools
import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lmtrain.config.schema_data import DataConfig
from lmtrain.data.sources.choose import Source, filtered, refuse_changed
from lmtrain.data.sources.pieces import Piece
from lmtrain.data.store.bins import Shard
from lmtrain.data.store.prepared import folder_of, settings
from lmtrain.data.store.progress import PrepareProgress
from lmtrain.errors import needing
from lmtrain.files import write_atomic

PIECE = 100  # bytes; validation text of this length that is also in the training text counts as copied
_MOST = 1 << 23  # tokens of each split that are compared, which takes half a second
_MOST_IN_COPIES = 1 << 21  # tokens in which near copies are counted, which takes 0.4 s
RUN_BYTES = 30  # of the n-grams of tokens that near duplicates are counted by, about _WORDS words
_SAMPLED, _FEWEST = 4, 8  # one in so many n-grams is compared; the fewest of a document that can be judged
_AT_MOST, _EARLIER = 1 << 20, 4  # documents, a power of two
_TOKENS_AT_ONCE = 1 << 20
_BASE = 0x9E3779B97F4A7C15  # odd, so it has an inverse modulo 2^64

NEAR = 0.8
_WORDS = 5
_SIGNATURE = 120  # hashes; the standard error of a similarity of 0.8 is 0.037
_BANDS = 20
_COUNTED, _MANY = 1_000_000, 0.01  # documents (about 100 MB of memory); share of repeats that is worth a note
_SEED = 1  # of the hashes
_VERSION = 3  # to be raised when other documents of the same text are left out than before

Hashes = NDArray[np.uint64]


def share_seen(train: Sequence[Shard], val: Sequence[Shard], length: int) -> float:
    """Returns the share of the validation shards' pieces of `length` tokens that also occur in the training shards.

    The first _MOST tokens of each split are compared. Pieces are adjacent in validation and begin at any token in
    training; they are compared by 64-bit polynomial hashes (Karp and Rabin 1987).
    """
    adjacent = (hashes[::length] for _, hashes in _hashes(val, length, _MOST))
    pieces = np.sort(np.concatenate([np.empty(0, np.uint64), *adjacent]))
    if len(pieces) == 0:
        return 0.0
    seen = np.zeros(len(pieces), dtype=bool)
    possible = np.zeros(1 << 16, dtype=bool)  # by the first 16 bits: leaves few hashes to search for
    possible[pieces >> np.uint64(48)] = True
    for _, hashes in _hashes(train, length, _MOST):
        found = hashes[possible[hashes >> np.uint64(48)]]
        places = np.searchsorted(pieces, found).clip(max=len(pieces) - 1)
        seen[places[pieces[places] == found]] = True
    return float(seen[np.searchsorted(pieces, pieces)].mean())  # only the first of equal pieces was marked


def _hashes(shards: Sequence[Shard], length: int, most: int) -> Iterator[tuple[int, Hashes]]:
    """Yields the hashes of the pieces that begin at each of the first `most` tokens, a part of a shard at a time.

    Each array comes with the index of its first token among the tokens of all shards.
    """
    before = 0
    for shard in shards:
        for start in range(0, min(shard.tokens, most - before), _TOKENS_AT_ONCE):
            read = min(_TOKENS_AT_ONCE + length - 1, shard.tokens - start)
            if read >= length:
                yield before + start, _rolling(shard.read(start, read), length)
        before += shard.tokens


def near_repeats(train: Sequence[Shard], length: int) -> tuple[int, int]:
    """Counts the documents in the first _MOST_IN_COPIES tokens that data.dedup=near would leave out.

    Similarity is that of the sets of n-grams of `length` tokens, estimated from the n-grams with the lowest hashes
    (FracMinHash; Irber et al. 2022). Of the earlier documents with an n-gram, the first and the last _EARLIER count.

    Returns:
        the number of such documents, and of all documents that were looked at.
    """
    most = _MOST_IN_COPIES
    offsets = np.cumsum([0, *(shard.tokens for shard in train)]).tolist()
    known = [s.document_ends(0, most - at) + at for s, at in zip(train, offsets, strict=False) if at < most]
    ends = np.concatenate([np.empty(0, np.int64), *known])[:_AT_MOST]
    if len(ends) < 2:
        return 0, len(ends)
    # The sampled n-grams of each document.
    keys = [np.empty(0, np.uint64)]  # a hash, and in its last bits the number of the document
    for start, hashes in _hashes(train, length, most):
        first = start + np.flatnonzero(hashes < np.uint64((1 << 64) // _SAMPLED))
        document = np.searchsorted(ends, first, side="right")
        within = (document < len(ends)) & (document == np.searchsorted(ends, first + length - 1, side="right"))
        hashes = hashes[first[within] - start] & ~np.uint64(_AT_MOST - 1)
        keys.append(hashes | document[within].astype(np.uint64))
    # Ascending, so the documents of a hash are too; with counts, numpy sorts, in a tenth of the time of its hash table.
    found, _ = np.unique(np.concatenate(keys), return_counts=True)
    # Pairs of a document and an earlier one with the same n-gram, and how many they share.
    document = (found & np.uint64(_AT_MOST - 1)).astype(np.int64)
    _, begins, count = np.unique(found // np.uint64(_AT_MOST), return_index=True, return_counts=True)
    index, first = np.arange(len(found)), np.repeat(begins, count)  # of each key, and of the first key with its hash
    others = [*(index - back for back in range(1, _EARLIER + 1)), np.where(index - first > _EARLIER, first, -1)]
    both = [(document[other >= first], document[other[other >= first]]) for other in others]
    pairs, shared = np.unique(np.concatenate([one * _AT_MOST + other for one, other in both]), return_counts=True)
    # Near copies share most of what either has.
    sizes = np.bincount(document, minlength=len(ends))
    document, earlier = pairs // _AT_MOST, pairs % _AT_MOST
    near = (shared >= NEAR * (sizes[document] + sizes[earlier] - shared)) & (sizes[document] >= _FEWEST)
    return len(np.unique(document[near])), len(ends)


def _rolling(tokens: NDArray[np.int64], length: int) -> Hashes:
    """Returns the hash of tokens[i : i + length] for each i: the sum of (token + 1) x BASE^j, modulo 2^64."""
    powers = np.full(len(tokens), _BASE, dtype=np.uint64).cumprod(dtype=np.uint64)
    inverse = np.full(len(tokens), pow(_BASE, -1, 1 << 64), dtype=np.uint64).cumprod(dtype=np.uint64)
    terms = (tokens.astype(np.uint64) + np.uint64(1)) * powers
    sums = np.concatenate([np.zeros(1, np.uint64), terms.cumsum(dtype=np.uint64)])
    count = len(tokens) - length + 1
    return (sums[length:] - sums[:count]) * inverse[:count]


def without_repeats(source: Source, cfg: DataConfig, show: PrepareProgress) -> Source:
    """Returns the source or, if data.dedup is set, one without training documents that repeat others.

    The package for data.dedup=near is imported (UserError if it is missing) only when repeats are searched for, and so
    not for prepared data.
    """
    return source if cfg.dedup is None else _Deduplicated(source, cfg, show)


class _Deduplicated:
    """A source of text without repeated documents. The repeats are found once and cached for later runs."""

    def __init__(self, source: Source, cfg: DataConfig, show: PrepareProgress) -> None:
        self.source, self.cfg, self.show = source, cfg, show
        self.label, self.settings, self.resolved = source.label, source.settings, source.resolved
        self.notes = source.notes
        key = {"version": _VERSION, "data": settings(cfg), "source": source.settings, "resolved": source.resolved}
        # If the hub didn't report the text's version, a later run can't tell whether the text is still the same.
        self.kept_in = folder_of(cfg, "repeats", key).with_suffix(".json") if source.resolved is not None else None

    def refuse_changed(self) -> None:
        refuse_changed(self.source)

    @property
    def left_out(self) -> list[int]:
        """Numbers of the training documents that are left out, of those that pass data.min_length."""
        return list(self._repeats["left_out"])

    def share(self, rank: int, tasks: int) -> Source:
        """Returns a share of the source with its repeats, as `left_out` counts the documents of all shares."""
        return self.source.share(rank, tasks)  # type: ignore[attr-defined]

    def pieces(self, name: str) -> Iterator[Piece] | None:
        found = filtered(self.source, self.cfg, name)
        return _without(found, set(self._repeats["left_out"])) if name == "train" and found is not None else found

    def records(self, name: str) -> Iterator[Any] | None:
        return self.source.records(name)

    def text_bytes(self, name: str) -> int | None:
        return self.source.text_bytes(name)  # before documents are left out, so the progress bar ends early

    def notes_of_reading(self) -> list[str]:
        found = self._repeats
        share = len(found["left_out"]) / max(1, found["documents"])
        words = f"{len(found['left_out']):,} of {found['documents']:,} documents ({share:.1%})"
        theirs: Callable[[], list[str]] = getattr(self.source, "notes_of_reading", list)
        return [*theirs(), f"data.dedup left out {words}, because they repeat others"]

    @functools.cached_property
    def _repeats(self) -> dict[str, Any]:
        """{"documents": number of training documents, "left_out": indices of those that are left out}."""
        if self.kept_in is not None and self.kept_in.is_file():
            return dict(json.loads(self.kept_in.read_bytes()))
        return self._find()

    def _find(self) -> dict[str, Any]:
        index = _Near() if self.cfg.dedup == "near" else _Exact()
        for text in self._watched("val"):
            index.is_new(text)
        is_new = [index.is_new(text) for text in self._watched("train")]
        found = {"documents": len(is_new), "left_out": [i for i, new in enumerate(is_new) if not new]}
        if self.kept_in is not None:
            self.refuse_changed()
            self.kept_in.parent.mkdir(parents=True, exist_ok=True)
            write_atomic(self.kept_in, json.dumps(found))
        return found

    def _watched(self, name: str) -> Iterator[Iterable[str]]:
        """Yields the documents of a split, each as pieces of text that must be read before requesting the next."""
        pieces = iter(filtered(self.source, self.cfg, name) or ())
        self.show.start(name, self.source.text_bytes(name), doing="look for repeats in")
        for piece in pieces:
            yield self._text(piece, pieces)

    def _text(self, piece: Piece, pieces: Iterator[Piece]) -> Iterator[str]:
        """Yields the text of the document that begins with `piece`."""
        while True:
            self.show.advance(len(piece.text.encode()), 0)
            yield piece.text
            if piece.ends:
                return
            piece = next(pieces)


def _without(pieces: Iterable[Piece], left_out: set[int]) -> Iterator[Piece]:
    document = 0
    for piece in pieces:
        if document not in left_out:
            yield piece
        document += piece.ends


class RepeatCounter:
    """A counter of exact repeats among the first _COUNTED training documents, updated while they are tokenized."""

    def __init__(self) -> None:
        self.seen: set[int] = set()
        self.documents = 0

    def watch(self, pieces: Iterable[Piece]) -> Iterator[Piece]:
        digest = 0
        for piece in pieces:
            yield piece
            if self.documents == _COUNTED:
                continue
            digest = hash((digest, piece.text))  # 64 bits, and in a quarter of BLAKE2b's time
            if piece.ends:
                self.add(digest)
                digest = 0

    def add(self, digest: int) -> None:
        """Counts a document by the hash of its text."""
        if self.documents < _COUNTED:
            self.seen.add(digest)
            self.documents += 1

    def notes(self, train: Sequence[Shard], length: int) -> list[str]:
        """Returns notes for the plan if _MANY of the documents or more are exact copies, or near copies in addition.

        Args:
            train: the documents' tokens, in which near copies are looked for by n-grams of `length` tokens.
        """
        exact = (self.documents - len(self.seen)) / max(1, self.documents)
        repeated, documents = near_repeats(train, length)
        near = repeated / max(1, documents)
        notes = []
        if exact >= _MANY:
            share = f"{self.documents - len(self.seen):,} of {self.documents:,} documents ({exact:.0%})"
            notes.append(f"{share} are exact copies of an earlier one: data.dedup=exact leaves them out")
        if near >= exact + _MANY:
            share = f"{repeated:,} of {documents:,} documents ({near:.0%})"
            notes.append(f"{share} are near or exact copies of an earlier one: data.dedup=near leaves them out")
        return notes


class _Exact:
    """The documents seen so far, by 128 bits of BLAKE2b of all words, so that white space does not count."""

    def __init__(self) -> None:
        self.seen: set[bytes] = set()

    def is_new(self, text: Iterable[str]) -> bool:
        """Returns whether the document differs from all documents seen so far, and adds it to them."""
        digest = hashlib.blake2b(digest_size=16)
        for words in _words(text):
            digest.update("".join(f"{word} " for word in words).encode())
        known = len(self.seen)
        self.seen.add(digest.digest())
        return len(self.seen) > known


class _Near:
    """The documents seen so far that are not near duplicates of earlier ones; about 3 kB each."""

    def __init__(self) -> None:
        with needing("dedup", "data.dedup=near"):
            from rensa import RMinHash, RMinHashDeduplicator
        self.minhash = RMinHash
        self.kept = RMinHashDeduplicator(NEAR, _SIGNATURE, use_lsh=True, num_bands=_BANDS, seed=_SEED)

    def is_new(self, text: Iterable[str]) -> bool:
        """Returns whether the document is no near duplicate of those seen so far; if so, adds it to them."""
        signature = self.minhash(_SIGNATURE, _SEED)
        for words in _overlapping(_words(map(str.casefold, text))):  # unlike lower(), it depends on no other letter
            hashes = np.array(self.minhash.hash_token_sets([words])[0], np.uint64)
            signature.update(_ngrams(hashes).view("V8").tolist())  # joining the n-grams' words would take twice as long
        return bool(self.kept.add(str(self.kept.len()), signature))


def _words(text: Iterable[str]) -> Iterator[list[str]]:
    """Yields the words of a document in groups, regardless of where its pieces are cut."""
    rest = ""  # of a word that may go on in the next piece
    for piece in text:
        words = (rest + piece).split()
        rest = words.pop() if words and not piece[-1:].isspace() else ""
        yield words
    yield rest.split()


def _ngrams(words: Hashes) -> Hashes:
    """Returns the hashes of all n-grams of _WORDS words, or of all words if they are fewer, from those of the words."""
    length = min(_WORDS, len(words))
    count = len(words) - length + 1
    found = words[:count]
    for at in range(1, length):
        found = found * np.uint64(_BASE) + words[at : at + count]
    return found


def _overlapping(groups: Iterable[list[str]]) -> Iterator[list[str]]:
    """Yields groups of words of which each begins with the last words of the one before, so that no n-gram is lost.

    A document of fewer than _WORDS words gives one group, which is its only n-gram.
    """
    held: list[str] = []
    found = False
    for words in groups:
        held += words
        if len(held) >= _WORDS:
            yield held
            held = held[1 - _WORDS :]
            found = True
    if not found:
        yield held or [""]
