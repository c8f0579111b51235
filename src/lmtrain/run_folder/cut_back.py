"""Truncates a run's logs (metrics.jsonl, samples.jsonl) to the step it resumes from; backs up damaged ones.

Only the rows from about that step on are parsed, so resuming a long run takes no longer than a short one.
"""

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from lmtrain.files import aside, open_regular, parse_row, tail_from, write_atomic

_BLOCK = 1 << 20  # bytes
_BEGINS = b'{"step": '  # every line


def cut_back(path: Path, step: int, validated: bool, tell: Callable[[str], None]) -> int:
    """Truncates a JSON-lines file to the rows with `step` <= step, so that a resumed run writes each step once.

    Unless `step` is `validated`, the rows of its validation are removed too, since it will be repeated. If lines are
    unreadable or out of order, `tell` gets a description of the problem and a copy of the original file is kept. Of
    lines well before `step`, only the beginnings are checked.

    Returns:
        The number of rows that remain.
    """
    if not path.exists():
        return 0
    # Lines well before the step are counted, the others read.
    size = _start(path, step)
    before = _count(path, size)
    size, rows = (0, 0) if before is None else (size, before)  # of the remaining lines
    went_on, problems = False, []
    for number, (line, row, problem) in enumerate(parsed(path, size), rows + 1):
        stays = row is not None and _stays(row, step, validated)
        if stays and went_on:
            problem = "follows lines of later steps"
        if problem is not None:
            problems.append(f"line {number} {problem}")
        rows, size = (rows + 1, size + len(line)) if stays else (rows, size)
        went_on = went_on or (not stays and problem is None)
    # A damaged file is written anew; a whole one only loses its end.
    if problems:
        kept = aside(path)
        shutil.copyfile(path, kept)
        lines = [line for line, row, _ in parsed(path) if row is not None and _stays(row, step, validated)]
        write_atomic(path, b"".join(lines).decode("utf-8"))
        more = f" and {len(problems) - 1} more" if len(problems) > 1 else ""
        tell(f"{path.name} is damaged: {problems[0]}{more}. What can be read stays; the whole is kept as {kept.name}")
        return len(lines)
    with open_regular(path, "r+b") as file:
        file.truncate(size)
        file.flush()
        os.fsync(file.fileno())
    return rows


def rows_from(path: Path, step: int) -> Iterator[dict[str, Any]]:
    """Yields the readable rows of `step` and later of a file that may be damaged or missing."""
    if path.exists():
        rows = (row for _, row, _ in parsed(path, _start(path, step)) if row is not None)
        yield from (row for row in rows if row["step"] >= step)


def last_rows(path: Path, window: int = 1 << 12) -> list[dict[str, Any]]:
    """Returns the readable rows at the end of a file, in about `window` bytes or more; none if it is missing."""
    if not path.exists():
        return []
    return [row for _, row, _ in parsed(path, tail_from(path, bool, window)) if row is not None]


def _start(path: Path, step: int) -> int:
    """Returns the byte near the end at which a row before `step` begins; 0 if none is found."""
    return tail_from(path, lambda row: type(row.get("step")) is int and row["step"] < step)


def _count(path: Path, size: int) -> int | None:
    """Returns the number of lines in the first `size` bytes, or None if some don't look like rows."""
    count = done = 0
    with open_regular(path) as file:
        while done < size:
            block = file.read(min(_BLOCK, size - done))
            block += file.readline() if done + len(block) < size else b""
            lines = block.count(b"\n")
            if b"\0" in block or block.startswith(_BEGINS) + block.count(b"\n" + _BEGINS) != lines:
                return None
            count, done = count + lines, done + len(block)
    return count


def parsed(
    path: Path, start: int = 0, holding: bytes = b""
) -> Iterator[tuple[bytes, dict[str, Any] | None, str | None]]:
    """Yields each line from byte `start` on, its row, and why it is unreadable (or None).

    Args:
        holding: lines without these bytes are skipped unparsed.
    """
    with open_regular(path) as file:
        file.seek(start)
        for line in file:
            if not line.endswith(b"\n") and b"\0" not in line:
                return  # cut short by a kill
            if holding not in line:
                continue
            try:
                row = parse_row(line)
                if type(row.get("step")) is not int:
                    raise ValueError("it has no step")
            except ValueError as error:
                yield line, None, f"can't be read ({error})"
            else:
                yield line, row, None


def _stays(row: dict[str, Any], step: int, validated: bool) -> bool:
    return bool(row["step"] < step or (row["step"] == step and (validated or not of_validation(row))))


def of_validation(row: dict[str, Any]) -> bool:
    """Returns whether a row of metrics.jsonl or samples.jsonl was written by a validation."""
    of_step = "rows" in row  # a training record, whatever else it contains
    of_rollout = "reward" in row  # completions of a step's rollout
    return ("prompt" in row and not of_rollout) or (not of_step and any(key.startswith("val/") for key in row))
