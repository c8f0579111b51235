"""A run, or several compared, as one HTML page without a network. What a run holds is text here, never markup."""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from html import escape
from importlib.resources import files
from pathlib import Path
from typing import Any

from lmtrain.errors import UserError, reason
from lmtrain.reports import curves
from lmtrain.reports.curves import FIRST, Curve, HeatMap, thinned
from lmtrain.terminal import visible

_WIDE, _HIGH, _STATIC = 600, 260, 200  # of a chart drawn without JavaScript: its size, points of a curve
_LONG = 3000  # characters of a sample that are shown


@dataclass
class Told:
    """What a run's folder tells.

    facts: (name, value) for the top of the page. changed: (key, its default, the run's). samples: {prompt: [(step,
    text, reference)]}. evaluations: (name, {score: value}). history: lines about starts and stops. score: what runs are
    ranked by, its name with it; lower is better unless `higher_is_better`.
    """

    name: str
    facts: list[tuple[str, str]]
    changed: list[tuple[str, str, str]]
    charts: dict[str, list[Curve]]
    samples: dict[str, list[tuple[int, str, str | None]]]
    evaluations: list[tuple[str, dict[str, float]]]
    checkpoints: list[tuple[str, str]]
    history: list[str]
    heat_maps: list[HeatMap] = field(default_factory=list)
    how_to_use: list[str] = field(default_factory=list)
    outcome: dict[str, str] = field(default_factory=dict)
    score: float | None = None
    higher_is_better: bool = False


def page(runs: Sequence[Told]) -> str:
    """The whole document; several runs are shown best first."""
    runs = ranked(runs)
    title = runs[0].name if len(runs) == 1 else f"{len(runs)} runs"
    curves = overlaid(runs)
    body = [f"<h1>{as_text(title)}</h1>", *(_one(runs[0]) if len(runs) == 1 else _several(runs))]
    body.insert(3 if len(runs) == 1 else 2, _charts(curves))
    data = json.dumps(curves, separators=(",", ":")).replace("<", "\\u003c")
    body.append(f'<script type="application/json" id="curves">{data}</script>\n<script>{asset("report.js")}</script>')
    return document(title, asset("report.css"), body)


def document(title: str, style: str, body: Iterable[str]) -> str:
    """A whole HTML document; `body` is markup, a block a line."""
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{as_text(title)}</title><style>{style}</style></head>\n<body>\n"
        + "\n".join(body)
        + "\n</body></html>\n"
    )


def write_page(page: str, path: str) -> Path:
    """Writes a page of lmtrain inspect; returns its absolute path. UserError where it can't be written."""
    file = Path(path).expanduser().absolute()
    try:
        file.write_text(page, encoding="utf-8")
    except OSError as error:
        raise UserError(f"inspect.html={path} can't be written: {reason(error)}") from None
    return file


def asset(name: str) -> str:
    """A style sheet or a script that stands beside this file."""
    return (files("lmtrain.reports") / name).read_text(encoding="utf-8")


def as_text(text: str) -> str:
    """Escaped: what a run holds is no markup."""
    return escape(visible(text))


def ranked(runs: Sequence[Told]) -> list[Told]:
    """Best score first, those without one last."""
    sign = -1.0 if runs[0].higher_is_better else 1.0
    return sorted(runs, key=lambda run: (run.score is None, sign * (run.score or 0.0)))


def overlaid(runs: Sequence[Told]) -> dict[str, list[dict[str, Any]]]:
    """{chart: its lines} for the page's script; of several runs each has one colour."""
    found: dict[str, list[dict[str, Any]]] = {}
    for number, run in enumerate(runs):
        for chart, lines in run.charts.items():
            for i, curve in enumerate(lines):
                alone = len(runs) == 1
                line = {
                    "name": curve.name if alone else f"{run.name}: {curve.name}",
                    "x": curve.x,
                    "y": [float(f"{value:.6g}") for value in curve.y],
                    "colour": (i if alone else number) % 8,
                    "dashed": not alone and curve.name.startswith("val/"),
                }
                found.setdefault(chart, []).append(line)
    return found


def _one(run: Told) -> list[str]:
    facts = "".join(f"<div><b>{as_text(value)}</b><span>{as_text(name)}</span></div>" for name, value in run.facts)
    parts = [f'<div class="facts">{facts}</div>', "<h2>Curves</h2>"]
    for heat in run.heat_maps:
        parts += [f"<h2>{as_text(heat.title)}, chosen over time</h2>", curves.drawn(heat), f"<p>{_legend(heat)}</p>"]
    if run.evaluations:
        parts += ["<h2>Evaluations</h2>", _evaluations(run)]
    if run.samples:
        parts += ["<h2>Samples along the training</h2>", *_samples(run)]
    parts.append("<h2>What was set</h2>")
    parts.append(
        table(("key", "default", "this run"), run.changed) if run.changed else "<p>Every key has its default.</p>"
    )
    if run.history:
        parts += ["<h2>Starts and stops</h2>", _list(run.history)]
    if run.checkpoints:
        parts += ["<h2>Checkpoints</h2>", table(("checkpoint", "size"), run.checkpoints)]
    if run.how_to_use:
        parts += ["<h2>How to use it</h2>", *(f"<pre>{as_text(words)}</pre>" for words in run.how_to_use)]
    return parts


def _legend(heat: HeatMap) -> str:
    choices = len(heat.cells[0])
    return (
        f'<span class="soft">steps {heat.first:,} to {heat.last:,}, {choices} downwards from the first; the darker, '
        f"the more tokens choose it: empty below {curves.LEVELS[0]:g} of the even share (1/{choices}), darkest from "
        f"{curves.LEVELS[-1]:g} times it</span>"
    )


def _several(runs: Sequence[Told]) -> list[str]:
    names = list(dict.fromkeys(name for run in runs for name in run.outcome))
    outcome = [(run.name, *(run.outcome.get(name, "") for name in names)) for run in runs]
    parts = ["<h2>Outcome, best first</h2>" + table(("run", *names), outcome)]
    defaults = {key: default for run in runs for key, default, _ in run.changed}
    values = [{key: value for key, _, value in run.changed} for run in runs]
    keys = [k for k in sorted(defaults) if len({v.get(k, defaults[k]) for v in values}) > 1]
    rows = [(key, *(v.get(key, defaults[key]) for v in values)) for key in keys]
    heading = "<h2>Where their configs differ</h2>"
    parts.append(heading + (table(("key", *(r.name for r in runs)), rows) if rows else "<p>Nowhere.</p>"))
    return parts


def _charts(curves: dict[str, list[dict[str, Any]]]) -> str:
    smoothing = '<label>smoothing <input id="smoothing" type="range" min="0" max="0.98" step="0.02" value="0"></label>'
    help_ = '<span class="soft">drag to zoom, double click for all</span>'
    drawn = "".join(_figure(name, lines) for name, lines in curves.items())
    return f'<p>{smoothing}{help_}</p><div class="charts">{drawn}</div>'


def _figure(chart: str, lines: list[dict[str, Any]]) -> str:
    legend = "".join(f'<i style="color:var(--c{line["colour"]})">{as_text(line["name"])}</i>' for line in lines)
    label = f'role="img" aria-label="{as_text(chart)} by step"'
    return (
        f'<figure data-chart="{escape(chart)}"><figcaption>{as_text(FIRST.get(chart, chart))} {legend}</figcaption>'
        f'<svg viewBox="0 0 {_WIDE} {_HIGH}" {label}>{_paths(lines)}</svg>'
        '<div class="tip"></div></figure>'
    )


def _paths(lines: list[dict[str, Any]]) -> str:
    """The curves as they are drawn where JavaScript is off."""
    xs, ys = ([v for line in lines for v in line[axis]] for axis in "xy")
    left, bottom = min(xs), min(ys)
    wide, high = (max(xs) - left) or 1, (max(ys) - bottom) or 1.0
    found = []
    for line in lines:
        few = thinned(Curve("", line["x"], line["y"]), _STATIC)
        points = (
            f"{60 + (x - left) / wide * (_WIDE - 82):.1f} {_HIGH - 24 - (y - bottom) / high * (_HIGH - 34):.1f}"
            for x, y in zip(few.x, few.y, strict=True)
        )
        found.append(f'<path d="M{"L".join(points)}" stroke="var(--c{line["colour"]})"/>')
    return "".join(found)


def _samples(run: Told) -> Iterable[str]:
    for prompt, texts in run.samples.items():
        yield f"<h3>{as_text(_cut(prompt))}</h3>"
        for i, (step, text, reference) in enumerate(reversed(texts)):
            given = (
                f'<pre class="soft">{as_text("reference: " + _cut(reference))}</pre>' if reference is not None else ""
            )
            opened = " open" if i == 0 else ""
            yield f"<details{opened}><summary>step {step:,}</summary><pre>{as_text(_cut(text))}</pre>{given}</details>"


def _evaluations(run: Told) -> str:
    names = list(dict.fromkeys(name for _, scores in run.evaluations for name in scores))
    rows = [(name, *(f"{scores[n]:.4f}" if n in scores else "" for n in names)) for name, scores in run.evaluations]
    return table(("evaluation", *names), rows)


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    head = "".join(f"<th>{as_text(name)}</th>" for name in header)
    body = "".join("<tr>" + "".join(f"<td>{as_text(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f'<div class="scroll"><table><tr>{head}</tr>{body}</table></div>'


def _list(lines: Iterable[str]) -> str:
    return "<ul>" + "".join(f"<li>{as_text(line)}</li>" for line in lines) + "</ul>"


def _cut(text: str) -> str:
    return text if len(text) <= _LONG else f"{text[:_LONG]} ... ({len(text) - _LONG:,} more characters)"
