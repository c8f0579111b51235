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
class Told:
    """The contents of a run's page, as read from its folder.

    subtitle: status, step, objective, model and data. headline: up to three (number, description) for the top of the
    page. typed: (key, value, default) of command-line overrides. changed: (key, default, value) of all keys that differ
    from the defaults, whatever set them. samples: {heading: samples along the training}. evaluations: (name, {score:
    value}). history: lines about starts and stops. score: value by which runs are ranked; lower is better unless
    `higher_is_better`. compared: what the score measures; runs are ranked among those with the same. lead: the
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
    score: float | None
    higher_is_better: bool
    compared: str
    lead: list[str]
    clock: list[tuple[int, int, float]]


def page(runs: Sequence[Told]) -> str:
    """Builds the whole document; several runs are shown best first, among those that can be compared."""
    runs, one = ranked(runs), len(runs) == 1
    names = _names(runs)
    curves = overlaid(runs, names)
    lead = [chart for chart in map(visible, runs[0].lead) if chart in curves][: None if one else 1]
    others = {chart: lines for chart, lines in curves.items() if chart not in lead}
    values = _one(runs, names) if one else _several(runs, names)
    body = rendered("run.html" if one else "compared.html", curves=curves, lead=lead, others=others, **values)
    title = runs[0].name if one else f"{len(runs)} runs compared"
    clocks = {name: run.clock for name, run in zip(names, runs, strict=True)}
    return document(title, "report.css", body, curves, clocks)


def _one(runs: Sequence[Told], names: list[str]) -> dict[str, Any]:
    run = runs[0]
    scores = list(dict.fromkeys(name for _, found in run.evaluations for name in found))
    rows = [(name, *(f"{found[n]:.4f}" if n in found else "" for n in scores)) for name, found in run.evaluations]
    newest = [texts[-1] for texts in run.samples.values() if texts]
    newest = newest[:3] if newest and newest[0].is_answer else newest[:1]
    return {"run": run, "scores": scores, "evaluations": rows, "newest": newest}


def _several(runs: Sequence[Told], names: list[str]) -> dict[str, Any]:
    label, facts = dict(zip(map(id, runs), names, strict=True)), ("status", "step", "best", "tokens/s")
    outcomes = [
        (what, [(r.name, label[id(r)], *(dict(r.facts).get(f, "") for f in facts)) for r in some])
        for what, some in itertools.groupby(runs, key=lambda run: run.compared)
    ]
    prompts = {prompt: [(label[id(r)], r.samples[prompt][-1]) for r in runs if r.samples.get(prompt)]
               for run in runs for prompt in run.samples}  # fmt: skip
    shared = [(prompt, texts) for prompt, texts in prompts.items() if len(texts) > 1][:4]
    return {"runs": runs, "outcomes": outcomes, "shared": shared, "differences": _differences(runs),
            "names": [r.name for r in runs]}  # fmt: skip


def _differences(runs: Sequence[Told]) -> list[tuple[str, ...]]:
    """Returns (key, the value of each run) of the keys that differ."""
    defaults = {key: default for run in runs for key, default, _ in run.changed}
    values = [{key: value for key, _, value in run.changed} for run in runs]
    rows = [(key, *(v.get(key, defaults[key]) for v in values)) for key in sorted(defaults)]
    return [row for row in rows if len(set(row[1:])) > 1]


def _names(runs: Sequence[Told]) -> list[str]:
    """Returns what the curves of each run are called: what was typed and differs, if that tells them apart."""
    typed = {key for run in runs for key, _, _ in run.typed}
    rows = [row for row in _differences(runs) if row[0] in typed]
    names = [", ".join(f"{row[0].rpartition('.')[2]}={row[i + 1]}" for row in rows) for i in range(len(runs))]
    tells = 0 < len(rows) <= 3 and len(set(names)) == len(names)
    return names if tells else [run.name for run in runs]


def document(
    title: str, style: str, body: str, curves: Any = None, clocks: dict[str, list[tuple[int, int, float]]] | None = None
) -> str:
    """Builds a complete HTML document around `body`, markup, with the style sheet `style` of this folder.

    Args:
        curves: the data of the charts in it, which a script draws, by each run's clock; None: there are none.
    """
    return rendered("page.html", title=title, style=style, body=Markup(body), curves=curves, clocks=clocks or {})


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


def ranked(runs: Sequence[Told]) -> list[Told]:
    """Sorts runs by what is compared, then by score, best first; runs without a score come last."""

    def place(run: Told) -> tuple[str, bool, float, str]:
        score = run.score or 0.0
        return run.compared, run.score is None, -score if run.higher_is_better else score, run.name

    return sorted(runs, key=place)


def overlaid(runs: Sequence[Told], names: list[str]) -> dict[str, list[dict[str, Any]]]:
    """Returns {chart: its lines} for the page's script; with several runs, each run has one colour and one stroke.

    The script finds a chart's lines by its name in the page, where control characters are visible.
    """
    found: dict[str, list[dict[str, Any]]] = {}
    for number, (run, label) in enumerate(zip(runs, names, strict=True)):
        for chart, lines in run.charts.items():
            for i, curve in enumerate(lines):
                name, n = (curve.name, i) if len(runs) == 1 else (f"{label}: {curve.name}", number)
                found.setdefault(visible(chart), []).append({**line_of(curve, visible(name), n), "run": label})
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
    "paths": paths,
    "visible": visible,
    "title": lambda chart: FIRST.get(chart, (chart, ""))[0],
    "axis": lambda chart: FIRST.get(chart.rpartition(": ")[2], ("", chart.rpartition("/")[2]))[1],
}
_PAGES.globals |= {"levels": LEVELS, "asset": asset}
_PAGES.policies["json.dumps_kwargs"] = {"separators": (",", ":")}


def rendered(template: str, **values: Any) -> str:
    return _PAGES.get_template(template).render(**values)
