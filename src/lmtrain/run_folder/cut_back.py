"""Cuts a run's logs (metrics.jsonl, samples.jsonl) back to the step it resumes from; keeps a copy of a damaged one."""

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from lmtrain.files import aside, open_regular, parse_row, write_atomic


def cut_back(path: Path, step: int, validated: bool, tell: Callable[[str], None]) -> int:
    """Cuts a JSON-lines file back to the rows with `step` <= step, so that a resumed run writes each step once.

    Where `step` is not `validated`, what its validation wrote goes too: it will be made again. Where lines can't be
    read, or don't stand in order, `tell` gets what was wrong, and the file as it was is kept beside it.

    Returns:
        The number of rows that stay.
    """
    if not path.exists():
        return 0
    rows, size = 0, 0  # of the lines that stay
    went_on, problems = False, []
    for number, (line, stays, problem) in enumerate(_judge(path, step, validated), 1):
        if problem is None and stays and went_on:
            problem = "follows lines of later steps"
        if problem is not None:
            problems.append(f"line {number} {problem}")
        rows, size = (rows + 1, size + len(line)) if stays else (rows, size)
        went_on = went_on or (not stays and problem is None)
    if problems:
        _rewrite(path, [line for line, stays, _ in _judge(path, step, validated) if stays], problems, tell)
        return rows
    with open_regular(path, "r+b") as file:
        file.truncate(size)
        file.flush()
        os.fsync(file.fileno())
    return rows


def _judge(path: Path, step: int, validated: bool) -> Iterator[tuple[bytes, bool, str | None]]:
    """Each line, whether it stays where a run goes on after `step`, and why it can't be read."""
    with open_regular(path) as file:
        for line in file:
            if not line.endswith(b"\n") and b"\0" not in line:
                return  # cut short by a kill
            try:
                row = parse_row(line)
                if type(row.get("step")) is not int:
                    raise ValueError("it has no step")
            except ValueError as error:
                yield line, False, f"can't be read ({error})"
                continue
            later = row["step"] > step or (row["step"] == step and not validated and of_validation(row))
            yield line, not later, None


def readable_rows(path: Path) -> list[dict[str, Any]]:
    """The rows of a file that may be damaged, as far as they can be read."""
    if not path.exists():
        return []
    return [parse_row(line) for line, _, problem in _judge(path, 0, False) if problem is None]


def of_validation(row: dict[str, Any]) -> bool:
    """Of metrics.jsonl or samples.jsonl."""
    of_step = "rows" in row  # a record of training, whatever else was logged with it
    of_rollout = "reward" in row  # completions of a step's rollout
    return ("prompt" in row and not of_rollout) or (not of_step and any(key.startswith("val/") for key in row))


def _rewrite(path: Path, lines: list[bytes], problems: list[str], tell: Callable[[str], None]) -> None:
    """Keeps `lines` alone of a damaged file, and a copy of it as it was."""
    kept = aside(path)
    shutil.copyfile(path, kept)
    write_atomic(path, b"".join(lines).decode("utf-8"))
    more = f" and {len(problems) - 1} more" if len(problems) > 1 else ""
    tell(f"{path.name} is damaged: {problems[0]}{more}. What can be read stays; the whole is kept as {kept.name}")
