"""The report of `lmtrain sweep_report`: a table of a sweep's trials, best first, and a plot of their scores."""

import json
import re
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from rich.table import Table
from rich.text import Text

from lmtrain import errors, terminal
from lmtrain.config import compose as rules
from lmtrain.errors import UserError
from lmtrain.files import read_jsonl
from lmtrain.reports.report import what_is_compared
from lmtrain.sweeps.trials import Trial, Trials, last_line, ranked

_LOG_FROM = 10.0  # a key whose largest value is this many times the smallest is drawn on a logarithmic axis
DRAWN = 24  # most keys that are plotted, each in its own chart


def report(folder: Path) -> int:
    """Prints the table of trials and writes <folder>/sweep.png; returns the exit code."""
    if not (folder / "trials.jsonl").is_file():
        raise UserError(f"{folder} is not a sweep's folder: it has no trials.jsonl")
    trials = Trials(folder).rows
    if not trials:
        raise UserError(f"{folder}: no trial has been started yet")
    keys, kinds = varying(trials), measured(folder, trials)
    for kind in kinds:
        if len(kinds) > 1:
            print(terminal.visible(kind.compared))
        terminal.console().print(table(kind.trials, keys, kind.monitor))
    if find_spec("matplotlib") is None:
        print('no picture: it needs matplotlib: pip install "lmtrain[plots]"')
    elif len(kinds) > 1:
        print("no picture: the scores of these trials measure different things, each with a table of its own")
    elif not any(t.score is not None for t in trials):
        print("no picture: no trial has a score")
    else:
        if len(keys) > DRAWN:
            print(f"the picture shows the first {DRAWN} of {len(keys):,} keys")
        print(terminal.visible(f"written: {draw(folder, kinds[0].trials, keys[:DRAWN], kinds[0].monitor)}"))
    return errors.FINISHED


class Comparable(NamedTuple):
    """Trials whose scores measure the same, best first."""

    compared: str  # what that is, in words
    monitor: str  # checkpoint.monitor
    trials: list[Trial]


def measured(folder: Path, trials: list[Trial]) -> list[Comparable]:
    """Returns trials by what their scores measure; those that have no config.yaml come last, with the first kind."""
    found: dict[tuple[str, str, str], list[Trial]] = {}
    unknown = []
    for trial in trials:
        path = folder / str(trial.number) / "config.yaml"
        if not path.is_file():
            unknown.append(trial)
            continue
        config = rules.read(path)
        monitor, mode = (config.get("checkpoint", {}).get(*key) for key in (("monitor", "score"), ("mode", "min")))
        found.setdefault((what_is_compared(config, monitor, mode == "max"), monitor, mode), []).append(trial)
    found.setdefault(next(iter(found), ("", "score", "min")), []).extend(unknown)
    return [Comparable(said, monitor, ranked(these, mode)) for (said, monitor, mode), these in found.items()]


def values_of(trial: Trial) -> dict[str, str]:
    return dict(word.split("=", 1) for word in (*trial.fixed, *trial.overrides) if "=" in word)


def varying(trials: list[Trial]) -> list[str]:
    """Returns the keys whose values differ between trials, in the order they were written."""
    values = [values_of(trial) for trial in trials]
    keys = dict.fromkeys(key for trial in values for key in trial)
    return [key for key in keys if len({trial.get(key) for trial in values}) > 1]


def shown(text: str) -> str:
    """Formats a value for display: numbers with four significant digits, but whole ones, such as a seed, as typed."""
    number = _number(text)
    return text if number is None or re.fullmatch(r"[+-]?\d+", text) else f"{number:.4g}"


def _number(text: str) -> float | None:
    return float(text) if re.fullmatch(r"[+-]?(\d+\.?\d*|\.\d+)(e[+-]?\d+)?", text, re.IGNORECASE) else None


def table(trials: list[Trial], keys: list[str], monitor: str) -> Table:
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


def draw(folder: Path, trials: list[Trial], keys: list[str], monitor: str) -> Path:
    """Plots the score against each key, and over the steps of every trial, with the best trial in colour."""
    from matplotlib.figure import Figure

    scored = [t for t in trials if t.score is not None]
    figure = Figure(figsize=(4.2 * (len(keys) + 1), 3.6))
    axes = figure.subplots(1, len(keys) + 1, squeeze=False)
    for axis, key in zip(axes[0], keys, strict=False):
        _against(axis, key, scored)
        axis.set(xlabel=key, ylabel=monitor)
    last = axes[0][-1]
    for trial in reversed(scored):  # the best on top
        steps, values = curve(folder / str(trial.number), monitor)
        best = trial is scored[0]
        style = {"color": "tab:red", "label": f"trial {trial.number}"} if best else {"color": "0.8"}
        last.plot(steps, values, marker="." if len(steps) < 30 else "", **style)
    last.set(xlabel="step", ylabel=monitor)
    last.legend()
    figure.tight_layout()
    path = folder / "sweep.png"
    figure.savefig(path, dpi=120)
    return path


def _against(axis: Any, key: str, scored: list[Trial]) -> None:
    """Plots the scores against the values of one key, with the best trial, the first of `scored`, in red."""
    texts = [values_of(t).get(key, "default") for t in scored]
    numbers = [_number(text) for text in texts]
    places: list[Any] = numbers
    if any(n is None for n in numbers):
        options = list(dict.fromkeys(texts))
        places = [options.index(text) for text in texts]
        axis.set_xticks(range(len(options)), options, rotation=20, fontsize="small")
    elif min(places) > 0 and max(places) / min(places) >= _LOG_FROM:
        axis.set_xscale("log")
    colours = ["tab:red", *["tab:blue"] * (len(scored) - 1)]
    axis.scatter(places, [t.score for t in scored], c=colours)


def curve(run: Path, monitor: str) -> tuple[list[int], list[float]]:
    """Returns the steps at which a run measured `monitor`, and the measured values."""
    found = read_jsonl(run / "metrics.jsonl", json.dumps(monitor).encode())
    rows = [row for row in found if row.get(monitor) is not None]
    return [row["step"] for row in rows], [row[monitor] for row in rows]
