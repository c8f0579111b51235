"""The choice of checkpoints to keep, by step and score, and the links `last` and `best` to them."""

import contextlib
import math
import os
from pathlib import Path
from typing import Any

from lmtrain.checkpoints import manifest
from lmtrain.checkpoints.store import remove, scan, step_of
from lmtrain.errors import RunError

Scores = list[tuple[int, float | None]]  # (step, validation score if that step was validated)


def manifests(folder: Path) -> dict[Path, dict[str, Any]]:
    """Returns the manifest of each checkpoint, oldest first. Unreadable ones are left out: not counted, not removed."""
    found = {}
    for path in scan(folder):
        with contextlib.suppress(RunError):
            found[path] = manifest.read(path)
    return found


def scores(folder: Path, monitor: str, scored_on: str | None = None) -> Scores:
    """Returns each checkpoint's step and its value of `monitor`, or None if measured on rows other than `scored_on`.

    Checkpoints of earlier versions don't record their validation rows; their scores count. Interim checkpoints, which
    an uninterrupted run would not have written, are left out.
    """
    found = {step_of(path): content for path, content in manifests(folder).items() if not content.get("interim", False)}
    alike = lambda content: scored_on is None or content.get("scored_on", scored_on) == scored_on  # noqa: E731
    return [(step, c["metrics"].get(monitor) if alike(c) else None) for step, c in found.items()]


def scored_on_others(folder: Path, scored_on: str | None) -> dict[str, list[int]]:
    """Returns the steps whose scores were measured on other validation rows than these, by the name of those rows."""
    found: dict[str, list[int]] = {}
    for path, content in manifests(folder).items():
        theirs = content.get("scored_on")
        if content["metrics"] and scored_on is not None and theirs is not None and theirs != scored_on:
            found.setdefault(theirs, []).append(step_of(path))
    return found


LAST = "last"  # the mode in which the newest checkpoint with a score is the best


def _ranked(scores: Scores, mode: str) -> list[int]:
    """Returns the steps with a finite score, best first by `mode` (min, max or LAST); ties go to the earlier step."""
    if mode == LAST:
        return [step for step, score in sorted(scores, reverse=True) if score is not None and math.isfinite(score)]
    sign = 1 if mode == "min" else -1
    scored = [(sign * score, step) for step, score in scores if score is not None and math.isfinite(score)]
    return [step for _, step in sorted(scored)]


def best_of(scores: Scores, mode: str) -> int | None:
    """Returns the best step, or None if no step has a finite score."""
    return next(iter(_ranked(scores, mode)), None)


def to_keep(scores: Scores, last: int, best: int, every: int | None, mode: str) -> set[int]:
    """Returns the steps to keep: the newest `last`, the best `best`, and those divisible by `every`."""
    steps = sorted(step for step, _ in scores)
    keep = set(steps[max(0, len(steps) - last) :]) | set(_ranked(scores, mode)[:best])
    return keep | {step for step in steps if every and step % every == 0}


def link(folder: Path, name: str, target: Path) -> None:
    """Points the relative symlink checkpoints/<name> at a checkpoint, replacing an older link atomically.

    A tool that follows links (scp, aws s3 cp) has put a copy of the older checkpoint in its place, which is removed.
    """
    temporary = folder / f"{name}.link.tmp{os.getpid()}"
    try:
        temporary.unlink(missing_ok=True)
        os.symlink(target.name, temporary)
        if (folder / name / manifest.NAME).exists() and not (folder / name).is_symlink():
            remove(folder / name)
        os.replace(temporary, folder / name)
    except OSError:
        temporary.unlink(missing_ok=True)  # the file system has no symlinks; summary.json names them too
