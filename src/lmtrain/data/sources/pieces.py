"""Streams of documents: a document is a sequence of pieces of text, so that it need not fit into memory."""

import math
import re
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray


class Piece(NamedTuple):
    """A piece of a document's text; `ends` is true for the last piece of a document."""

    text: str
    ends: bool


def join_rows(rows: Iterable[str], document_start: str) -> Iterator[Piece]:
    """Joins rows, adding nothing between them, into documents that each begin with a row matching the pattern.

    Wikitext, for example, has one row per line of an article. Rows before the first match form a document too.
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
    """Yields the first `num_documents` documents."""
    if num_documents <= 0:
        return
    done = 0
    for piece in pieces:
        yield piece
        done += piece.ends
        if done == num_documents:
            return


MOST = 0.1  # largest share of the data to hold out where data.val_fraction is raised
CHARACTERS = 1000  # characters that count as one row if the text itself is cut


def enough(fraction: float, there: int, few: int) -> float:
    """Returns the share of `there` rows to hold out: `fraction`, or more where that gives fewer than `few` rows.

    A raised share is at most MOST. The share stays `fraction` where that doesn't even give one row.
    """
    if not 1 <= there * fraction + 1e-9 < few:
        return fraction
    return max(fraction, min(MOST, few / there))


def plan_split(pieces: Iterable[Piece], fraction: float, few: int) -> tuple[float, int | None]:
    """Returns the share of a corpus to hold out, and at which character to cut its text, None to keep documents whole.

    The share is `fraction`, or larger for a small corpus (see `enough`). Every (1 / share)-th document is held out if
    there are that many. With fewer documents (one book, for example), the last part of their text is held out, as
    nanoGPT does with tiny shakespeare. Reads no more than it needs to.
    """
    documents = length = 0
    for piece in pieces:
        length += len(piece.text)
        documents += piece.ends
        if documents >= math.ceil(1 / fraction) and length * fraction >= few * CHARACTERS:
            return fraction, None
    return split_of(documents, length, fraction, few)


def split_of(documents: int, length: int, fraction: float, few: int) -> tuple[float, int | None]:
    """Returns what `plan_split` does for a corpus of so many documents with `length` characters in all."""
    if length * fraction < few * CHARACTERS:
        in_documents = documents >= math.ceil(1 / fraction)
        fraction = enough(fraction, documents, few) if in_documents else enough(fraction, length, few * CHARACTERS)
    if documents >= math.ceil(1 / fraction):
        return fraction, None
    return fraction, int(length * (1 - fraction))


def split(pieces: Iterable[Piece], fraction: float, cut: int | None, held_out: bool) -> Iterator[Piece]:
    """Yields the part of a corpus that `plan_split` holds out, or the rest of it; documents in it may be empty."""
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
    """Returns whether item `index` is held out: where index * fraction passes a whole number, evenly and exactly."""
    passed = [math.floor(number * fraction + 1e-9) for number in (index, index + 1)]  # 49 * (1 / 49) is less than 1
    return passed[1] > passed[0]


def are_held_out(index: NDArray[np.int64], fraction: float) -> NDArray[np.bool_]:
    """Returns `is_held_out` of each item [n]."""
    return np.floor((index + 1) * fraction + 1e-9) > np.floor(index * fraction + 1e-9)
