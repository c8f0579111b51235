"""Reads a run's folder for its HTML page; of a run that is still written, what is there. Imports no torch."""

import functools
import json
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import yaml

from lmtrain import errors, terminal
from lmtrain.config import compose as rules
from lmtrain.errors import UserError
from lmtrain.files import read_jsonl, read_regular, write_atomic
from lmtrain.reports import listing, report_page
from lmtrain.reports.curves import charts, heat_maps
from lmtrain.reports.report_page import Told
from lmtrain.run_folder.folder import RunDir
from lmtrain.secrets import shown_in

_PROMPTS, _STEPS = 12, 15  # samples shown: so many prompts, and of each so many steps spread over the training
# Keys that say where things lie or what other commands do, not what was trained.
_NOT_SHOWN = ("run_dir", "run.", "hydra.", "generate.", "evaluate.", "estimate.", "inspect.", "report.", "chat.",
              "sweep.", "data.cache_dir", "debug.")  # fmt: skip


def report(folders: list[Path], out: Path | None) -> int:
    """Writes <run>/report.html, or report.html where several are compared."""
    runs: list[RunDir] = []
    for folder in folders:
        found = [RunDir(run.path) for run in listing.runs_under(folder)]
        if not found:
            raise UserError(f"{folder} holds no run (a folder with config.yaml)")
        runs += found
    default = runs[0].report if len(runs) == 1 else Path("report.html").absolute()
    print(terminal.visible(f"written: {write(runs, out or default)}"))
    return errors.FINISHED


def write_own(run: RunDir) -> Path:
    """<run>/report.html, once summary.json says how the run ended (its lock is still held)."""
    write_atomic(run.report, report_page.page([told(run, ended=True)]))
    return run.report


def write(runs: list[RunDir], file: Path) -> Path:
    """A page of one run or several; RunError where it can't be written."""
    names = {run.path: run.path.name for run in runs}
    if len(set(names.values())) < len(names):  # runs of several sweeps: 0, 1, ... in each
        names = {path: str(Path(*path.parts[-2:])) for path in names}
    write_atomic(file, report_page.page([told(run, names[run.path]) for run in runs]))
    return file


def told(run: RunDir, name: str | None = None, ended: bool = False) -> Told:
    """What the folder tells; UserError where it is not a run's, or a file in it can't be read."""
    if not run.config.exists():
        raise UserError(f"{run.path} is not a run: it has no config.yaml")
    try:
        return _told(run, name or run.path.name, ended)
    except (ArithmeticError, AttributeError, LookupError, OSError, TypeError, ValueError) as error:
        raise UserError(
            f"a file in {run.path} is not in the format that runs write ({error!r}): fix it or move it away"
        ) from None


def _told(run: RunDir, name: str, ended: bool) -> Told:
    config, listed = shown_in(rules.read(run.config)), listing.read(run, ended)
    rows, summary = list(read_jsonl(run.metrics)), _summary(run)
    return Told(
        name=name,
        subtitle=_subtitle(config, listed),
        headline=_headline(listed, summary, rows),
        facts=_facts(summary),
        changed=_changed(config),
        charts=charts(rows),
        heat_maps=heat_maps(rows),
        samples=_samples(run),
        evaluations=_evaluations(run),
        history=_history(run),
        outcome={"status": listed.status, "step": listed.steps(), "best": listed.best,
                 "tokens/s": _number(summary.get("tokens_per_s"))},
        score=None if listed.best_at is None else listed.best_at[1],
        higher_is_better=listed.mode == "max",
    )  # fmt: skip


def _summary(run: RunDir) -> dict[str, Any]:
    try:
        return dict(shown_in(run.read_summary() or {}))
    except UserError:
        return {}


def _facts(summary: dict[str, Any]) -> list[tuple[str, str]]:
    found = {"devices": summary.get("device"), "precision": summary.get("precision"),
             "lmtrain": summary.get("versions", {}).get("lmtrain"), "error": summary.get("error")}  # fmt: skip
    return [(name, str(value)) for name, value in found.items() if value]


def _subtitle(config: dict[str, Any], listed: listing.Listed) -> str:
    model, data = config.get("model", {}), config.get("data", {})
    what = config.get("objective", {}).get("name")
    named = model.get("name_or_path") or model.get("name")
    on = data.get("path") or data.get("name") or data.get("source")
    return f"{listed.status.replace('_', ' ')} at step {listed.steps()}: {what}, {named} on {on}"


def _headline(listed: listing.Listed, summary: dict[str, Any], rows: list[dict[str, Any]]) -> list[tuple[str, str]]:
    """The score, the tokens and the time, as far as the folder tells them."""
    found = []
    trained = [row["train/loss"] for row in rows if isinstance(row.get("train/loss"), int | float)]
    if listed.best_at is not None:
        step, score = listed.best_at
        found.append((f"{score:.4g}", f"best {listed.monitor}, step {step:,}"))
    elif trained:
        found.append((f"{trained[-1]:.4g}", f"train/loss at step {listed.step:,}"))
    tokens = rows[-1].get("tokens_seen") if rows else None
    if isinstance(tokens, int | float):
        found.append((f"{tokens:,}", f"tokens trained in {listed.step:,} steps"))
    seconds = summary.get("wall_seconds")
    if isinstance(seconds, int | float):
        speed = summary.get("tokens_per_s")
        found.append((duration(seconds), f"at {_number(speed)} tokens/s" if speed else "wall time"))
    return found


def duration(seconds: float) -> str:
    """75 -> '0:01:15'."""
    return str(timedelta(seconds=round(seconds)))


def _number(value: Any) -> str:
    return f"{value:,.0f}" if isinstance(value, int | float) and value >= 100 else f"{value:.3g}" if value else ""


@functools.cache
def _defaults() -> dict[str, Any]:
    return dict(_leaves(yaml.safe_load(rules.to_yaml(rules.compose([])))))


def _leaves(tree: dict[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    found: list[tuple[str, Any]] = []
    for key, value in tree.items():
        name = f"{prefix}{key}"
        found += _leaves(value, f"{name}.") if isinstance(value, dict) and value else [(name, value)]
    return found


def _changed(config: dict[str, Any]) -> list[tuple[str, str, str]]:
    """(key, default, value) where the run's config is not what a bare `lmtrain.train` would have."""
    defaults = _defaults()
    pairs = [(key, defaults.get(key), value) for key, value in _leaves(config) if not key.startswith(_NOT_SHOWN)]
    return [(key, _words(default), _words(value)) for key, default, value in pairs if default != value]


def _words(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)


def _samples(run: RunDir) -> dict[str, list[tuple[int, str, str | None]]]:
    found: dict[str, list[tuple[int, str, str | None]]] = {}
    for row in read_jsonl(run.samples):
        prompt, step = str(row.get("prompt", "")), listing.whole(row.get("step"))
        if step is None:
            continue  # no sample of ours
        text = str(row.get("text", ""))
        if "reward" in row:  # of a rollout, whose prompts are others at each step
            prompt, text = f"{row.get('which')} completion of a rollout", f"{prompt}{text}\n(reward {row['reward']})"
        if prompt in found or len(found) < _PROMPTS:
            found.setdefault(prompt, []).append((step, text, row.get("reference")))
    return {prompt: _spread(texts) for prompt, texts in found.items()}


def _spread(texts: list[Any]) -> list[Any]:
    """The first, the last, and evenly what is between."""
    if len(texts) <= _STEPS:
        return texts
    return [texts[i * (len(texts) - 1) // (_STEPS - 1)] for i in range(_STEPS)]


def _evaluations(run: RunDir) -> list[tuple[str, dict[str, float]]]:
    found = []
    for file in sorted((run.path / "evaluations").glob("*.json")):
        try:
            scores = json.loads(read_regular(file))["scores"]
            found.append((file.stem, {str(k): float(v) for k, v in scores.items()}))
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            continue  # no evaluation of ours
    return found


def _history(run: RunDir) -> list[str]:
    """When training began and went on."""
    lines = []
    for i, row in enumerate(read_jsonl(run.starts)):
        try:
            moment = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(float(row["time"])))
        except (KeyError, TypeError, ValueError, OverflowError, OSError):
            continue  # no start of ours
        began, step = "restarted" if i else "began", listing.whole(row.get("step"))
        lines.append(f"{moment}: resumed from step {step:,}" if step else f"{moment}: {began}")
    return lines
