"""Builds a self-contained HTML page of one run or of several compared; all contents of runs are escaped."""

import itertools
import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape
from importlib.resources import files
from pathlib import Path
from typing import Any

from lmtrain.errors import UserError, reason
from lmtrain.reports import curves
from lmtrain.reports.curves import FIRST, Curve, HeatMap, thinned
from lmtrain.terminal import visible

_WIDE, _HIGH, _STATIC = 600, 260, 200  # of a chart drawn without JavaScript: width, height, points per curve
_LEFT, _RIGHT, _TOP, _BOTTOM = 70, 22, 10, 42  # its margins, as in report.js
_LONG = 3000  # maximum number of characters shown of a sample
# Values of stroke-dasharray that are distinguishable in black and white; the first is solid.
DASHES = ("", "8 4", "2 3", "12 3 2 3", "5 2", "1 5", "14 5", "6 2 2 2 2 2")


@dataclass
class Told:
    """The contents of a run's page, as read from its folder.

    subtitle: status, step, objective, model and data. headline: up to three (number, description) for the top of the
    page. typed: (key, value, default) of command-line overrides. changed: (key, default, value) of all keys that differ
    from the defaults, whatever set them. samples: {prompt: [(step, text, reference)]}. evaluations: (name, {score:
    value}). history: lines about starts and stops. score: value by which runs are ranked; lower is better unless
    `higher_is_better`. compared: what the score measures; runs are ranked among those with the same. lead: the
    chart shown first.
    """

    name: str
    facts: list[tuple[str, str]]
    changed: list[tuple[str, str, str]]
    charts: dict[str, list[Curve]]
    samples: dict[str, list[tuple[int, str, str | None]]]
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
    lead: str


def page(runs: Sequence[Told]) -> str:
    """Builds the whole document; several runs are shown best first, among those that can be compared."""
    runs = ranked(runs)
    title = runs[0].name if len(runs) == 1 else f"{len(runs)} runs compared"
    curves = overlaid(runs)
    shown = _one(runs[0], curves) if len(runs) == 1 else _several(runs, curves)
    return document(title, asset("report.css"), [f"<h1>{broken(title)}</h1>", *shown, script(curves)])


def script(curves: dict[str, list[dict[str, Any]]]) -> str:
    """Returns the script that redraws the page's charts when the reader zooms or smooths, with the curves' data."""
    data = json.dumps(curves, separators=(",", ":")).replace("<", "\\u003c")
    return f'<script type="application/json" id="curves">{data}</script>\n<script>{asset("report.js")}</script>'


def document(title: str, style: str, body: Iterable[str]) -> str:
    """Builds a complete HTML document; `body` holds blocks of markup, one per line."""
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{as_text(title)}</title><style>{style}</style></head>\n<body>\n"
        + "\n".join(body)
        + "\n</body></html>\n"
    )


def write_page(page: str, path: str) -> Path:
    """Writes a page of lmtrain inspect and returns its absolute path; UserError if that fails."""
    file = Path(path).expanduser().absolute()
    try:
        file.write_text(page, encoding="utf-8")
    except OSError as error:
        raise UserError(f"inspect.html={path} can't be written: {reason(error)}") from None
    return file


def asset(name: str) -> str:
    """Reads a style sheet or script from the folder of this module."""
    return (files("lmtrain.reports") / name).read_text(encoding="utf-8")


def as_text(text: str) -> str:
    """Escapes text for HTML, as the contents of a run are not markup."""
    return escape(visible(text))


def broken(text: str) -> str:
    """Escapes text for HTML; allows line breaks only after separators (such as / and _) that precede a letter."""
    return "<wbr>".join(map(as_text, re.split(r"(?<=[/_.=,:-])(?=[^\W\d])", text)))


def ranked(runs: Sequence[Told]) -> list[Told]:
    """Sorts runs by what is compared, then by score, best first; runs without a score come last."""

    def place(run: Told) -> tuple[str, bool, float, str]:
        score = run.score or 0.0
        return run.compared, run.score is None, -score if run.higher_is_better else score, run.name

    return sorted(runs, key=place)


def overlaid(runs: Sequence[Told]) -> dict[str, list[dict[str, Any]]]:
    """Returns {chart: its lines} for the page's script; with several runs, each run has one colour and one stroke."""
    found: dict[str, list[dict[str, Any]]] = {}
    for number, run in enumerate(runs):
        for chart, lines in run.charts.items():
            for i, curve in enumerate(lines):
                name = curve.name if len(runs) == 1 else f"{run.name}: {curve.name}"
                found.setdefault(chart, []).append(line_of(curve, name, i if len(runs) == 1 else number))
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


def _one(run: Told, curves: dict[str, list[dict[str, Any]]]) -> list[str]:
    """Builds the body for one run: headline, `lead` (or the loss) beside the newest sample, the rest folded."""
    parts = [f'<p class="soft">{broken(run.subtitle)}</p>', numbers(run.headline)]
    others = dict(curves)
    first = run.lead if run.lead in others else "loss"
    lead = [*([figure(first, others.pop(first))] if first in others else []), *_newest(run)]
    parts += [smoothing(), f'<div class="lead">{"".join(lead)}</div>']
    parts += [heat_figure(heat) for heat in run.heat_maps]
    if others:
        parts.append(folded(f"{len(others)} more {'curve' if len(others) == 1 else 'charts'}", [charts_of(others)]))
    if run.evaluations:
        parts.append(folded("Evaluations", [_evaluations(run)]))
    if run.samples:
        parts.append(folded("Samples along the training", _samples(run)))
    parts.append(folded("What was set", _settings(run)))
    history = "".join(f"<li>{as_text(line)}</li>" for line in run.history)
    parts.append(folded("About this run", [table(("", ""), run.facts), f"<ul>{history}</ul>" if history else ""]))
    if run.checkpoints:
        parts.append(folded("Checkpoints", [table(("checkpoint", "size"), run.checkpoints)]))
    if run.how_to_use:
        parts.append(folded("How to use it", [f"<pre>{as_text(words)}</pre>" for words in run.how_to_use]))
    return parts


def numbers(headline: Iterable[tuple[str, str]]) -> str:
    """Builds the large numbers at the top of the page, each with its description."""
    boxes = "".join(f"<div><b>{as_text(value)}</b><span>{broken(what)}</span></div>" for value, what in headline)
    return f'<div class="numbers">{boxes}</div>'


def folded(title: str, body: Iterable[str]) -> str:
    return f"<details><summary><h2>{as_text(title)}</h2></summary>{''.join(body)}</details>"


def _newest(run: Told) -> list[str]:
    """Builds the block with the latest sample for the run's first prompt."""
    if not run.samples:
        return []
    prompt, texts = next(iter(run.samples.items()))
    step, text, _ = texts[-1]
    return [
        f'<section class="sample"><h2>Newest sample, step {step:,}</h2>'
        f'<pre><span class="soft">{as_text(_cut(prompt))}</span>{as_text(_cut(text))}</pre></section>'
    ]


def _settings(run: Told) -> list[str]:
    """Builds a table of command-line overrides and a folded table of all keys that differ from the defaults."""
    set_ = table(("key", "set to", "default"), run.typed) if run.typed else "<p>Nothing: every key has its default.</p>"
    if not run.changed:
        return [set_]
    title = f"All {len(run.changed)} keys that differ from the defaults, by options and recipes too"
    return [set_, folded(title, [table(("key", "default", "this run"), run.changed)])]


def heat_figure(heat: HeatMap) -> str:
    """Builds the figure of a heat map with axes and a legend of its colours."""
    choices = len(heat.cells[0])
    swatches = "".join(
        f'<span><i style="opacity:{(i + 1) / len(curves.LEVELS):.2f}"></i>from {least:g}</span>'
        for i, least in enumerate(curves.LEVELS)
    )
    return (
        f'<figure class="heatmap"><figcaption>{as_text(heat.title)}: how often each of {choices} was chosen'
        f'<span class="soft">{broken(heat.about)}</span></figcaption>'
        f'<div class="axes"><span class="y">{as_text(heat.one)}</span>'
        f'<span class="ends"><span>1</span><span>{choices}</span></span>'
        f'{curves.drawn(heat)}<span class="x"><span>{heat.first:,}</span><span>step</span><span>{heat.last:,}</span>'
        f'</span></div><p class="legend">times the even share (1/{choices}): <span><i style="opacity:0"></i>less</span>'
        f"{swatches}</p></figure>"
    )


def _several(runs: Sequence[Told], curves: dict[str, list[dict[str, Any]]]) -> list[str]:
    names = ("status", "step", "best", "tokens/s")
    parts = ["<h2>Outcome, best first</h2>"]
    for compared, some in itertools.groupby(runs, key=lambda run: run.compared):
        outcome = [(run.name, *(dict(run.facts).get(name, "") for name in names)) for run in some]
        parts.append(f'<p class="soft">{broken(compared)}</p>{table(("run", *names), outcome)}')
    parts += [smoothing(), charts_of(curves)]
    defaults = {key: default for run in runs for key, default, _ in run.changed}
    values = [{key: value for key, _, value in run.changed} for run in runs]
    keys = [k for k in sorted(defaults) if len({v.get(k, defaults[k]) for v in values}) > 1]
    rows = [(key, *(v.get(key, defaults[key]) for v in values)) for key in keys]
    heading = "<h2>Where their configs differ</h2>"
    parts.append(heading + (table(("key", *(r.name for r in runs)), rows) if rows else "<p>Nowhere.</p>"))
    return parts


def smoothing() -> str:
    """Builds the smoothing slider that the page's script reads, and a hint on zooming."""
    slider = '<label>smoothing <input id="smoothing" type="range" min="0" max="0.98" step="0.02" value="0"></label>'
    return f'<p class="controls">{slider}<span class="soft">drag to zoom, double click for all</span></p>'


def charts_of(curves: dict[str, list[dict[str, Any]]]) -> str:
    return f'<div class="charts">{"".join(figure(name, lines) for name, lines in curves.items())}</div>'


def figure(chart: str, lines: list[dict[str, Any]]) -> str:
    """Builds a chart with the names and strokes of its lines above it."""
    stroke = '<svg viewBox="0 0 34 8" class="stroke"><path d="M0 4h34" {}/></svg>'
    legend = "".join(f"<i>{stroke.format(_look(line))}{broken(line['name'])}</i>" for line in lines)
    label = f'role="img" aria-label="{as_text(chart)} by step"'
    title, _ = FIRST.get(chart, (chart, ""))
    _, axis = FIRST.get(chart.rpartition(": ")[2], ("", chart.rpartition("/")[2]))  # without the name of a stage
    return (
        f'<figure data-chart="{escape(chart)}" data-axis="{escape(axis)}"><figcaption>'
        f"{broken(title)} {legend}</figcaption>"
        f'<svg viewBox="0 0 {_WIDE} {_HIGH}" {label}>{_paths(lines, axis)}</svg>'
        '<div class="tip"></div></figure>'
    )


def _look(line: dict[str, Any]) -> str:
    """Returns the SVG attributes of a line's path."""
    width = 2.4 if line["val"] else 1.5
    return f'stroke="var(--c{line["colour"]})" stroke-dasharray="{line["dash"]}" stroke-width="{width}"'


def _paths(lines: list[dict[str, Any]], axis: str) -> str:
    """Draws the curves and axes as SVG, for browsers without JavaScript."""
    xs, ys = ([v for line in lines for v in line[axis]] for axis in "xy")
    left, bottom = min(xs), min(ys)
    wide, high = (max(xs) - left) or 1, (max(ys) - bottom) or 1.0
    across, up = _WIDE - _LEFT - _RIGHT, _HIGH - _TOP - _BOTTOM
    found = []
    for line in lines:
        few = thinned(Curve("", line["x"], line["y"]), _STATIC)
        points = (
            f"{_LEFT + (x - left) / wide * across:.1f} {_HIGH - _BOTTOM - (y - bottom) / high * up:.1f}"
            for x, y in zip(few.x, few.y, strict=True)
        )
        found.append(f'<path d="M{"L".join(points)}" {_look(line)}/>')
    ends = [(_LEFT, _HIGH - 24, f"{left:,}"), (_WIDE - _RIGHT, _HIGH - 24, f"{max(xs):,}"),
            (_LEFT - 6, _HIGH - _BOTTOM, f"{bottom:.4g}"), (_LEFT - 6, _TOP + 8, f"{max(ys):.4g}")]  # fmt: skip
    texts = [f'<text x="{x}" y="{y}" text-anchor="end">{words}</text>' for x, y, words in ends]
    middle = _TOP + up / 2
    titles = (
        f'<text class="axis" x="{_LEFT + across / 2}" y="{_HIGH - 6}" text-anchor="middle">step</text>'
        f'<text class="axis" transform="translate(13 {middle}) rotate(-90)" text-anchor="middle">{as_text(axis)}</text>'
    )
    return "".join([*found, *texts, titles])


def _samples(run: Told) -> Iterable[str]:
    for prompt, texts in run.samples.items():
        yield f"<h3>{as_text(_cut(prompt))}</h3>"
        for i, (step, text, reference) in enumerate(reversed(texts)):
            given = f'<pre class="soft">reference: {as_text(_cut(reference))}</pre>' if reference is not None else ""
            opened = " open" if i == 0 else ""
            yield f"<details{opened}><summary>step {step:,}</summary><pre>{as_text(_cut(text))}</pre>{given}</details>"


def _evaluations(run: Told) -> str:
    names = list(dict.fromkeys(name for _, scores in run.evaluations for name in scores))
    rows = [(name, *(f"{scores[n]:.4f}" if n in scores else "" for n in names)) for name, scores in run.evaluations]
    return table(("evaluation", *names), rows)


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    head = "".join(f"<th>{broken(name)}</th>" for name in header)
    body = "".join("<tr>" + "".join(f"<td>{broken(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    top = f"<tr>{head}</tr>" if any(header) else ""
    return f'<div class="scroll"><table>{top}{body}</table></div>'


def _cut(text: str) -> str:
    return text if len(text) <= _LONG else f"{text[:_LONG]} ... ({len(text) - _LONG:,} more characters)"
