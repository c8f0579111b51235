"""Small files, written so that a reader or a kill never meets half of one. Imports no torch."""

import contextlib
import errno
import glob
import itertools
import json
import os
import platform
import re
import shutil
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from lmtrain.errors import RunError, UserError, reason


def write_atomic(path: Path, text: str) -> None:
    """Writes a small file so that a reader sees the old or the new content, never a half."""
    temporary = path
    try:
        temporary = temporary_beside(path)
        temporary.unlink(missing_ok=True)
        with temporary.open("x", encoding="utf-8") as file:  # never through a link that somebody left there
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError as error:
        with contextlib.suppress(OSError):  # nothing can be removed from a read-only file system either
            temporary.unlink(missing_ok=True)
        raise RunError(f"cannot write {path}: {reason(error)}; free space there or set run.dir elsewhere") from error


class NotRegular(OSError):
    """What lies under a file's name is a pipe, a device, a socket or a folder."""

    def __init__(self, path: Path) -> None:
        super().__init__(errno.EINVAL, "it is not a regular file (a folder, a pipe or a device)", str(path))


@contextlib.contextmanager
def open_regular(path: Path, mode: str = "rb") -> Iterator[BinaryIO]:
    """Opens a file of a folder that may come from somebody else; never waits, as reading a pipe would.

    Raises:
        NotRegular: it is not a regular file; an OSError, as others that opening raises.
    """
    if not stat.S_ISREG(path.stat().st_mode):
        raise NotRegular(path)
    with path.open(mode) as file:
        yield file  # type: ignore[misc]


def read_regular(path: Path) -> str:
    """The text of such a file, UTF-8; OSError and UnicodeDecodeError as of `open_regular` and of what it holds."""
    with open_regular(path) as file:
        return file.read().decode("utf-8")


def temporary_beside(path: Path) -> Path:
    """The name under which this process writes what then takes the place of `path`, a file or a folder.

    What stands there under such names of processes of this machine that have ended, so were killed, is removed.
    """
    mine = path.with_name(f"{path.name}{_mark()}{os.getpid()}")
    _remove(mine)
    remove_leftovers(path.parent, glob.escape(path.name))
    return mine


def remove_leftovers(folder: Path, names: str = "*") -> None:
    """Removes what processes of this machine that have ended left under temporary names of `names`, a glob pattern."""
    for leftover in folder.glob(f"{names}{_mark()}*"):
        number = leftover.name.rpartition("-")[2]
        if number.isdecimal() and not _is_running(int(number)):
            _remove(leftover)


def _mark() -> str:
    return f".tmp-{re.sub(r'[^A-Za-z0-9]', '', platform.node())}-"


def _remove(path: Path) -> None:
    shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink(missing_ok=True)


def _is_running(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except OSError:  # another user's
        return True
    return True


def fsync(path: Path) -> None:
    """Forces a file to disk; of a folder the names in it, so that renames survive a power cut."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def publish(temporary: Path, target: Path) -> None:
    """Renames a folder once all that is in it is on disk, the name itself included.

    Raises:
        OSError: a folder that isn't empty is at `target`.
    """
    for path in [*temporary.rglob("*"), temporary]:
        fsync(path)
    os.rename(temporary, target)
    fsync(target.parent)


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
        UserError: another line, or the file itself, can't be read.
    """
    if not path.exists():
        return
    try:
        yield from _rows(path)
    except OSError as error:
        raise UserError(f"{path} can't be read: {reason(error)}") from None


def _rows(path: Path) -> Iterator[dict[str, Any]]:
    with open_regular(path) as file:
        for number, line in enumerate(file, 1):
            if not line.endswith(b"\n"):
                return
            try:
                row = parse_row(line)
            except ValueError as error:
                raise UserError(f"{path}, line {number} can't be read: {error}; fix or remove that line") from None
            yield row
