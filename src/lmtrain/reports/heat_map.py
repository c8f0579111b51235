"""How routers' choices are spread over a training, as a heat map: steps to the right, choices downwards.

Imports no torch.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

COLUMNS = 120  # at most; of more logged steps, neighbouring ones are averaged
# Times the even share from which on a cell is darker than the one before; what is below the first stays empty.
LEVELS = (0.05, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0)
TITLES = {"router/chapters": "Chapters of the memory", "router/experts": "Experts"}


@dataclass
class HeatMap:
    """cells: [columns][choices], shares of a column's choices; first, last: the steps it spans."""

    title: str
    first: int
    last: int
    cells: list[list[float]]


def heat_maps(rows: Iterable[dict[str, Any]]) -> list[HeatMap]:
    """Of the rows of metrics.jsonl; none where they tell of no router."""
    found: dict[str, list[tuple[int, list[float]]]] = {}
    for row in rows:
        for key in TITLES:
            if isinstance(row.get(key), list):
                found.setdefault(key, []).append((int(row["step"]), row[key]))
    return [
        HeatMap(TITLES[key], told[0][0], told[-1][0], _columns([use for _, use in told])) for key, told in found.items()
    ]


def _columns(told: list[list[float]]) -> list[list[float]]:
    count = min(COLUMNS, len(told))
    parts = [told[i * len(told) // count : (i + 1) * len(told) // count] for i in range(count)]
    summed = [[sum(values) for values in zip(*part, strict=True)] for part in parts]
    return [[value / max(sum(column), 1e-9) for value in column] for column in summed]


def level(share: float, choices: int) -> int:
    """How dark a cell is: 0 (hardly ever chosen) to len(LEVELS)."""
    return sum(share * choices >= least for least in LEVELS)


def drawn(heat: HeatMap) -> str:
    """An SVG of one path for each level."""
    wide, high = len(heat.cells), len(heat.cells[0])
    paths: dict[int, list[str]] = {}
    for x, column in enumerate(heat.cells):
        for y, share in enumerate(column):
            if dark := level(share, high):
                paths.setdefault(dark, []).append(f"M{x} {y}h1")
    lines = "".join(
        f'<path d="{"".join(cells)}" transform="translate(0 .5)" stroke-opacity="{dark / len(LEVELS):.2f}"/>'
        for dark, cells in sorted(paths.items())
    )
    return (
        f'<svg class="heat" viewBox="0 0 {wide} {high}" preserveAspectRatio="none" role="img" '
        f'aria-label="{heat.title} by step">{lines}</svg>'
    )
