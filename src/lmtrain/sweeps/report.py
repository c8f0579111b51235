"""What `lmtrain sweep_report` shows: a sweep's trials, best first."""

import shlex
from pathlib import Path
from typing import Any

from rich.table import Table
from rich.text import Text

from lmtrain import errors, terminal
from lmtrain.config import compose as rules
from lmtrain.errors import UserError
from lmtrain.sweeps.trials import Trial, Trials, last_line, ranked


def report(folder: Path) -> int:
    """Prints the table, and what draws the trials' curves."""
    if not (folder / "trials.jsonl").is_file():
        raise UserError(f"{folder} is not a sweep's folder: it has no trials.jsonl")
    trials = Trials(folder).rows
    if not trials:
        raise UserError(f"{folder}: no trial has been started yet")
    monitor, mode = monitored(folder, trials)
    trials = ranked(trials, mode)
    terminal.console().print(table(trials, varying(trials), monitor))
    print(terminal.visible(f"curves: python -m lmtrain.report {shlex.quote(str(folder))} --out sweep.html"))
    return errors.FINISHED


def monitored(folder: Path, trials: list[Trial]) -> tuple[str, str]:
    """checkpoint.monitor and checkpoint.mode of the trials."""
    for trial in trials:
        path = folder / str(trial.number) / "config.yaml"
        if path.is_file():
            checkpoint = rules.read(path).get("checkpoint", {})
            return checkpoint.get("monitor", "score"), checkpoint.get("mode", "min")
    return "score", "min"


def values_of(trial: Trial) -> dict[str, str]:
    return dict(word.split("=", 1) for word in (*trial.fixed, *trial.overrides) if "=" in word)


def varying(trials: list[Trial]) -> list[str]:
    """The keys that don't have one value in all trials, in the order they were written."""
    values = [values_of(trial) for trial in trials]
    keys = dict.fromkeys(key for trial in values for key in trial)
    return [key for key in keys if len({trial.get(key) for trial in values}) > 1]


def shown(text: str) -> str:
    """A value for the eye: four digits of a number."""
    try:
        return f"{float(text):.4g}"
    except ValueError:
        return text


def table(trials: list[Trial], keys: list[str], monitor: str) -> Any:
    made = Table(box=None)
    for name in ("trial", *keys, monitor, "status", "seconds", "error"):
        made.add_column(name, overflow="fold")
    for trial in trials:
        values = values_of(trial)
        score = "" if trial.score is None else f"{trial.score:.5g}"
        chosen = [shown(values.get(key, "")) for key in keys]
        cells = [str(trial.number), *chosen, score, trial.status, f"{trial.seconds:.0f}", last_line(trial)]
        made.add_row(*map(Text, cells))  # as Text: brackets in an error are not markup
    return made
