"""Tables whose columns a sign separates: CSV, TSV, and what spreadsheets write under these names."""

import contextlib
import csv
import itertools
import re
import sys
from collections.abc import Iterable, Iterator
from typing import Any

from lmtrain.data.sources.addresses import File
from lmtrain.data.sources.lines import raw_lines
from lmtrain.errors import UserError

_SIGNS = (",", ";", "\t", "|")  # in the order in which they are preferred
_LOOKED_AT = 50  # first lines, by which the sign and the header are told
_SENTENCE = re.compile(r"[.?!…。？！؟]['\")\]»”’]*\s*\Z")  # a text that ends like one
_NUMBER = re.compile(r"\s*[-+]?[\d.,]+%?\s*\Z")


def read_separated(
    path: File, wanted: Iterable[str], header: bool | None, sign: str | None, notes: dict[str, str]
) -> Iterator[tuple[str, dict[str, Any] | str]]:
    """Yields each row's location and the row, whose values are all strings, or a description of what is wrong with it.

    Quotes follow RFC 4180.

    Args:
        wanted: columns that the caller will ask for; a first line that has one of them names columns.
        header: whether the first line names the columns; None: unless it looks like the rows below it.
        sign: what separates the columns; None: whichever of , ; tab | gives the first lines equally many.
        notes: gets a note for the plan if the file is not what its name says.

    Raises:
        UserError: a quote is never closed in the first line, or the first line names a column twice.
    """
    csv.field_size_limit(sys.maxsize)
    lines = raw_lines(path)
    # What separates the columns is seen in the first lines.
    first = list(itertools.islice(lines, _LOOKED_AT))
    found = sign or _sign_of(first)
    if sign is None and found != ",":
        notes[str(path)] = f"{path}: its columns are separated by {found!r}"
    reader = csv.reader(itertools.chain(first, lines), delimiter=found, strict=True)
    names: list[str] | None = None
    while True:
        start = reader.line_num + 1
        where = f"{path}, line {start}"
        try:
            values = next(reader, None)
        except csv.Error as error:
            if names is None or "unexpected end of data" in str(error):  # a quote consumed all lines after it
                raise UserError(f"{where}: malformed CSV ({error}): is a quote opened and never closed?") from None
            count = reader.line_num - start + 1
            swallowed = f"; a quote in it isn't closed, so {count} lines are lost" if count > 1 else ""
            yield where, f"malformed CSV ({error}){swallowed}"
            continue
        if values is None:
            return
        # The first line names the columns, or is the first row.
        if names is None:
            is_header = _is_header(values, first, found, wanted) if header is None else header
            names = _names(values if is_header else [""] * len(values), where)
            if is_header:
                continue
            if header is None:
                found = f"{path}: the first line is read as a row, of the columns {', '.join(names)}"
                notes[str(path)] = f"{found}; data.header=true reads it as names"
        if len(values) == len(names):
            yield where, dict(zip(names, values, strict=True))
        elif values:
            yield where, f"the line has {len(values)} fields, and the first line names {len(names)} columns"


def _records(lines: list[str], sign: str) -> list[list[str]]:
    """Returns the records of some first lines up to one that is malformed or continues after them."""
    found: list[list[str]] = []
    with contextlib.suppress(csv.Error):
        found += (values for values in csv.reader(lines, delimiter=sign, strict=True) if values)
    return found


def _sign_of(lines: list[str]) -> str:
    records = {sign: _records(lines, sign) for sign in _SIGNS}
    even = [sign for sign, found in records.items() if len({len(r) for r in found}) == 1 and len(found[0]) > 1]
    if even:
        return even[0]
    return max(_SIGNS, key=lambda sign: len(records[sign][0]) if records[sign] else 0)


def _is_header(values: list[str], lines: list[str], sign: str, wanted: Iterable[str]) -> bool:
    """Returns whether the first line names the columns: unless it has sentences where those below it have some too."""
    if set(wanted) & set(values):
        return True
    below = [record for record in _records(lines, sign)[1:] if len(record) == len(values)]
    sentences = [i for i, text in enumerate(values) if _SENTENCE.search(text)]
    alike = [i for i in sentences if below and sum(bool(_SENTENCE.search(r[i])) for r in below) * 2 >= len(below)]
    is_long = any(len(values[i].split()) >= 3 or not values[i].isascii() for i in alike)
    rest = [text for i, text in enumerate(values) if i not in sentences]
    return not is_long or not all(len(text.split()) >= 3 or _NUMBER.match(text) for text in rest)


def _names(values: list[str], where: str) -> list[str]:
    """Returns the names of columns; those without one are called column_1 and so on, by their place."""
    names = [name if name.strip() else f"column_{i}" for i, name in enumerate(values, start=1)]
    if len(set(names)) < len(names):
        raise UserError(f"{where}: the first line must name columns, each differently, and is {str(values)[:80]}")
    return names
