"""Errors shown to users: one message that says what was found, where, and what to change."""

import contextlib
import difflib
import errno
import os
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

from lmtrain.secrets import shown
from lmtrain.terminal import visible

FINISHED = 0
FAILED = 1
WRONG_INPUT = 2
PREEMPTED = 75  # EX_TEMPFAIL: a scheduler may start the job again


class UserError(Exception):
    """An error in the config or the data; printed without a traceback, exit code 2."""

    exit_code = WRONG_INPUT
    shared = False  # whether all ranks raise the error, after exchanging it


class ReadError(UserError):
    """A failure while reading a file or a download; a retry may succeed."""


class RunError(Exception):
    """A failure for a reason outside the config, such as a full disk; printed without a traceback, exit code 1."""

    exit_code = FAILED
    shared = False  # whether all ranks raise the error, so that only one of them should print it


@contextlib.contextmanager
def naming(what: str) -> Iterator[None]:
    """Prefixes the message of a UserError raised inside with `what`, the part of the user's input it is about."""
    try:
        yield
    except UserError as error:
        raise UserError(f"{what}: {error}") from None


def did_you_mean(name: str, known: Iterable[str], most: int = 1) -> str:
    """Returns "; did you mean X?" with the known names closest to a wrong name, or '' if none is close."""
    near = difflib.get_close_matches(name, list(known), n=most)
    return f"; did you mean {' or '.join(near)}?" if near else ""


def nearest(path: Path) -> str | None:
    """Returns the path in the same folder whose name is most similar, or None."""
    if not path.parent.is_dir():
        return None
    names = [p.name for p in path.parent.iterdir() if not p.name.startswith(".")]
    near = difflib.get_close_matches(path.name, names, n=1)
    return str(path.parent / near[0]) if near else None


def disk_full(error: BaseException) -> bool:
    """Returns whether a write failed because the disk is full; for torch.save and Rust libraries, from the message."""
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return True
    if error.__cause__ is not None and disk_full(error.__cause__):
        return True
    words = ("No space left on device", "Disk quota exceeded", "File too large", "unexpected pos")
    return any(w in str(error) for w in words)


def out_of_memory(error: BaseException) -> bool:
    """Returns whether host memory ran out; torch says so only in the message, and CPython may set no exception."""
    unsaid = isinstance(error, SystemError) and "without exception set" in str(error)
    return unsaid or isinstance(error, MemoryError) or "DefaultCPUAllocator" in str(error)


def no_right(error: BaseException) -> str | None:
    """Returns the message for a file or folder that this user may not read or write; None for any other error."""
    if not isinstance(error, OSError) or error.errno not in (errno.EACCES, errno.EPERM, errno.EROFS):
        return None
    if error.filename is None:
        return None
    return f"{os.fsdecode(error.filename)}: {error.strerror}: give this user the right to it, or name another place"


def reason(error: BaseException) -> str:
    """Returns a short reason why a write failed."""
    if disk_full(error):
        return "the disk is full"
    return getattr(error, "strerror", None) or str(error)


def first_line(error: BaseException) -> str:
    """Returns the first line of an error's message, at most 200 characters; its type if there is no message."""
    return (str(error) or type(error).__name__).strip().split("\n")[0][:200]


@contextlib.contextmanager
def needing(package: str, key: str) -> Iterator[None]:
    """Raises UserError if an import within the context fails; `key` is the setting that needs the optional package."""
    try:
        yield
    except ImportError as error:
        raise UserError(f'{key} needs {package} ({error}): pip install "lmtrain[{package}]"') from None


@contextlib.contextmanager
def writing(what: str, remedy: str = "") -> Iterator[None]:
    """Raises UserError if a file or folder can't be written within the context: `what` it is, the reason, a remedy."""
    try:
        yield
    except OSError as error:
        raise UserError(f"{what} can't be written: {reason(error)}{remedy}") from None


def print_error(message: str) -> None:
    """Prints "error: message" to stderr, with "error:" in red on a terminal; control characters are made visible."""
    red, off = ("\033[1;31m", "\033[0m") if sys.stderr.isatty() and not os.environ.get("NO_COLOR") else ("", "")
    print(f"{red}error:{off} {visible(shown(message))}", file=sys.stderr)
