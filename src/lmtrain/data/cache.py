"""The cache of prepared data: folders that are complete or absent, and remembered hashes of large files."""

import contextlib
import hashlib
import json
import os
import shutil
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

from filelock import FileLock, Timeout

from lmtrain.errors import UserError
from lmtrain.files import fsync

REMEMBER_FROM = 1 << 24  # bytes; smaller files are hashed again, in milliseconds
Version = list[int]


class Facts:
    """What was found out about large files, kept in <cache_dir>/files.json and forgotten when a file changes."""

    def __init__(self, cache_dir: str | Path | None) -> None:
        self.store = None if cache_dir is None else Path(cache_dir).expanduser() / "files.json"

    def digest(self, paths: list[Path]) -> str:
        """sha256 over the files' contents, in order; their names don't matter."""
        whole = hashlib.sha256()
        for path in paths:
            whole.update(str(self.of(path, "sha256", lambda p=path: _sha256(p))).encode())  # type: ignore[misc]
        return whole.hexdigest()

    def of(self, path: Path, name: str, find: Callable[[], Any]) -> Any:
        """The fact called `name` about a file: remembered, or found by `find()`."""
        if self.store is None or path.stat().st_size < REMEMBER_FROM:
            return find()
        version = version_of(path)
        known = self.recall([path], name)
        if path not in known:
            known[path] = find()
            self.remember(name, {path: (version, known[path])})
        return known[path]

    def recall(self, paths: list[Path], name: str) -> dict[Path, Any]:
        """The fact called `name` about those of the files that have not changed since it was found out."""
        known = self._load()
        entries = {path: known.get(str(path.resolve()), {}) for path in paths}
        return {p: e[name] for p, e in entries.items() if name in e and e["version"] == version_of(p)}

    def remember(self, name: str, found: dict[Path, tuple[Version, Any]]) -> bool:
        """Keeps the fact called `name` about files of these versions; False where it can't be written."""
        known = self._load()
        for path, (version, fact) in found.items():
            entry = known.get(str(path.resolve()), {})
            others = entry if entry.get("version") == version else {"version": version}
            known[str(path.resolve())] = {**others, name: fact}
        return self._save(known)

    @contextlib.contextmanager
    def one_process(self) -> Iterator[None]:
        """One process at a time finds out what takes long; the others wait, and recall it."""
        assert self.store is not None
        try:
            self.store.parent.mkdir(parents=True, exist_ok=True)
            lock = FileLock(self.store.with_suffix(".lock"))
            lock.acquire()
        except OSError:  # a cache that can't be written: each finds out for itself
            yield
            return
        try:
            yield
        finally:
            lock.release()

    def _load(self) -> dict[str, Any]:
        try:
            return {} if self.store is None else dict(json.loads(self.store.read_text()))
        except (OSError, ValueError):
            return {}

    def _save(self, known: dict[str, Any]) -> bool:
        if self.store is None:
            return False
        temporary = self.store.with_name(f"{self.store.name}.{os.getpid()}.tmp")
        try:
            self.store.parent.mkdir(parents=True, exist_ok=True)
            temporary.write_text(json.dumps(known))
            os.replace(temporary, self.store)
            return True
        except OSError:  # only a shortcut is lost
            with contextlib.suppress(OSError):
                temporary.unlink(missing_ok=True)
            return False


def version_of(path: Path) -> Version:
    """Size, times and inode. The change time can't be set back, so an edit that keeps size and date is noticed too."""
    stat = path.stat()
    return [stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino]


def _sha256(path: Path) -> str:
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise UserError(f"{path} can't be read: {error.strerror}") from None


def build_once(
    target: Path,
    is_complete: Callable[[Path], bool],
    build: Callable[[Path], None],
    say: Callable[[str], None],
) -> None:
    """Makes the folder `target` by build(temporary folder), unless it is complete already.

    The temporary folder lies beside the target and is renamed when everything in it is on disk, so a writer killed at
    any moment leaves nothing that looks complete. Writers exclude one another by a lock that dies with its process;
    temporary folders that nobody holds the lock of are swept.
    """
    locks = target.parent / ".locks"
    try:
        locks.mkdir(parents=True, exist_ok=True)
        lock = FileLock(locks / f"{target.name}.lock")
        try:
            lock.acquire(timeout=0)
        except Timeout:
            if "RANK" not in os.environ:  # ranks of one run wait for each other, which is nobody's news
                say(f"another process is preparing {target}; waiting for it")
            lock.acquire()
    except OSError as error:
        raise UserError(f"data.cache_dir={target.parent} can't be written: {error.strerror}; set another") from None
    try:
        if is_complete(target):
            return
        temporary = target.with_name(f"{target.name}.tmp")
        shutil.rmtree(temporary, ignore_errors=True)  # of a writer that died: nobody else holds our lock
        shutil.rmtree(target, ignore_errors=True)
        sweep(target.parent, besides=temporary)
        with _ends_after_sigterm():
            try:
                temporary.mkdir()
                build(temporary)
                sync_tree(temporary)
                os.rename(temporary, target)
                fsync(target.parent)
            except BaseException:  # Ctrl-C too
                shutil.rmtree(temporary, ignore_errors=True)
                raise
    finally:
        lock.release()


class _Terminated(BaseException):
    """SIGTERM came."""


@contextlib.contextmanager
def _ends_after_sigterm() -> Iterator[None]:
    """A SIGTERM ends the process as it would have, once what is in the `with` has cleaned up."""
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getsignal(signal.SIGTERM) != signal.SIG_DFL:  # somebody else's to decide
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


def sweep(folder: Path, besides: Path) -> None:
    """Removes temporary folders, besides one, whose writers are gone."""
    for leftover in folder.glob("*.tmp"):
        if leftover == besides or not leftover.is_dir():
            continue
        lock = FileLock(folder / ".locks" / f"{leftover.name.removesuffix('.tmp')}.lock")
        try:
            lock.acquire(timeout=0)
        except Timeout:
            continue
        shutil.rmtree(leftover, ignore_errors=True)
        lock.release()


def sync_tree(folder: Path) -> None:
    """Forces every file and folder in `folder` to disk."""
    for path in [*folder.rglob("*"), folder]:
        fsync(path)
