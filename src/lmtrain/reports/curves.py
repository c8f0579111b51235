"""Turns rows of metrics.jsonl into curves and heat maps for drawing. Imports no torch.

Curves are grouped into charts and thinned so that no peak is lost. A heat map shows how routers' choices are spread
over the course of training: steps on the x axis, choices on the y axis.
"""

import itertools
import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from lmtrain.config import safe_yaml

MAX_POINTS = 1500  # per curve: about three for each pixel of a chart
# Keys without a curve: those that locate a row, and those that are meaningful only as sums.
_LEFT_OUT = ("step", "tokens_seen", "rows", "bad_steps", "time", "step_ms", "data_wait_ms")
# The charts that come first, in this order: their titles, and the labels of their y axes.
FIRST: dict[str, list[str]] = safe_yaml.table(__file__, "charts.yaml")


@dataclass
class Curve:
    """A curve: values `y` at ascending steps `x`."""

    name: str
    x: list[int] = field(default_factory=list)
    y: list[float] = field(default_factory=list)

    def add(self, step: int, value: float) -> None:
        """Adds a point; of a long curve, no more than a few times MAX_POINTS are held."""
        self.x.append(step)
        self.y.append(value)
        if len(self.x) >= 4 * MAX_POINTS:
            few = thinned(self)
            self.x, self.y = few.x, few.y


def charts(rows: Iterable[dict[str, Any]]) -> dict[str, list[Curve]]:
    """Returns {chart: its curves} without non-finite values; train/loss and val/loss are both in the chart `loss`."""
    curves: dict[str, Curve] = {}
    for row in rows:
        for key, value in row.items():
            number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
            if number and key not in _LEFT_OUT:
                curves.setdefault(key, Curve(key)).add(int(row["step"]), float(value))
    found: dict[str, list[Curve]] = {}
    for key, curve in sorted(curves.items(), key=lambda one: one[0].startswith("val/")):  # training first
        found.setdefault(_chart_of(key), []).append(thinned(curve))
    order = [*FIRST, *sorted(set(found) - set(FIRST))]
    return {name: found[name] for name in order if name in found}


def _chart_of(key: str) -> str:
    """Returns the chart of a key: `loss` for train/loss, val/loss and val/wiki/loss (a separate validation set)."""
    name = key.removeprefix("train/").removeprefix("val/")
    last = name.rpartition("/")[2]
    return last if key.startswith("val/") and last in FIRST else name


def thinned(curve: Curve, most: int = MAX_POINTS) -> Curve:
    """Thins a curve to about `most` points: the minimum and maximum of each interval of steps, and both ends."""
    count = len(curve.x)
    if count <= most:
        return curve
    first, stretch = curve.x[0], (curve.x[-1] - curve.x[0] + 1) / (most // 2)
    kept = {0, count - 1}
    for _, part in itertools.groupby(range(count), key=lambda i: int((curve.x[i] - first) / stretch)):
        inside = list(part)
        kept |= {min(inside, key=curve.y.__getitem__), max(inside, key=curve.y.__getitem__)}
    chosen = sorted(kept)
    return Curve(curve.name, [curve.x[i] for i in chosen], [curve.y[i] for i in chosen])


COLUMNS = 120  # maximum number of columns; of more logged steps, neighbouring ones are averaged
# Thresholds of a cell's darkness, as multiples of the uniform share; cells below the first stay empty.
LEVELS = (0.05, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0)
TITLES = {"router/chapters": ("Chapters of the memory", "chapter"), "router/experts": ("Experts", "expert")}


@dataclass
class HeatMap:
    """A heat map of routers' choices; `cells` [columns][choices] are each column's shares.

    first, last: the steps it spans. one: noun for a choice (expert, chapter). about: the model and its top-k.
    """

    title: str
    first: int
    last: int
    cells: list[list[float]]
    one: str = ""
    about: str = ""


def heat_maps(rows: Iterable[dict[str, Any]]) -> list[HeatMap]:
    """Returns heat maps of how often routers chose each expert or chapter; none if the rows have no such metrics."""
    found: dict[str, list[tuple[int, list[float]]]] = {}
    for row in rows:
        for key in TITLES:
            if isinstance(row.get(key), list):
                found.setdefault(key, []).append((int(row["step"]), row[key]))
    return [
        HeatMap(TITLES[key][0], uses[0][0], uses[-1][0], _shares([use for _, use in uses]), TITLES[key][1])
        for key, uses in found.items()
    ]


def _shares(uses: list[list[float]]) -> list[list[float]]:
    """Returns the share of each choice in at most COLUMNS stretches of neighbouring steps."""
    count = min(COLUMNS, len(uses))
    stretches = (uses[i * len(uses) // count : (i + 1) * len(uses) // count] for i in range(count))
    columns = [[sum(values) for values in zip(*stretch, strict=True)] for stretch in stretches]
    return [[value / max(sum(column), 1e-9) for value in column] for column in columns]


def level(share: float, choices: int) -> int:
    """Returns a cell's darkness: 0 (hardly ever chosen) to len(LEVELS)."""
    return sum(share * choices >= least for least in LEVELS)


def paths(heat: HeatMap) -> dict[int, str]:
    """Returns an SVG path through the cells of each level of darkness; a cell is a unit wide and high."""
    found: dict[int, str] = {}
    for x, column in enumerate(heat.cells):
        for y, share in enumerate(column):
            if dark := level(share, len(column)):
                found[dark] = f"{found.get(dark, '')}M{x} {y}h1"
    return dict(sorted(found.items()))
