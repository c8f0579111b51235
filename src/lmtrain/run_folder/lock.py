"""A lock that lets one process at a time train in a run's folder; rank 0 (or the only process) locks `.lock` in it.

It is needed because ranks whose launcher was killed may still be saving when the same command is started again, and
because commands are started twice by mistake. The operating system releases the lock whenever its holder ends, even if
it crashes; the file stays.
"""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from filelock import FileLock, Timeout

from lmtrain.errors import RunError

NAME = ".lock"
_PATIENCE_SECONDS = 300  # the time a launcher gives its ranks to save (launch.py)


def taken(folder: Path) -> bool:
    """Returns whether a process is training in the folder; the check creates no file."""
    try:
        if (folder / NAME).exists():
            with FileLock(folder / NAME, timeout=0):
                return False
    except Timeout:
        return True
    except OSError:  # no permission, or a file system without locks
        pass
    return False


@contextlib.contextmanager
def held(folder: Path, patience: float = _PATIENCE_SECONDS) -> Iterator[None]:
    """Waits until no other process trains in the folder, then locks it; does nothing on a file system without locks.

    Raises:
        RunError: the other process still holds the lock after `patience` seconds, or it has removed the folder because
            its config was rejected.
    """
    lock = FileLock(folder / NAME)
    with contextlib.suppress(OSError):
        try:
            lock.acquire(timeout=0)
        except Timeout:
            _wait(lock, folder, patience)
    try:
        yield
    finally:
        lock.release()


def _wait(lock: FileLock, folder: Path, patience: float) -> None:
    try:
        opened = os.open(folder, os.O_RDONLY)  # while it is open, no new folder can get its inode
    except FileNotFoundError:
        raise _removed(folder) from None
    print(f"another process is still training in {folder}: waiting for it to end", flush=True)
    try:
        lock.acquire(timeout=patience, poll_interval=0.2)
        if folder.stat().st_ino != os.fstat(opened).st_ino:  # acquire() recreated the folder
            (folder / NAME).unlink()
            lock.release()
            with contextlib.suppress(OSError):  # not empty: another process is in it
                folder.rmdir()
            raise _removed(folder)
    except Timeout:
        found = f"another process has been training in {folder} for {patience:.0f} s"
        raise RunError(f"{found}: end it, or choose another run.name") from None
    except FileNotFoundError:
        raise _removed(folder) from None
    finally:
        os.close(opened)


def _removed(folder: Path) -> RunError:
    return RunError(f"the run that this one waited for did not begin, and removed {folder}: start this one again")
