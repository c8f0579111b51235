"""Verification of a checkpoint's files against their checksums, in several threads and on all ranks."""

import hashlib
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from lmtrain.distributed import process_group as world

T = TypeVar("T")
_READERS = 16  # threads per process: each hashes 1 to 2 GB/s with SHA-256, which releases Python's lock


class CheckedPart(NamedTuple):
    """A range of bytes of a file, and the SHA-256 that the manifest records for it."""

    file: Path
    offset: int
    bytes: int
    sha256: str


Compare = Callable[[Sequence[CheckedPart]], CheckedPart | None]


def first_wrong(parts: Sequence[CheckedPart]) -> CheckedPart | None:
    """Returns the first part whose bytes don't match its SHA-256, or None. Raises OSError if a file can't be read."""
    with ThreadPoolExecutor(min(_READERS, os.cpu_count() or 1)) as pool:
        right = pool.map(lambda part: sha256(part.file, part.offset, part.bytes) == part.sha256, parts)
        return next((part for part, is_right in zip(parts, right, strict=True) if not is_right), None)


def helped_by_ranks(find: Callable[[Compare], T]) -> T:
    """Calls `find` on rank 0, with a `first_wrong` whose work all ranks share, and returns its result on every rank.

    Each rank reads every n-th part. Rank 0 reads the parts that another rank can't read, for example because they are
    on the disk of another node.

    Raises:
        UserError, RunError, OSError: raised by `find`, on all ranks.
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
    """Checks this rank's parts; returns the first wrong one, if any, and the parts to be read by rank 0 instead."""
    mine = list(parts[world.rank() :: world.size()])
    try:
        return first_wrong(mine), []
    except OSError:
        return None, mine


def gap(file: Path, ranges: list[dict[str, Any]]) -> str | None:
    """Describes the first gap in a file that was written in these ranges, or a wrong size; None if it is complete."""
    end = 0
    for part in sorted(ranges, key=lambda part: part["offset"]):
        if part["offset"] != end:
            return f"{file.name} has a gap at byte {end}"
        end += part["bytes"]
    return None if end == file.stat().st_size else f"{file.name} has {file.stat().st_size} bytes instead of {end}"


def sha256(file: Path, offset: int, count: int) -> str:
    """Returns the SHA-256, as hexadecimal digits, of `count` bytes of a file from `offset` on."""
    digest = hashlib.sha256()
    with file.open("rb") as handle:
        handle.seek(offset)
        while count > 0 and (block := handle.read(min(count, 1 << 24))):
            digest.update(block)
            count -= len(block)
    return digest.hexdigest()
