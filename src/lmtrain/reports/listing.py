"""Lists the runs in a folder with status, step, best score and time of the last change. Imports no torch."""

import contextlib
import functools
import json
import math
import os
import re
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from rich import box
from rich.table import Table

from lmtrain import errors, terminal
from lmtrain.config.safe_yaml import plain
from lmtrain.errors import UserError
from lmtrain.files import CHECKPOINT, read_regular
from lmtrain.run_folder import lock
from lmtrain.run_folder.cut_back import last_rows, parsed
from lmtrain.run_folder.folder import RunDir, checkpoint_names

# Sections of a config that are parsed alone.
_SECTIONS = re.compile(r"^(?:budget|checkpoint|trainer|objective|model|data):.*\n(?:[ \t].*\n|\n)*", re.MULTILINE)
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
    trained: tuple[str, str, str]  # names of the objective, the model and the data

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
        raise UserError(f"{folder} holds no run (a folder with config.yaml): name another, lmtrain.runs <folder>")
    rows = [_cells(run, str(run.path.relative_to(folder)) if run.path != folder else run.path.name) for run in found]
    console = terminal.console()
    names = _fitting(rows, console.width)
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name in names:
        narrow = name in ("status", "step", "changed")
        table.add_column(name, justify="right" if name == "step" else "left", no_wrap=narrow, overflow="fold")
    for row in rows:
        table.add_row(*(row[name] for name in names))
    with contextlib.suppress(BrokenPipeError):
        console.print(table)
    return errors.FINISHED


def _cells(run: Listed, name: str) -> dict[str, str]:
    """Returns what the table shows of a run, by column."""
    objective, model, data = map(terminal.visible, run.trained)
    return {"run": terminal.visible(name), "objective": objective, "model": model, "data": data, "status": run.status,
            "step": run.steps(), "best": run.best or "", "changed": run.age()}  # fmt: skip


def _fitting(rows: list[dict[str, str]], width: int) -> list[str]:
    """Returns the columns to show: all, or on a narrow terminal those without which each run takes one line."""
    widths = {name: max(len(name), *(len(row[name]) for row in rows)) + 2 for name in rows[0]}
    for name in ("data", "model", "objective", "changed"):
        if sum(widths.values()) > width:
            del widths[name]
    return list(widths)


def read(run: RunDir, ended: bool = False) -> Listed:
    """Reads the state of one run from its folder; `ended`: summary.json is written, though the run is still locked."""
    config = _config(run)
    summary = run.summary_or_error()
    best = best_row(run, summary, config["checkpoint"]["monitor"], config["checkpoint"]["mode"])
    last = max((row["step"] for row in last_rows(run.metrics)), default=0) if run.metrics.is_file() else 0
    status, step = _status(run, summary, ended), max(last, whole(summary.get("step")) or 0)
    score = None
    if best is not None:
        score = "{} {:.4f} at step {:,}".format(*lead(best, headline(run, summary)), best["step"])
    changed = max(p.stat().st_mtime for p in (run.config, run.metrics, run.summary) if p.exists())
    return Listed(run.path, status, step, _planned(config, status, step), score, changed, trained(config))


def headline(run: RunDir, summary: dict[str, Any]) -> list[str]:
    """Returns the names of the means that are shown first, as the run wrote them when it began."""
    begun = last_rows(run.starts)[-1:] if run.starts.is_file() else []
    names = (begun[0] if begun else summary).get("headline")
    return [str(name) for name in names] if isinstance(names, list) else ["loss"]


def lead(row: dict[str, Any], names: list[str]) -> tuple[str, float]:
    """Returns name and value of the first of `names` that a validation's row has; otherwise what it was chosen by."""
    key = next((f"val/{name}" for name in names if _is_score(row.get(f"val/{name}"))), row["monitor"])
    return key, row[key]


def trained(config: dict[str, Any]) -> tuple[str, str, str]:
    """Returns the names of the objective, the model and the data."""
    objective, model, data = (config.get(section, {}) for section in ("objective", "model", "data"))
    named = model.get("name_or_path") or model.get("name")
    rows = data.get("path") or data.get("name") or str(data.get("source") or "").rpartition(".")[2]
    return (str(objective.get("name") or ""), str(named or ""), rows if isinstance(rows, str) else json.dumps(rows))


def _planned(config: dict[str, Any], status: str, step: int) -> int | None:
    """Returns the steps of the whole run; None if the clock chooses them (budget.minutes) and it is not finished."""
    if status == "finished":
        return step
    steps = whole(config["trainer"]["max_steps"])
    return None if config["budget"]["minutes"] is not None or steps is None or steps < step else steps


def _config(run: RunDir) -> dict[str, Any]:
    nothing: dict[str, Any] = {"checkpoint": {"monitor": "val/loss", "mode": "min"}, "trainer": {"max_steps": None},
                               "budget": {"minutes": None}, "objective": {}, "model": {}, "data": {}}  # fmt: skip
    try:
        text = read_regular(run.config)
        parts = [] if "*" in text else _SECTIONS.findall(text)  # *name refers to another section
        tree = {name: value for part in parts or [text] for name, value in _parsed(part).items()}
        return {section: {**default, **tree.get(section, {})} for section, default in nothing.items()}
    except (OSError, ValueError, yaml.YAMLError, KeyError, TypeError, AttributeError, RecursionError):
        return nothing


_parsed = functools.lru_cache(maxsize=512)(plain)  # most runs of a folder share most sections of their configs


def whole(value: Any) -> int | None:
    """Returns the value if it is an int (not a bool), otherwise None."""
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _status(run: RunDir, summary: dict[str, Any], ended: bool) -> str:
    if not ended and lock.taken(run.path):
        return "running"
    if "status" in summary:
        return str(summary["status"])
    return "interrupted" if run.metrics.exists() or checkpoint_names(run.checkpoints) else "not begun"


def best_row(run: RunDir, summary: dict[str, Any], monitor: str, mode: str) -> dict[str, Any] | None:
    """Returns the validation's row of the best checkpoint, with "monitor", or None; unreadable lines are skipped.

    summary.json has it; of a run without one, the best of metrics.jsonl. The score before training
    (trainer.val_before_training) is no score of the run: no checkpoint has it.
    """
    named = CHECKPOINT.search(str(summary.get("best")))
    value: Any = best.get(monitor) if isinstance(best := summary.get("best_metric"), dict) else None
    if named and _is_score(value):
        others = summary["best_scores"] if isinstance(summary.get("best_scores"), dict) else {}
        return {**others, monitor: value, "step": int(named[1]), "monitor": monitor}
    if not run.metrics.is_file():
        return None
    rows = (row for _, row, _ in parsed(run.metrics, holding=json.dumps(monitor).encode()) if row is not None)
    scored = ({**row, "monitor": monitor} for row in rows if row["step"] > 0 and _is_score(row.get(monitor)))
    return (min if mode == "min" else max)(scored, key=lambda row: row[monitor], default=None)


def _is_score(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)
