"""The progress of a pipeline: stages.json in its folder, with a row per stage and evaluation, written as it begins.

    {"pretrain": {"identity": "0f3a...", "export": "91bc...", "seconds": 312.0}, "answers-pretrain": {...}}

`identity` is the hash of what the stage was started with (plan.py), `export` that of its result, set when it finishes.
"""

import json
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path

from lmtrain.data.store.contents import Facts
from lmtrain.errors import UserError
from lmtrain.files import first_unused, read_regular, write_atomic
from lmtrain.run_folder.finished import ended
from lmtrain.run_folder.folder import RunDir
from lmtrain.stages.plan import PlannedStage

FINISHED = "finished: skipped"  # shown in the plan for a stage that is not run again
_ABOUT = ("README.md", "lmtrain_config.yaml")  # files of an export that only describe the run (times, paths)


@dataclass
class Row:
    identity: str
    export: str | None = None  # digest of the exported files, or "written" for an evaluation
    seconds: float = 0.0  # over all starts


class State:
    """The rows of stages.json in a pipeline's folder."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "stages.json"
        try:
            tree = json.loads(read_regular(self.path)) if self.path.exists() else {}
            self.rows = {str(name): Row(**row) for name, row in tree.items()}
        except (OSError, ValueError, TypeError, AttributeError, RecursionError) as error:
            raise UserError(f"{self.path} can't be read ({error}): fix it, or start over by another run.name") from None

    def write(self) -> None:
        write_atomic(self.path, json.dumps({name: asdict(row) for name, row in self.rows.items()}, indent=2) + "\n")

    def begin(self, name: str, identity: str) -> Row:
        """Returns the row of a stage or evaluation that starts or continues now, marked as unfinished, and saves it."""
        row = self.rows.get(name)
        if row is None or row.identity != identity:
            row = self.rows[name] = Row(identity)
        row.export = None
        self.write()
        return row


def export_digest(one: PlannedStage) -> str | None:
    """Returns a hash of what the next stage reads of an export ("none" if disabled), or None if there is none yet."""
    if ended(RunDir(one.run)) is None:
        return None
    if not one.config.export.enabled:
        return "none"
    found = sorted(p for folder in ("export", "export_merged") for p in (one.run / folder).rglob("*") if p.is_file())
    files = [p for p in found if p.name not in _ABOUT]
    return Facts(one.config.data.cache_dir).digest(files)[:16] if files else None


def set_aside(run: Path) -> Path:
    """Moves a run's folder to replaced/<stage>_<n> in the same folder and returns its new path."""
    place = first_unused(lambda n: run.parent / "replaced" / f"{run.name}_{n + 1}")
    place.parent.mkdir(exist_ok=True)
    shutil.move(run, place)
    return place
