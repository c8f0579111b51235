"""Lists the runs in a folder with status, step, best score and time of the last change. Imports no torch."""

import contextlib
import json
import math
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from rich import box
from rich.table import Table

from lmtrain import errors, terminal
from lmtrain.errors import UserError
from lmtrain.files import read_regular
from lmtrain.run_folder import lock
from lmtrain.run_folder.folder import RunDir, checkpoint_names

_UNITS = ((86400, "d"), (3600, "h"), (60, "min"))


@dataclass(frozen=True)
class Listed:
    """The state of a run as read from its folder."""

    path: Path
    status: str  # running, interrupted (killed: no summary.json), not begun, unreadable, or as in summary.json
    step: int  # last logged optimizer step
    max_steps: int | None
    best: str | None  # the best monitored score and its step, as text
    changed: float  # time.time() of the last change

    def steps(self) -> str:
        return f"{self.step:,}" + (f" of {self.max_steps:,}" if self.max_steps else "")

    def age(self) -> str:
        seconds = max(0.0, time.time() - self.changed)
        size, unit = next(((s, u) for s, u in _UNITS if seconds >= s), (1, "s"))
        return f"{seconds / size:.0f} {unit} ago"


def runs_under(folder: Path) -> list[Listed]:
    """Returns the runs in `folder` (or the run that it is), latest change first; does not search inside runs."""
    found = []
    for place, below, files in os.walk(folder):
        if "config.yaml" in files and ("metrics.jsonl" in files or "checkpoints" in below or "summary.json" in files):
            found.append(read(RunDir(Path(place))))
            below.clear()
    return sorted(found, key=lambda run: -run.changed)


def show(folder: Path) -> int:
    """Prints a table of the runs, latest change first; UserError if there is none."""
    found = runs_under(folder)
    if not found:
        raise UserError(
            f"{folder} holds no run (a folder with config.yaml); name another: python -m lmtrain.runs <folder>"
        )
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("run", overflow="fold")
    for name in ("status", "step", "best", "changed"):
        table.add_column(name, justify="right" if name == "step" else "left", no_wrap=name != "best")
    for run in found:
        name = str(run.path.relative_to(folder)) if run.path != folder else run.path.name
        table.add_row(name, run.status, run.steps(), run.best or "", run.age())
    with contextlib.suppress(BrokenPipeError):
        terminal.console().print(table)
    return errors.FINISHED


def read(run: RunDir) -> Listed:
    """Reads the state of one run from its folder."""
    config = _config(run)
    summary = _json(run.summary)
    monitor, mode = config["checkpoint"]["monitor"], config["checkpoint"]["mode"]
    step, best = _last_and_best(run.metrics, monitor, mode)
    status, step = _status(run, summary), max(step, whole(summary.get("step")) or 0)
    files = [p for p in (run.config, run.metrics, run.summary) if p.exists()]
    return Listed(
        run.path,
        status,
        step,
        # budget.minutes and epochs may end a run at a step other than max_steps.
        step if status == "finished" else whole(config["trainer"]["max_steps"]),
        f"{monitor} {best[1]:.4f} at step {best[0]:,}" if best is not None else None,
        max(p.stat().st_mtime for p in files),
    )


def _config(run: RunDir) -> dict[str, Any]:
    nothing: dict[str, Any] = {"checkpoint": {"monitor": "val/loss", "mode": "min"}, "trainer": {"max_steps": None}}
    try:
        tree = yaml.safe_load(read_regular(run.config))
        return {section: {**nothing[section], **tree[section]} for section in nothing}
    except (OSError, ValueError, yaml.YAMLError, KeyError, TypeError, AttributeError, RecursionError):
        return nothing


def _json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(read_regular(path))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError):
        return {"status": "unreadable"}
    return found if isinstance(found, dict) else {"status": "unreadable"}


def whole(value: Any) -> int | None:
    """Returns the value if it is an int (not a bool), otherwise None."""
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _status(run: RunDir, summary: dict[str, Any]) -> str:
    if lock.taken(run.path):
        return "running"
    if "status" in summary:
        return str(summary["status"])
    return "interrupted" if run.metrics.exists() or checkpoint_names(run.checkpoints) else "not begun"


def _last_and_best(metrics: Path, monitor: str, mode: str) -> tuple[int, tuple[int, float] | None]:
    """Returns the last logged step, and step and value of the best `monitor`; unreadable lines are skipped.

    The score before training (trainer.val_before_training) is no score of the run: no checkpoint has it.
    """
    last, best = 0, None
    if not metrics.is_file():
        return last, best
    with metrics.open("rb") as file:
        for line in file:
            try:
                row = json.loads(line)
                step, value = whole(row["step"]), row.get(monitor)
            except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
                continue
            if step is None:
                continue
            last = max(last, step)
            if step > 0 and isinstance(value, int | float) and math.isfinite(value):
                better = best is None or (value < best[1] if mode == "min" else value > best[1])
                best = (step, float(value)) if better else best
    return last, best
