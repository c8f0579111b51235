"""Small files, written so that a reader or a kill never meets half of one. Imports no torch."""

import itertools
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from lmtrain.errors import RunError, UserError, reason


def write_atomic(path: Path, text: str) -> None:
    """Writes a small file so that a reader sees the old or the new content, never a half."""
    temporary = path.with_name(f"{path.name}.tmp{os.getpid()}")
    try:
        with temporary.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise RunError(f"cannot write {path}: {reason(error)}; free space there or set run.dir elsewhere") from error


def fsync(path: Path) -> None:
    """Forces a file to disk; of a folder the names in it, so that renames survive a power cut."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def aside(path: Path) -> Path:
    """A free name beside `path` for what is damaged there: path.damaged, path.damaged1 and so on."""
    names = (path.with_name(f"{path.name}.damaged{number or ''}") for number in itertools.count())
    return next(name for name in names if not name.exists())


def parse_row(line: bytes) -> dict[str, Any]:
    """A line of a JSON-lines file; ValueError says what it is where it is not an object on a line of its own."""
    try:
        row = json.loads(line.decode("utf-8"))
    except RecursionError:
        row = None
    if not isinstance(row, dict):
        raise ValueError("it holds no JSON object")
    return row


def read_jsonl(path: Path) -> Iterator[dict[str, Any]]:
    """Rows of a JSON-lines file; a last line cut short by a kill is left out.

    Raises:
        UserError: another line can't be read.
    """
    if not path.exists():
        return
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if not line.endswith(b"\n"):
                return
            try:
                row = parse_row(line)
            except ValueError as error:
                raise UserError(f"{path}, line {number} can't be read: {error}; mend or remove that line") from None
            yield row
