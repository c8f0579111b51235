"""Parts of a corpus: tasks encode shares of the source's files side by side, and one process makes the corpus of them.

A part is a folder that is complete or absent, <prepared folder>.tasks-<N>/part_<k>, so that a task that was killed is
run again alone.
"""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from lmtrain.config.schema_data import DataConfig
from lmtrain.errors import RunError, UserError
from lmtrain.files import publish, temporary_beside

Encode = Callable[[Path, int, int], object]  # fills an empty folder with part k of n


class Tasks(Protocol):
    """Who encodes: the process that has all parts made, or one of its tasks."""

    def encode(self, target: Path, begin: Callable[[Path], object], encode: Encode) -> Path:
        """Returns the folder with the parts for the prepared folder `target`, all of them complete.

        Args:
            begin: fills an empty folder with what all tasks read, once, before any of them starts.
        """


class TaskDone(Exception):
    """Ends a task once its part is there."""


class OneTask:
    """Task `rank` of `tasks`, which makes its own part of one prepared folder, of the name `target`."""

    def __init__(self, target: str, rank: int, tasks: int) -> None:
        self.target, self.rank, self.tasks = target, rank, tasks

    def encode(self, target: Path, begin: Callable[[Path], object], encode: Encode) -> Path:
        """Makes the part unless it is there. Raises TaskDone then, RunError if it is to be part of something else."""
        if target.name != self.target:
            raise RunError(f"the data was changed: it would be prepared in {target.name}, and not in {self.target}")
        part = part_of(folder_of_parts(target, self.tasks), self.rank)
        if not part.is_dir():
            temporary = temporary_beside(part)
            temporary.mkdir()
            encode(temporary, self.rank, self.tasks)
            publish(temporary, part)
        raise TaskDone


def folder_of_parts(target: Path, tasks: int) -> Path:
    return target.with_name(f"{target.name}.tasks-{tasks}")


def part_of(folder: Path, rank: int) -> Path:
    return folder / f"part_{rank:05d}"


def parts_in(folder: Path) -> list[Path]:
    return sorted(folder.glob("part_?????"))


def begin_once(folder: Path, begin: Callable[[Path], object]) -> None:
    """Fills `folder`/shared by `begin`, unless it is there."""
    folder.mkdir(parents=True, exist_ok=True)
    shared = folder / "shared"
    if shared.is_dir():
        return
    temporary = temporary_beside(shared)
    temporary.mkdir()
    try:
        begin(temporary)
        publish(temporary, shared)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def share_of(items: list[Any], rank: int, tasks: int) -> list[Any]:
    """Returns share `rank` of `tasks`; the shares in their order are the list."""
    return items[len(items) * rank // tasks : len(items) * (rank + 1) // tasks]


def check_divisible(source: Any, cfg: DataConfig) -> None:
    """Raises UserError if the source can't be read in shares, or only the whole of it says what a document is."""
    if not hasattr(source, "share"):
        found = f"prepare.tasks divides files, and {source.label} is read otherwise"
        raise UserError(f"{found}: name files (data.path), or leave prepare.tasks out")
    for key in ("document_start", "num_samples"):
        if getattr(cfg, key) is not None:
            raise UserError(f"data.{key}={getattr(cfg, key)} needs one process: leave prepare.tasks out")
