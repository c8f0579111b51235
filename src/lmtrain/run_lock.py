"""One process at a time trains in a run's folder: rank 0, or the only one, holds its lock.

Ranks whose launcher was killed are still saving when the same command is started again; and commands are started twice
by mistake. The kernel gives the lock back when its holder has ended, however it ended.
"""

import contextlib
import os
import time
from collections.abc import Iterator
from pathlib import Path

from lmtrain.errors import RunError

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

_PATIENCE_SECONDS = 300  # what a launcher gives its ranks to save (launch.py)


def _try(folder: Path) -> tuple[bool, int | None]:
    """(whether another process has it, the lock); no lock on a file system that has none."""
    if fcntl is None:
        return False, None
    file = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return False, file
    except OSError as error:
        os.close(file)
        return isinstance(error, BlockingIOError), None


def taken(folder: Path) -> bool:
    """Whether a process trains there now."""
    busy, lock = _try(folder)
    _give_back(lock)
    return busy


def _give_back(lock: int | None) -> None:
    if lock is not None:
        fcntl.flock(lock, fcntl.LOCK_UN)  # closing is not enough while a loader's worker has it too
        os.close(lock)


def _try_again(folder: Path) -> tuple[bool, int | None]:
    """RunError where the other process has left nothing: its config was refused, and its new folder removed."""
    try:
        busy, lock = _try(folder)
        if lock is None or os.path.samestat(os.fstat(lock), os.stat(folder)):
            return busy, lock
        _give_back(lock)  # of a folder that is gone
    except FileNotFoundError:
        pass
    raise RunError(f"the run that this one waited for did not begin, and removed {folder}: start this one again")


@contextlib.contextmanager
def held(folder: Path, patience: float = _PATIENCE_SECONDS) -> Iterator[None]:
    """Waits until no other process trains in the folder, and keeps others out.

    Raises:
        RunError: the other one is still there after `patience` seconds, or has removed the folder.
    """
    busy, lock = _try(folder)
    if busy:
        print(f"another process is still training in {folder}: waiting for it to end", flush=True)
    deadline = time.monotonic() + patience
    while busy:
        if time.monotonic() > deadline:
            raise RunError(
                f"another process has been training in {folder} for {patience:.0f} s while this one waited: "
                f"let it finish or end it, or give this run another run.name"
            )
        time.sleep(0.2)
        busy, lock = _try_again(folder)
    try:
        yield
    finally:
        _give_back(lock)
