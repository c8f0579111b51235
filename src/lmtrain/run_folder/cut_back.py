"""Truncates a run's logs (metrics.jsonl, samples.jsonl) to the step it resumes from; backs up damaged ones."""

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from lmtrain.files import aside, open_regular, parse_row, write_atomic


def cut_back(path: Path, step: int, validated: bool, tell: Callable[[str], None]) -> int:
    """Truncates a JSON-lines file to the rows with `step` <= step, so that a resumed run writes each step once.

    Unless `step` is `validated`, the rows of its validation are removed too, since it will be repeated. If lines are
    unreadable or out of order, `tell` gets a description of the problem and a copy of the original file is kept.

    Returns:
        The number of rows that remain.
    """
    if not path.exists():
        return 0
    rows, size = 0, 0  # of the remaining lines
    went_on, problems = False, []
    for number, (line, stays, problem) in enumerate(_judge(path, step, validated), 1):
        if problem is None and stays and went_on:
            problem = "follows lines of later steps"
        if problem is not None:
            problems.append(f"line {number} {problem}")
        rows, size = (rows + 1, size + len(line)) if stays else (rows, size)
        went_on = went_on or (not stays and problem is None)
    if problems:
        kept = aside(path)
        shutil.copyfile(path, kept)
        lines = [line for line, stays, _ in _judge(path, step, validated) if stays]
        write_atomic(path, b"".join(lines).decode("utf-8"))
        more = f" and {len(problems) - 1} more" if len(problems) > 1 else ""
        tell(f"{path.name} is damaged: {problems[0]}{more}. What can be read stays; the whole is kept as {kept.name}")
        return rows
    with open_regular(path, "r+b") as file:
        file.truncate(size)
        file.flush()
        os.fsync(file.fileno())
    return rows


def _judge(path: Path, step: int, validated: bool) -> Iterator[tuple[bytes, bool, str | None]]:
    """Yields each line, whether to keep it when a run resumes after `step`, and why it is unreadable (or None)."""
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
    """Returns all readable rows of a file that may be damaged."""
    if not path.exists():
        return []
    return [parse_row(line) for line, _, problem in _judge(path, 0, False) if problem is None]


def of_validation(row: dict[str, Any]) -> bool:
    """Returns whether a row of metrics.jsonl or samples.jsonl was written by a validation."""
    of_step = "rows" in row  # a training record, whatever else it contains
    of_rollout = "reward" in row  # completions of a step's rollout
    return ("prompt" in row and not of_rollout) or (not of_step and any(key.startswith("val/") for key in row))
