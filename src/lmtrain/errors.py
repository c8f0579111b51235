"""The errors a user sees: one message saying what was found, where, and what to change."""

import difflib
import errno
import os
import sys
from collections.abc import Iterable

from lmtrain.secrets import shown
from lmtrain.terminal import status, visible

FINISHED = 0
FAILED = 1
WRONG_INPUT = 2
PREEMPTED = 75  # EX_TEMPFAIL: a scheduler may start the job again


class UserError(Exception):
    """The config or the data is wrong; printed without a traceback, exit code 2."""

    exit_code = WRONG_INPUT
    shared = False  # whether all ranks raise it, since they told each other


class ReadError(UserError):
    """A file or a download broke while it was read; another try may work."""


class RunError(Exception):
    """The run failed for a reason outside the config (a full disk, say); no traceback, exit code 1."""

    exit_code = FAILED
    shared = False  # whether all ranks raise it, so that one of them should print it


def did_you_mean(name: str, known: Iterable[str], most: int = 1) -> str:
    """The end of a message about a wrong name: the known names nearest to it, or nothing where none is near."""
    near = difflib.get_close_matches(name, list(known), n=most)
    return f"; did you mean {' or '.join(near)}?" if near else ""


def disk_full(error: BaseException) -> bool:
    """Whether a write failed because the disk is full; torch.save and Rust libraries say so only in their message."""
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return True
    if error.__cause__ is not None and disk_full(error.__cause__):
        return True
    words = ("No space left on device", "Disk quota exceeded", "File too large", "unexpected pos")
    return any(w in str(error) for w in words)


def out_of_memory(error: BaseException) -> bool:
    """Whether host memory ran out. torch says so only in its message, and Python, in C, forgets to say it at all."""
    unsaid = isinstance(error, SystemError) and "without exception set" in str(error)
    return unsaid or isinstance(error, MemoryError) or "DefaultCPUAllocator" in str(error)


def reason(error: BaseException) -> str:
    """Why a write failed, in a few words."""
    if disk_full(error):
        return "the disk is full"
    return getattr(error, "strerror", None) or str(error)


def first_line(error: BaseException) -> str:
    """The beginning of what a library's error says."""
    return (str(error) or type(error).__name__).strip().split("\n")[0][:200]


def is_panic(error: BaseException) -> bool:
    """Whether a library in Rust came upon what it takes for impossible; its exception is no Exception."""
    return type(error).__name__ == "PanicException"


def print_error(message: str) -> None:
    """Writes `message` to stderr, its first word in red on a terminal; nothing in it can steer the terminal."""
    status.stop()
    red, off = ("\033[1;31m", "\033[0m") if sys.stderr.isatty() and not os.environ.get("NO_COLOR") else ("", "")
    print(f"{red}error:{off} {visible(shown(message))}", file=sys.stderr)
