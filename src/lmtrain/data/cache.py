"""Folders that are complete or absent, and facts about files that are too costly to find out twice."""

import hashlib
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from lmtrain.errors import UserError

_REMEMBER_FROM = 1 << 24  # bytes; smaller files are hashed again, in milliseconds


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
        stat = path.stat()
        if self.store is None or stat.st_size < _REMEMBER_FROM:
            return find()
        # The change time can't be set back, so a file edited without a new size or date is still noticed.
        version = [stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino]
        known = self._load()
        entry = known.get(str(path.resolve()), {})
        if entry.get("version") != version:
            entry = {"version": version}
        if name not in entry:
            entry[name] = find()
            self._save({**self._load(), str(path.resolve()): entry})
        return entry[name]

    def _load(self) -> dict[str, Any]:
        try:
            assert self.store is not None
            return dict(json.loads(self.store.read_text()))
        except (OSError, ValueError):
            return {}

    def _save(self, known: dict[str, Any]) -> None:
        assert self.store is not None
        temporary = self.store.with_name(f"{self.store.name}.{os.getpid()}.tmp")
        try:
            self.store.parent.mkdir(parents=True, exist_ok=True)
            temporary.write_text(json.dumps(known))
            os.replace(temporary, self.store)
        except OSError:  # only a shortcut is lost
            temporary.unlink(missing_ok=True)


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
        try:
            temporary.mkdir()
            build(temporary)
            sync_tree(temporary)
            os.rename(temporary, target)
            _sync(target.parent)
        except BaseException:  # Ctrl-C too
            shutil.rmtree(temporary, ignore_errors=True)
            raise
    finally:
        lock.release()


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
        _sync(path)


def _sync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
