"""Streams of documents: a document is a run of pieces of text, so that none has to fit into memory."""

import math
import re
from collections.abc import Iterable, Iterator
from typing import NamedTuple


class Piece(NamedTuple):
    """A stretch of a document's text; `ends` where the document is complete with it."""

    text: str
    ends: bool


def join_rows(rows: Iterable[str], document_start: str) -> Iterator[Piece]:
    """Joins rows, adding nothing between them, into documents that each begin with a row matching the pattern.

    Wikitext, for one, has a row for each line of an article; rows before the first match are a document too.
    """
    starts = re.compile(document_start)
    is_open = False
    for row in rows:
        if is_open and starts.search(row):
            yield Piece("", True)
        is_open = True
        yield Piece(row, False)
    if is_open:
        yield Piece("", True)


def at_least(pieces: Iterable[Piece], min_length: int) -> Iterator[Piece]:
    """Drops documents of fewer than max(1, min_length) characters."""
    held: list[str] = []
    length, kept = 0, False
    for piece in pieces:
        if not kept:
            held.append(piece.text)
            length += len(piece.text)
            if length >= max(1, min_length):
                kept, piece = True, Piece("".join(held), piece.ends)
                held.clear()
        if kept:
            yield piece
        if piece.ends:
            length, kept = 0, False
            held.clear()


def first(pieces: Iterable[Piece], num_documents: int) -> Iterator[Piece]:
    """The first `num_documents` documents."""
    if num_documents <= 0:
        return
    done = 0
    for piece in pieces:
        yield piece
        done += piece.ends
        if done == num_documents:
            return


MOST = 0.1  # of the data, at most, where more than data.val_fraction is held out
CHARACTERS = 1000  # of a text that is cut: they count as a row


def enough(fraction: float, there: int, few: int) -> float:
    """The share to hold out of so many rows: `fraction`, or more where it comes to fewer than `few`.

    Nothing is held out where `fraction` doesn't come to a whole one.
    """
    if not 1 <= there * fraction + 1e-9 < few:
        return fraction
    return max(fraction, min(MOST, few / there))


def share_to_hold_out(pieces: Iterable[Piece], fraction: float, few: int) -> float:
    """`fraction`, or of a small corpus a larger share (`enough`). Reads no more than it needs to."""
    if few == 0:
        return fraction
    documents = length = 0
    for piece in pieces:
        length += len(piece.text)
        documents += piece.ends
        if length * fraction >= few * CHARACTERS:
            return fraction
    in_documents = documents >= math.ceil(1 / fraction)
    return enough(fraction, documents, few) if in_documents else enough(fraction, length, few * CHARACTERS)


def plan_cut(pieces: Iterable[Piece], fraction: float) -> int | None:
    """How to hold out `fraction` of a corpus: None for whole documents, else the character at which to cut its text.

    Every (1 / fraction)-th document is held out where there are that many. Of fewer documents (one book, say) the last
    part of their text is, as nanoGPT cuts tiny shakespeare. Reads no more than it needs to.
    """
    documents = length = 0
    for piece in pieces:
        length += len(piece.text)
        documents += piece.ends
        if documents >= math.ceil(1 / fraction):
            return None
    return int(length * (1 - fraction))


def split(pieces: Iterable[Piece], fraction: float, cut: int | None, held_out: bool) -> Iterator[Piece]:
    """The part of a corpus that `plan_cut` holds out, or the rest of it; documents of it may be empty."""
    index = position = 0
    for piece in pieces:
        if cut is not None:
            before = max(0, cut - position)
            yield Piece(piece.text[before:] if held_out else piece.text[:before], piece.ends)
            position += len(piece.text)
        elif is_held_out(index, fraction) == held_out:
            yield piece
        index += piece.ends


def is_held_out(index: int, fraction: float) -> bool:
    """Whether item `index` is held out: where index * fraction passes a whole number, so evenly and exactly so many."""
    passed = [math.floor(number * fraction + 1e-9) for number in (index, index + 1)]  # 49 * (1 / 49) is less than 1
    return passed[1] > passed[0]
