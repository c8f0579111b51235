"""From a row of columns to its text, with errors that name the place."""

import difflib
from collections.abc import Iterable, Mapping
from typing import Any

from lmtrain.errors import UserError

_SHOWN = 50  # columns in a message


def columns_of(text_column: Any) -> list[str]:
    """data.text_column as a list: one column or several."""
    return [text_column] if isinstance(text_column, str) else [str(c) for c in text_column]


def check_columns(wanted: list[str], found: Iterable[str], where: str) -> None:
    """Raises UserError where a wanted column isn't there; lists the columns that are."""
    found = list(found)
    for column in wanted:
        if column not in found:
            near = difflib.get_close_matches(column, found, n=1, cutoff=0.5)
            suggestion = near[0] if near else (found[0] if found else "...")
            known = ", ".join(found[:_SHOWN]) + (f" and {len(found) - _SHOWN} more" if len(found) > _SHOWN else "")
            raise UserError(
                f"{where} has no column {column!r}; it has: {known or 'none'}. Set data.text_column={suggestion}"
            )


def text_of(row: Mapping[str, Any], columns: list[str], separator: str, where: str) -> str:
    """The text columns of a row, joined; a null adds nothing.

    Raises:
        UserError: a column isn't there or holds something other than text.
    """
    parts = []
    for column in columns:
        if column not in row:
            check_columns(columns, row, where)
        value = row[column]
        if value is None:
            continue
        if not isinstance(value, str):
            raise UserError(
                f"{where}: column {column!r} holds {type(value).__name__} ({str(value)[:60]!r}), not text; "
                f"set data.text_column to a column of text (this row has: {', '.join(row)})"
            )
        parts.append(value)
    return separator.join(parts)
