"""Builds a self-contained HTML page of one run or of several compared; all contents of runs are escaped.

The pages are Jinja templates beside this file: run.html, compared.html, pipeline.html, and parts.html for all of them.
"""

import itertools
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup

from lmtrain.data.chat.turns import is_exact
from lmtrain.errors import writing
from lmtrain.files import absolute
from lmtrain.reports.curves import FIRST, LEVELS, Curve, HeatMap, paths
from lmtrain.terminal import visible

_LONG = 3000  # maximum number of characters shown of a sample
_MOST, _LABEL = 4, 40  # keys in the label of a compared run, characters of each value
# Of keys that nobody typed, those that tell runs apart first.
_TELLING = ("model.name", "objective", "optimizer", "peft", "schedule", "data", "model", "trainer")
# Values of stroke-dasharray that are distinguishable in black and white; the first is solid.
DASHES = ("", "8 4", "2 3", "12 3 2 3", "5 2", "1 5", "14 5", "6 2 2 2 2 2")


@dataclass
class ShownSample:
    """A text of a model: the continuation of a prompt, or the answer to it. right: whether it is the reference."""

    step: int
    prompt: str
    text: str
    reference: str | None = None
    is_answer: bool = False
    notes: list[str] = field(default_factory=list)

    @property
    def right(self) -> bool | None:
        return None if self.reference is None or not self.is_answer else is_exact(self.text, self.reference)


@dataclass
class ReportedRun:
    """The contents of a run's page, as read from its folder.

    subtitle: status, step, objective, model and data. headline: up to three (number, description) for the top of the
    page. typed: (key, value, default) of command-line overrides. changed: (key, default, value) of all keys that differ
    from the defaults, whatever set them. samples: {heading: samples along the training}. evaluations: (name, {score:
    value}). history: lines about starts and stops. score: value of `monitor`, by which runs are ranked; lower is better
    unless `higher_is_better`. compared: what the score measures; runs are ranked among those with the same. lead: the
    charts shown first. clock: (step, tokens seen, minutes of training) of about 300 steps.
    """

    name: str
    facts: list[tuple[str, str]]
    changed: list[tuple[str, str, str]]
    charts: dict[str, list[Curve]]
    samples: dict[str, list[ShownSample]]
    evaluations: list[tuple[str, dict[str, float]]]
    checkpoints: list[tuple[str, str]]
    history: list[str]
    subtitle: str
    headline: list[tuple[str, str]]
    typed: list[tuple[str, str, str]]
    heat_maps: list[HeatMap]
    how_to_use: list[str]
    monitor: str
    score: float | None
    higher_is_better: bool
    compared: str
    lead: list[str]
    clock: list[tuple[int, int, float]]


def page(runs: Sequence[ReportedRun]) -> str:
    """Builds the whole document; several runs are shown best first, among those that can be compared."""
    runs, one = ranked(runs), len(runs) == 1
    curves = overlaid(runs)
    lead = [chart for chart in map(visible, runs[0].lead) if chart in curves] or list(curves)[:1]
    lead = lead if one else lead[:1]
    others = {chart: lines for chart, lines in curves.items() if chart not in lead}
    values = _one(runs[0]) if one else _several(runs)
    body = rendered("run.html" if one else "compared.html", curves=curves, lead=lead, others=others, **values)
    title = runs[0].name if one else f"{len(runs)} runs compared"
    clocks = {run.name: run.clock for run in runs}
    return document(title, body, curves, clocks)


def _one(run: ReportedRun) -> dict[str, Any]:
    scores = list(dict.fromkeys(name for _, found in run.evaluations for name in found))
    rows = [(name, *(f"{found[n]:.4f}" if n in found else "" for n in scores)) for name, found in run.evaluations]
    newest = [texts[-1] for texts in run.samples.values() if texts]
    newest = newest[:3] if newest and newest[0].is_answer else newest[:1]
    return {"run": run, "scores": scores, "evaluations": rows, "newest": newest}


def _several(runs: Sequence[ReportedRun]) -> dict[str, Any]:
    differences = _differences(runs)
    labels = _labels(runs, differences)
    outcomes = [
        (what, some[0].monitor, [_outcome(run, labels[run.name]) for run in some])
        for what, some in ((what, list(some)) for what, some in itertools.groupby(runs, key=lambda run: run.compared))
    ]
    prompts = {prompt: [(r.name, r.samples[prompt][-1]) for r in runs if r.samples.get(prompt)]
               for run in runs for prompt in run.samples}  # fmt: skip
    shared = [(prompt, texts) for prompt, texts in prompts.items() if len(texts) > 1][:4]
    return {"runs": runs, "labels": labels, "outcomes": outcomes, "shared": shared, "differences": differences,
            "names": [r.name for r in runs]}  # fmt: skip


def _outcome(run: ReportedRun, label: str) -> tuple[str, ...]:
    facts, score = dict(run.facts), "" if run.score is None else f"{run.score:.4f}"
    return (run.name, label, score, facts.get("step", ""), facts.get("status", ""), facts.get("tokens/s", ""))


def _differences(runs: Sequence[ReportedRun]) -> list[tuple[str, ...]]:
    """Returns (key, the value of each run) of the keys that differ."""
    defaults = {key: default for run in runs for key, default, _ in run.changed}
    values = [{key: value for key, _, value in run.changed} for run in runs]
    rows = [(key, *(v.get(key, defaults[key]) for v in values)) for key in sorted(defaults)]
    return [row for row in rows if len(set(row[1:])) > 1]


def _labels(runs: Sequence[ReportedRun], differences: list[tuple[str, ...]]) -> dict[str, str]:
    """Returns, by its name, what tells each run from the others: typed keys that differ, then values of recipes."""
    typed = {key for run in runs for key, _, _ in run.typed}
    chosen = [row for row in differences if typed & {row[0], row[0].removesuffix(".name")}][:_MOST]
    rest = sorted((row for row in differences if row not in chosen), key=_place)
    for row in rest:
        if len(chosen) < _MOST and _distinct([*chosen, row]) > _distinct(chosen):
            chosen.append(row)
    words = [
        ", ".join(f"{row[0].removesuffix('.name').rpartition('.')[2]}={_short(row[i])}" for row in chosen)
        for i in range(1, len(runs) + 1)
    ]
    return {run.name: label or "the same settings" for run, label in zip(runs, words, strict=True)}


def _place(row: tuple[str, ...]) -> int:
    return next((i for i, begins in enumerate(_TELLING) if row[0].startswith(begins)), len(_TELLING))


def _distinct(rows: list[tuple[str, ...]]) -> int:
    """Returns how many runs differ in these rows of (key, the value of each run)."""
    return len(set(zip(*(row[1:] for row in rows), strict=True))) if rows else 1


def _short(value: str) -> str:
    """Shortens a path to its last part, and a value that is too long for a label."""
    value = value.rpartition("/")[2] or value
    return value if len(value) <= _LABEL else f"{value[:_LABEL]}..."


def document(
    title: str, body: str, curves: Any = None, clocks: dict[str, list[tuple[int, int, float]]] | None = None
) -> str:
    """Builds a complete HTML document around `body`, which is markup.

    Args:
        curves: the data of the charts in it, which a script draws, by each run's clock; None: there are none.
    """
    return rendered("page.html", title=title, body=Markup(body), curves=curves, clocks=clocks or {})


def write_page(page: str, path: str) -> Path:
    """Writes a page of lmtrain inspect and returns its absolute path; UserError if that fails."""
    file = absolute(path)
    with writing(f"inspect.html={path}"):
        file.write_text(page, encoding="utf-8")
    return file


def asset(name: str) -> Markup:
    """Reads a style sheet or script from the folder of this module."""
    return Markup(Path(__file__).with_name(name).read_text(encoding="utf-8"))


def broken(text: str) -> str:
    """Escapes text for HTML; allows line breaks only after separators (such as / and _) that precede a letter."""
    return Markup("<wbr>").join(map(visible, re.split(r"(?<=[/_.=,:-])(?=[^\W\d])", text)))


def ranked(runs: Sequence[ReportedRun]) -> list[ReportedRun]:
    """Sorts runs by what is compared, then by score, best first; runs without a score come last."""

    def place(run: ReportedRun) -> tuple[str, bool, float, str]:
        score = run.score or 0.0
        return run.compared, run.score is None, -score if run.higher_is_better else score, run.name

    return sorted(runs, key=place)


def overlaid(runs: Sequence[ReportedRun]) -> dict[str, list[dict[str, Any]]]:
    """Returns {chart: its lines} for the page's script; with several runs, each run has one colour and one stroke.

    Beside a validation's line, that of the training is pale. The script finds a chart's lines by its name in the page,
    where control characters are visible.
    """
    found: dict[str, list[dict[str, Any]]] = {}
    for number, run in enumerate(runs):
        for chart, lines in run.charts.items():
            for i, curve in enumerate(lines):
                name, n = (curve.name, i) if len(runs) == 1 else (f"{run.name}: {curve.name}", number)
                line = {**line_of(curve, visible(name), n), "run": run.name}
                line["pale"] = len(runs) > 1 and not line["val"] and any(c.name.startswith("val/") for c in lines)
                found.setdefault(visible(chart), []).append(line)
    return found


def line_of(curve: Curve, name: str, number: int) -> dict[str, Any]:
    """Returns the data of a chart's line; lines of validation metrics are drawn thick with dots (`val`)."""
    return {
        "name": name,
        "x": curve.x,
        "y": [float(f"{value:.6g}") for value in curve.y],
        "colour": number % 8,
        "dash": DASHES[number % len(DASHES)],
        "val": curve.name.startswith("val/"),
    }


def _plain(value: Any) -> Any:
    """Makes control characters of a run's texts visible; markup that the templates made stays."""
    return visible(value) if isinstance(value, str) and not isinstance(value, Markup) else value


_PAGES = jinja2.Environment(
    loader=jinja2.FileSystemLoader(Path(__file__).parent), autoescape=True, trim_blocks=True, lstrip_blocks=True,
    undefined=jinja2.StrictUndefined, finalize=_plain,
)  # fmt: skip
_PAGES.filters |= {
    "broken": broken,
    "cut": lambda text: text if len(text) <= _LONG else f"{text[:_LONG]} ... ({len(text) - _LONG:,} more characters)",
    "sparse": lambda text: re.sub(r"\n\s*\n", "\n\n", text),  # models that have learned little write many empty lines
    "by_run": lambda lines: [(name, list(some)) for name, some in itertools.groupby(lines, key=lambda one: one["run"])],
    "paths": paths,
    "visible": visible,
    "title": lambda chart: FIRST.get(chart, (chart, ""))[0],
    "axis": lambda chart: FIRST.get(chart.rpartition(": ")[2], ("", chart.rpartition("/")[2]))[1],
}
_PAGES.globals |= {"levels": LEVELS, "asset": asset}
_PAGES.policies["json.dumps_kwargs"] = {"separators": (",", ":")}


def rendered(template: str, **values: Any) -> str:
    return _PAGES.get_template(template).render(**values)
