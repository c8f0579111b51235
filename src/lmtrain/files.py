"""Safe reading and atomic writing of small files, so that readers never see partial files. Imports no torch."""

import contextlib
import errno
import glob
import itertools
import json
import math
import os
import platform
import re
import shutil
import stat
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

from lmtrain.errors import RunError, UserError, disk_full, reason
from lmtrain.secrets import hide, shown_in

CHECKPOINT = re.compile(r"step_(\d{8,})")  # the name of a checkpoint's folder


def strict_json(value: Any, **options: Any) -> str:
    """Returns plain containers as JSON that any reader takes: NaN and infinite numbers, which JSON lacks, are null."""
    return json.dumps(_without_nan(value), allow_nan=False, **options)


def json_line(row: Mapping[str, Any]) -> str:
    """Returns a row as a line of JSON without secrets; all prompts, answers and samples are written by it."""
    return strict_json(shown_in(row, hide), ensure_ascii=False) + "\n"


def _without_nan(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _without_nan(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_without_nan(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def write_atomic(path: Path, text: str) -> None:
    """Writes a small file atomically: readers see either the old or the new content; raises RunError on failure."""
    temporary: Path | None = None
    try:
        temporary = temporary_beside(path)
        temporary.unlink(missing_ok=True)
        with temporary.open("x", encoding="utf-8") as file:  # "x": never writes through an existing link
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError as error:
        if temporary is not None:
            with contextlib.suppress(OSError):  # fails too on a read-only file system
                temporary.unlink(missing_ok=True)
        raise RunError(f"cannot write {path}: {reason(error)}; free space there or set run.dir elsewhere") from error


def absolute(path: str | Path) -> Path:
    """Returns the absolute path, ~ expanded; if the working folder's name is not UTF-8, the path from there.

    Config files, TensorBoard and Rust libraries take no other names.
    """
    path = Path(path).expanduser()
    try:
        str(path.absolute()).encode()
    except UnicodeEncodeError:
        return Path(os.path.relpath(path))
    return path.absolute()


class NotRegular(OSError):
    """The error for a path that is a pipe, a device, a socket or a folder instead of a regular file."""

    def __init__(self, path: Path) -> None:
        super().__init__(errno.EINVAL, "it is not a regular file (a folder, a pipe or a device)", str(path))


@contextlib.contextmanager
def open_regular(path: Path, mode: str = "rb") -> Iterator[BinaryIO]:
    """Opens a file in a possibly untrusted folder; refuses pipes, which would block.

    Raises:
        NotRegular: it is not a regular file. This is an OSError, like all other errors of opening.
    """
    if not stat.S_ISREG(path.stat().st_mode):
        raise NotRegular(path)
    with path.open(mode) as file:
        yield file  # type: ignore[misc]


def read_regular(path: Path) -> str:
    """Reads a regular UTF-8 file; raises OSError as `open_regular`, or UnicodeDecodeError for invalid content."""
    with open_regular(path) as file:
        return file.read().decode("utf-8")


def is_arrow_stream(source: Any) -> bool:
    """Returns whether an opened file of Arrow is a stream, as `datasets` writes; the next read begins at its start."""
    start = source.read(6)
    source.seek(0)
    return bool(start != b"ARROW1")


def shown_files(path: Path) -> list[Path]:
    """Returns the file, or those below a folder, sorted; hidden ones and those in hidden folders are left out."""
    if path.is_file():
        return [path]
    found = list[Path]()
    for folder, folders, names in os.walk(path):
        folders[:] = [name for name in folders if not name.startswith(".")]
        found += [Path(folder, name) for name in names if not name.startswith(".")]
    return sorted(file for file in found if file.is_file())


def temporary_beside(path: Path) -> Path:
    """Returns the temporary path under which this process writes the replacement of `path`, a file or a folder.

    Removes such temporary files and folders of processes on this machine that have ended, which must have been killed.
    """
    mine = path.with_name(f"{path.name}{_mark()}{os.getpid()}")
    _remove(mine)
    remove_leftovers(path.parent, glob.escape(path.name))
    return mine


def remove_leftovers(folder: Path, names: str = "*") -> None:
    """Removes temporary files for `names` (a glob pattern) left by processes on this machine that have ended."""
    for leftover in folder.glob(f"{names}{_mark()}*"):
        number = leftover.name.rpartition("-")[2]
        if number.isdecimal() and not is_running(int(number)):
            _remove(leftover)


def _mark() -> str:
    return f".tmp-{re.sub(r'[^A-Za-z0-9]', '', platform.node())}-"


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def is_running(process: int) -> bool:
    """Returns whether there is a process of that number."""
    try:
        os.kill(process, 0)
    except OSError as error:  # also for a process of another user
        return not isinstance(error, ProcessLookupError)
    return True


def fsync(path: Path) -> None:
    """Forces a file to disk; for a folder, its entries, so that renames survive a power failure."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def publish(temporary: Path, target: Path) -> None:
    """Forces a folder's content to disk, renames it to `target`, and forces the rename to disk as well.

    Raises:
        OSError: `target` is a non-empty folder.
    """
    for path in [*temporary.rglob("*"), temporary]:
        fsync(path)
    os.rename(temporary, target)
    fsync(target.parent)


@contextlib.contextmanager
def replacing(folder: Path, what: str, remedy: str) -> Iterator[Path]:
    """Yields a temporary path for the content of `folder`, which it replaces at the end: complete or not at all.

    Args:
        what: the folder's name in messages.
        remedy: what to do if it can't be written.

    Raises:
        RunError: it can't be written.
    """
    temporary = folder
    try:
        temporary = temporary_beside(folder)
        yield temporary
        shutil.rmtree(folder, ignore_errors=True)
        os.rename(temporary, folder)
        fsync(folder.parent)
    except Exception as error:
        if not isinstance(error, OSError) and not disk_full(error):
            raise
        raise RunError(f"cannot write {what}: {reason(error)}; {remedy}") from error
    finally:
        if temporary != folder:
            shutil.rmtree(temporary, ignore_errors=True)


def aside(path: Path) -> Path:
    """Returns an unused path to move a damaged `path` to: path.damaged, path.damaged1 and so on."""
    return first_unused(lambda n: path.with_name(f"{path.name}.damaged{n or ''}"))


def first_unused(path_of: Callable[[int], Path]) -> Path:
    """Returns the first of the paths of 0, 1, 2 and so on at which there is nothing."""
    return next(path for path in map(path_of, itertools.count()) if not path.exists())


def parse_row(line: bytes) -> dict[str, Any]:
    """Parses a line of a JSON-lines file; raises ValueError if it is not a JSON object."""
    try:
        row = json.loads(line.decode("utf-8"))
    except RecursionError:
        row = None
    if not isinstance(row, dict):
        raise ValueError("it holds no JSON object")
    return row


def tail_from(path: Path, is_start: Callable[[dict[str, Any]], bool], window: int = 1 << 16) -> int:
    """Returns the byte at which a line that satisfies `is_start` begins, near the end of a JSON-lines file.

    Looks at the first line of the last `window` bytes, then of four times as many, and so on; returns 0 if none does.
    """
    size = path.stat().st_size
    with open_regular(path) as file:
        while window < size:
            file.seek(size - window)
            start = file.tell() + len(file.readline())
            with contextlib.suppress(ValueError):
                if is_start(parse_row(file.readline())):
                    return start
            window *= 4
    return 0


def read_jsonl(path: Path, holding: bytes = b"") -> Iterator[dict[str, Any]]:
    """Yields the rows of a JSON-lines file, none if it doesn't exist; skips a last line truncated by a kill.

    Args:
        holding: lines without these bytes are skipped unparsed.

    Raises:
        UserError: the file or any other line can't be read.
    """
    if not path.exists():
        return
    try:
        yield from _rows(path, holding)
    except OSError as error:
        raise UserError(f"{path} can't be read: {reason(error)}") from None


def _rows(path: Path, holding: bytes) -> Iterator[dict[str, Any]]:
    with open_regular(path) as file:
        for number, line in enumerate(file, 1):
            if not line.endswith(b"\n"):
                return
            if holding not in line:
                continue
            try:
                row = parse_row(line)
            except ValueError as error:
                raise UserError(f"{path}, line {number} can't be read: {error}; fix or remove that line") from None
            yield row
