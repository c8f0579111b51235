"""Compares bytes of a checkpoint with their checksums: in threads, and with several ranks on all of them."""

import hashlib
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from lmtrain.distributed import process_group as world

T = TypeVar("T")
_READERS = 16  # threads of a process: SHA-256 takes 1 to 2 GB/s each, and Python waits for none


class CheckedPart(NamedTuple):
    """Bytes of a file and the SHA-256 that a manifest says they have."""

    file: Path
    offset: int
    bytes: int
    sha256: str


Compare = Callable[[Sequence[CheckedPart]], CheckedPart | None]


def first_wrong(parts: Sequence[CheckedPart]) -> CheckedPart | None:
    """The first part whose bytes are others; OSError where they can't be read."""
    with ThreadPoolExecutor(min(_READERS, os.cpu_count() or 1)) as pool:
        right = pool.map(lambda part: sha256(part.file, part.offset, part.bytes) == part.sha256, parts)
        return next((part for part, is_right in zip(parts, right, strict=True) if not is_right), None)


def helped_by_ranks(find: Callable[[Compare], T]) -> T:
    """What `find` gives on rank 0, on every rank. It is called with a `first_wrong` that all ranks work on.

    Each rank reads every n-th of the parts. What a rank can't read, on a disk of another node say, rank 0 does.

    Raises:
        UserError, RunError, OSError: of `find`, on all ranks.
    """
    if world.rank() > 0:
        while (parts := world.gathered(None)[0]) is not None:
            world.gathered(_of_this_rank(parts))

    def found() -> T:
        try:
            return find(_shared)
        finally:
            world.gathered(None)

    return world.from_first(found)


def _shared(parts: Sequence[CheckedPart]) -> CheckedPart | None:
    world.gathered(list(parts))
    wrong, unread = zip(*world.gathered(_of_this_rank(parts)), strict=True)
    left = [part for some in unread for part in some]
    return next((part for part in wrong if part is not None), None) or first_wrong(left)


def _of_this_rank(parts: Sequence[CheckedPart]) -> tuple[CheckedPart | None, list[CheckedPart]]:
    """The first wrong one among this rank's parts, and those that it could not read."""
    mine = list(parts[world.rank() :: world.size()])
    try:
        return first_wrong(mine), []
    except OSError:
        return None, mine


def gap(file: Path, ranges: list[dict[str, Any]]) -> str | None:
    """Where a file was not written, of one that was written in these ranges; None if nowhere."""
    end = 0
    for part in sorted(ranges, key=lambda part: part["offset"]):
        if part["offset"] != end:
            return f"{file.name} has a gap at byte {end}"
        end += part["bytes"]
    return None if end == file.stat().st_size else f"{file.name} has {file.stat().st_size} bytes instead of {end}"


def sha256(file: Path, offset: int, count: int) -> str:
    """The SHA-256 of some bytes of a file."""
    digest = hashlib.sha256()
    with file.open("rb") as handle:
        handle.seek(offset)
        while count > 0 and (block := handle.read(min(count, 1 << 24))):
            digest.update(block)
            count -= len(block)
    return digest.hexdigest()
