"""SHA-256 of files: computed while prepared data is written, compared at every start, cached for large files.

What is computed for a large file is stored with its size, times and inode (`Facts`), so that terabytes are read once
and not at every start. Changed files are read again and must match the hash recorded when they were prepared.
"""

import contextlib
import hashlib
import json
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from filelock import FileLock

from lmtrain.errors import ReadError, RunError, UserError
from lmtrain.files import write_atomic

REMEMBER_FROM = 1 << 24  # bytes; smaller files are hashed again, in milliseconds
Version = list[int]
WHOLE = "sha256:"  # prefix of fingerprints; those of earlier versions have none
_CHUNK = 1 << 20  # bytes
_SAY_FROM = 1 << 30  # bytes from which on progress is reported: reading them takes seconds
_SECONDS_BETWEEN_LINES = 10.0


class Facts:
    """A cache of values computed from large files, in <cache_dir>/files.json; those of changed files are dropped."""

    def __init__(self, cache_dir: str | Path) -> None:
        self.store = Path(cache_dir).expanduser() / "files.json"

    def digest(self, paths: list[Path]) -> str:
        """Returns the SHA-256 over those of the files, in order; their names don't matter."""
        found = self.digests(paths)
        return joined_digest(found[path] for path in paths)

    def digests(self, paths: list[Path], say: Callable[[str], None] = lambda _: None) -> dict[Path, str]:
        """Returns the SHA-256 of each file in hexadecimal digits, cached if the files are large together.

        Raises:
            UserError: a file can't be read.
        """
        try:
            if sum(path.stat().st_size for path in paths) < REMEMBER_FROM:
                return {path: _sha256(path) for path in paths}
            known = self.recall(paths, "sha256")
            if any(path not in known for path in paths):
                with self.one_process():
                    known = self.recall(paths, "sha256")
                    known |= _read_all([path for path in paths if path not in known], self, say)
        except OSError as error:
            raise UserError(f"{error.filename} can't be read: {error.strerror}") from None
        return {path: known[path] for path in paths}

    def of(self, path: Path, name: str, find: Callable[[], Any]) -> Any:
        """Returns the value called `name` for a file, from the cache or computed by `find()`."""
        if path.stat().st_size < REMEMBER_FROM:
            return find()
        version = version_of(path)
        known = self.recall([path], name)
        if path not in known:
            known[path] = find()
            self.remember(name, {path: (version, known[path])})
        return known[path]

    def recall(self, paths: list[Path], name: str) -> dict[Path, Any]:
        """Returns the cached value called `name` for those of the files that have not changed since."""
        known = self._load()
        entries = {path: known.get(str(path.resolve()), {}) for path in paths}
        return {p: e[name] for p, e in entries.items() if name in e and e["version"] == version_of(p)}

    def remember(self, name: str, found: dict[Path, tuple[Version, Any]]) -> bool:
        """Caches the value called `name` for files at these versions; returns False if it can't be written."""
        known = self._load()
        for path, (version, fact) in found.items():
            entry = known.get(str(path.resolve()), {})
            others = entry if entry.get("version") == version else {"version": version}
            known[str(path.resolve())] = {**others, name: fact}
        try:
            self.store.parent.mkdir(parents=True, exist_ok=True)
            write_atomic(self.store, json.dumps(known))
        except (OSError, RunError):  # only a shortcut is lost
            return False
        return True

    @contextlib.contextmanager
    def one_process(self) -> Iterator[None]:
        """Lets one process at a time do slow work in the block; the others wait, and can then recall its results."""
        with contextlib.ExitStack() as held:
            with contextlib.suppress(OSError):  # if the cache can't be written, each process does the work itself
                self.store.parent.mkdir(parents=True, exist_ok=True)
                held.enter_context(FileLock(self.store.with_suffix(".lock")))
            yield

    def _load(self) -> dict[str, Any]:
        try:
            return dict(json.loads(self.store.read_text()))
        except (OSError, ValueError):
            return {}


class Content:
    """Local files that are read after their digests were taken: `refuse_changed` tells whether they stayed the same."""

    def __init__(self, paths: list[Path], facts: Facts) -> None:
        """Raises UserError if a file can't be read."""
        try:
            self._versions = {path: version_of(path) for path in paths}  # before the digests: see `refuse_changed`
        except OSError as error:
            raise UserError(f"{error.filename} can't be read: {error.strerror}") from None
        self.digests = facts.digests(paths)

    def refuse_changed(self) -> None:
        """Raises ReadError if a file was written, replaced or removed since: what was read may be a part of it.

        The digest is taken again, because writing through a memory map changes no time until the system writes it to
        disk. A change time alone (of permissions, of a link) is no change of the content.
        """
        for path, (size, modified, _, inode) in self._versions.items():
            try:
                now = version_of(path)
                same = [now[0], now[1], now[3]] == [size, modified, inode] and _sha256(path) == self.digests[path]
            except OSError:
                same = False
            if not same:
                raise ReadError(f"{path} was changed while it was read: start again once it is complete")


def joined_digest(digests: Iterable[str]) -> str:
    """Returns the SHA-256 over those of several files, in their order."""
    return hashlib.sha256("".join(digests).encode()).hexdigest()


def version_of(path: Path) -> Version:
    """Returns size, times and inode. The change time can't be set back: edits that keep size and date are noticed."""
    stat = path.stat()
    return [stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino]


def fingerprint(parts: list[Any]) -> str:
    """Returns one hash of everything in `parts`, plain values such as counts and hashes of files."""
    return WHOLE + hashlib.sha256(json.dumps(parts).encode()).hexdigest()


def check(
    folder: Path, recorded: dict[str, str | None], cache_dir: str | Path, say: Callable[[str], None]
) -> dict[str, str]:
    """Verifies the files of a prepared folder and returns the SHA-256 of each, by name.

    Args:
        recorded: the SHA-256 recorded when each file was written; None for files without one.

    Raises:
        UserError: a file is missing or its content has changed.
    """
    try:
        found = Facts(cache_dir).digests([folder / name for name in recorded], say)
    except UserError as error:
        raise UserError(f"{error}; delete {folder} and prepare the data again") from None
    for name, written in recorded.items():
        now = found[folder / name]
        if written is not None and now != written:
            what = f"was changed after it was prepared (sha256 {written[:16]}..., now {now[:16]}...)"
            advice = f"put the file back, or delete {folder} and prepare the data again"
            raise UserError(f"{folder / name} {what}: {advice}")
    return {name: found[folder / name] for name in recorded}


def remember(folder: Path, written: dict[str, str], cache_dir: str | Path) -> None:
    """Caches the SHA-256 of files that were just written, so that they need not be read to compute it."""
    versions = {name: version_of(folder / name) for name in written}
    if sum(size for size, *_ in versions.values()) >= REMEMBER_FROM:
        Facts(cache_dir).remember("sha256", {folder / name: (versions[name], h) for name, h in written.items()})


def _read_all(paths: list[Path], facts: Facts, say: Callable[[str], None]) -> dict[Path, str]:
    """Returns the SHA-256 of files of any size; what was computed is cached even if reading is interrupted later."""
    total = sum(path.stat().st_size for path in paths)
    if total >= _SAY_FROM:
        say(f"reading {total / 1e9:,.1f} GB of token data to identify it (once, until the files change)")
    done, shown = 0, time.monotonic()

    def advance(size: int) -> None:
        nonlocal done, shown
        done += size
        if time.monotonic() - shown >= _SECONDS_BETWEEN_LINES:
            shown = time.monotonic()
            say(f"read {done / 1e9:,.1f} of {total / 1e9:,.1f} GB")

    # What is known so far is written down while it goes on.
    found: dict[Path, Any] = {}
    written = time.monotonic()
    try:
        for path in paths:
            version = version_of(path)  # taken before reading: an edit meanwhile is noticed at the next start
            found[path] = (version, _sha256(path, advance))
            if time.monotonic() - written >= _SECONDS_BETWEEN_LINES:  # not per file: each time, all facts are written
                facts.remember("sha256", found)
                written = time.monotonic()
    finally:
        kept = facts.remember("sha256", found)
    if total >= _SAY_FROM and not kept:
        say(f"{facts.store} can't be written: the files are read again at the next start; set data.cache_dir")
    return {path: digest for path, (_, digest) in found.items()}


def _sha256(path: Path, advance: Callable[[int], None] = lambda _: None) -> str:
    digest = hashlib.sha256()
    try:
        with path.open("rb") as file:
            while chunk := file.read(_CHUNK):
                digest.update(chunk)
                advance(len(chunk))
    except OSError as error:
        error.filename = str(path)  # an error of reading, unlike one of opening, names no file
        raise
    return digest.hexdigest()
