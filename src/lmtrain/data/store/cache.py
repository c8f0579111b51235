"""A cache of slow computations: folders that are either complete or absent, and numbers per row, computed in parts.

A folder is built by one process under a temporary name while others wait for it. Numbers are saved part by part, so
that an interrupted computation can continue.
"""

import contextlib
import os
import shutil
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType

import numpy as np
from filelock import FileLock, Timeout

from lmtrain.data.store.progress import RowProgress
from lmtrain.errors import UserError, writing
from lmtrain.files import fsync, publish, remove_leftovers, temporary_beside

PART = 128  # rows whose numbers are saved in one file


def build_once(
    target: Path, is_complete: Callable[[Path], bool], build: Callable[[Path], object], say: Callable[[str], None]
) -> None:
    """Creates the folder `target` by build(temporary folder), unless it is already complete.

    The temporary folder lies beside the target and is renamed once everything in it is on disk, so a writer killed at
    any moment leaves nothing that looks complete. Writers exclude one another by a lock that is released when its
    process dies. Where a network file system keeps locks local to a machine, several machines build the same folder,
    each under its own temporary name; the first one that finishes is kept.
    """
    # One process builds, the others wait.
    locks = target.parent / ".locks"
    with writing(f"data.cache_dir={target.parent}", "; set another"):
        locks.mkdir(parents=True, exist_ok=True)
        lock = FileLock(locks / f"{target.name}.lock")
        try:
            lock.acquire(timeout=0)
        except Timeout:
            if "RANK" not in os.environ:  # it is normal that ranks of one run wait for each other
                say(f"another process is preparing {target}; waiting for it")
            lock.acquire()
    try:
        if is_complete(target):
            return
        # It builds beside the target and renames what it has built.
        temporary = temporary_beside(target)
        remove_leftovers(target.parent)
        shutil.rmtree(target, ignore_errors=True)
        with _ends_after_sigterm():
            try:
                temporary.mkdir()
                build(temporary)
                _publish_unless_complete(temporary, target, is_complete)
            except BaseException:  # Ctrl-C too
                shutil.rmtree(temporary, ignore_errors=True)
                raise
    finally:
        lock.release()


class _Terminated(BaseException):
    """Raised in the main thread when SIGTERM arrives."""


@contextlib.contextmanager
def _ends_after_sigterm() -> Iterator[None]:
    """Delays the end of the process on SIGTERM until the code inside the `with` block has cleaned up."""
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getsignal(signal.SIGTERM) != signal.SIG_DFL:  # another handler is responsible
        yield
        return

    def end(number: int, frame: FrameType | None) -> None:
        raise _Terminated

    signal.signal(signal.SIGTERM, end)
    try:
        yield
    except _Terminated:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGTERM)
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _publish_unless_complete(temporary: Path, target: Path, is_complete: Callable[[Path], bool]) -> None:
    try:
        publish(temporary, target)
    except OSError:
        if not is_complete(target):
            raise
        shutil.rmtree(temporary, ignore_errors=True)


def parts_of(folder: Path) -> Path:
    """Returns the folder of the parts while the contents of `folder` are being computed."""
    return folder.with_name(f"{folder.name}.parts")


def compute_share(
    parts: Path, rows: np.ndarray, numbers: Callable[[np.ndarray], np.ndarray], rank: int, ranks: int
) -> None:
    """Computes and saves every `ranks`-th part of `compute_in_parts`, from the `rank`-th on, unless the part exists."""
    parts.mkdir(parents=True, exist_ok=True)
    for path, some in list(_parts(parts, rows))[rank::ranks]:
        if not path.exists():
            _save(path, numbers(some))


def _parts(folder: Path, rows: np.ndarray) -> Iterator[tuple[Path, np.ndarray]]:
    """Yields the file and the rows of each part."""
    for number, start in enumerate(range(0, len(rows), PART)):
        yield folder / f"{number:08d}.npy", rows[start : start + PART]


def compute_in_parts(
    parts: Path, rows: np.ndarray, numbers: Callable[[np.ndarray], np.ndarray], progress: RowProgress
) -> np.ndarray:
    """Returns `numbers` of all rows, [n, ...], reusing the parts that an interrupted earlier call has left in `parts`.

    Args:
        rows: int64 [n]; must be the same in every call with this folder.
        numbers: computes the numbers of some of the rows, in their order.

    Raises:
        UserError: a part can't be read.
    """
    parts.mkdir(parents=True, exist_ok=True)
    found = []
    for path, some in _parts(parts, rows):
        if not path.exists():
            _save(path, numbers(some))
        found.append(load_numbers(path))
        progress.advance(len(some), 0)
    progress.finish()
    return np.concatenate(found)


def load_numbers(path: Path) -> np.ndarray:
    """Loads an array; raises UserError if it can't be read."""
    try:
        return np.asarray(np.load(path))
    except (OSError, ValueError, EOFError) as error:
        raise UserError(f"{path} can't be read ({error}): delete {path.parent}, and it is computed again") from None


def _save(path: Path, numbers: np.ndarray) -> None:
    """Saves an array atomically: the file is complete or absent."""
    temporary = path.with_suffix(f".{os.getpid()}.tmp.npy")
    np.save(temporary, numbers)
    fsync(temporary)
    temporary.replace(path)
    fsync(path.parent)
