"""SHA-256 of prepared files: computed while they are written, compared at every start.

A file's hash is remembered beside its size, times and inode (cache.Facts): terabytes are read whole once, not at every
start. Files that changed since are read again, and must hold what was recorded when they were prepared.
"""

import hashlib
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lmtrain.data.cache import REMEMBER_FROM, Facts, version_of
from lmtrain.errors import UserError

WHOLE = "sha256:"  # what fingerprints begin with; earlier versions' had no such prefix
_CHUNK = 1 << 20  # bytes
_SAY_FROM = 1 << 30  # bytes: reading them takes seconds
_SECONDS_BETWEEN_LINES = 10.0


def fingerprint(parts: list[Any]) -> str:
    """One name for everything in `parts`, plain values such as counts and hashes of files."""
    return WHOLE + hashlib.sha256(json.dumps(parts).encode()).hexdigest()


def check(
    folder: Path, recorded: dict[str, str | None], cache_dir: str | Path, say: Callable[[str], None]
) -> dict[str, str]:
    """The sha256 of each file of a prepared folder, by name.

    Args:
        recorded: the files, each with the sha256 that was recorded when it was written; None where none was.

    Raises:
        UserError: a file is missing, or holds something else than what was written.
    """
    try:
        found = _hashes([folder / name for name in recorded], Facts(cache_dir), say)
    except OSError as error:
        raise UserError(
            f"{error.filename} can't be read: {error.strerror}; delete {folder} and prepare the data again"
        ) from None
    for name, written in recorded.items():
        now = found[folder / name]
        if written is not None and now != written:
            raise UserError(
                f"{folder / name} was changed after it was prepared: it was written with sha256 {written[:16]}..., and "
                f"has {now[:16]}... now. Put the file back, or delete {folder} and prepare the data again"
            )
    return {path.name: now for path, now in found.items()}


def remember(folder: Path, written: dict[str, str], cache_dir: str | Path) -> None:
    """Takes note of the sha256 of files that were written just now: they needn't be read to know it."""
    versions = {name: version_of(folder / name) for name in written}
    if sum(size for size, *_ in versions.values()) >= REMEMBER_FROM:
        Facts(cache_dir).remember("sha256", {folder / name: (versions[name], h) for name, h in written.items()})


def _hashes(paths: list[Path], facts: Facts, say: Callable[[str], None]) -> dict[Path, str]:
    if sum(path.stat().st_size for path in paths) < REMEMBER_FROM:
        return {path: _sha256(path, lambda _: None) for path in paths}
    known = facts.recall(paths, "sha256")
    if len(known) < len(paths):
        with facts.one_process():
            known = facts.recall(paths, "sha256")
            known |= _read_all([path for path in paths if path not in known], facts, say)
    return {path: known[path] for path in paths}


def _read_all(paths: list[Path], facts: Facts, say: Callable[[str], None]) -> dict[Path, str]:
    """sha256 of files of any size; what is found is remembered, also where the reading is interrupted later."""
    total = sum(path.stat().st_size for path in paths)
    if total >= _SAY_FROM:
        say(f"reading {total / 1e9:,.1f} GB of token data to know it again: once, until the files change")
    done, shown = 0, time.monotonic()

    def advance(size: int) -> None:
        nonlocal done, shown
        done += size
        if time.monotonic() - shown >= _SECONDS_BETWEEN_LINES:
            shown = time.monotonic()
            say(f"read {done / 1e9:,.1f} of {total / 1e9:,.1f} GB")

    found: dict[Path, Any] = {}
    try:
        for path in paths:
            version = version_of(path)  # before it is read: an edit meanwhile is noticed at the next start
            found[path] = (version, _sha256(path, advance))
    finally:
        kept = facts.remember("sha256", found)
    if total >= _SAY_FROM and not kept:
        say(f"{facts.store} can't be written: the files are read again at the next start; set data.cache_dir")
    return {path: digest for path, (_, digest) in found.items()}


def _sha256(path: Path, advance: Callable[[int], None]) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
            advance(len(chunk))
    return digest.hexdigest()
