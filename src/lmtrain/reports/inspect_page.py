"""An inspection as one HTML file to share: nothing is loaded from elsewhere, light and dark as the reader likes."""

from html import escape
from pathlib import Path

from lmtrain.errors import UserError, reason
from lmtrain.reports.inspection import Inspection, Sample
from lmtrain.reports.token_view import Piece, visible

_STYLE = """
:root { color-scheme: light dark; --text: #1c1c1c; --page: #fdfdfd; --soft: #777; --line: #ddd;
  --given: #f0f0f0; --given2: #e6e6e6; --learned: #b4ecb4; --learned2: #97dd97; --bar: #4c9a5f; }
@media (prefers-color-scheme: dark) { :root { --text: #e6e6e6; --page: #161616; --soft: #999; --line: #3a3a3a;
  --given: #262626; --given2: #303030; --learned: #1d4d24; --learned2: #2a6633; --bar: #5fb573; } }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--text); background: var(--page); max-width: 70rem;
  margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.3rem } h2 { font-size: 1rem; margin: 1.8rem 0 .4rem }
table { border-collapse: collapse } th, td { text-align: left; padding: .15rem 1.2rem .15rem 0; vertical-align: top }
td { overflow-wrap: anywhere } .numbers td, .numbers th { text-align: right; white-space: nowrap }
.soft, th { color: var(--soft); font-weight: normal }
pre { font: 13px/1.7 ui-monospace, monospace; white-space: pre-wrap; overflow-wrap: anywhere; margin: 0;
  border: 1px solid var(--line); border-radius: 6px; padding: .6rem .8rem }
i { font-style: normal; background: var(--given) } i:nth-of-type(even) { background: var(--given2) }
i.l { background: var(--learned); border-bottom: 2px solid var(--bar) }
i.l:nth-of-type(even) { background: var(--learned2) }
i.s { font-weight: bold } svg text { fill: var(--text); font: 12px system-ui, sans-serif } rect { fill: var(--bar) }
"""
_ROW, _LABEL, _WIDE = 18, 130, 520  # of the histogram's bars, in pixels: height, room for the label, the longest


def write(found: Inspection, path: str) -> Path:
    """Writes the page; UserError where it can't be."""
    file = Path(path).expanduser().absolute()
    try:
        file.write_text(page(found), encoding="utf-8")
    except OSError as error:
        raise UserError(f"inspect.html={path} can't be written: {reason(error)}") from None
    return file


def page(found: Inspection) -> str:
    """The whole HTML document."""
    facts = "".join(f"<tr><th>{_text(name)}</th><td>{_text(value)}</td></tr>" for name, value in found.rows)
    parts = [f"<h1>{_text(found.split)} split</h1>", f"<table>{facts}</table>"]
    if found.lengths is not None:
        parts += [f"<h2>Lengths of {found.unit}s, in tokens</h2>", _percentiles(found), _histogram(found)]
    parts.append(
        '<p class="soft"><i class="l">learned</i> <i>given</i> token by token (its id under the pointer), '
        '<i class="s">bold</i>: special, ↵ ends a line</p>'
    )
    parts += [f"<h2>{_text(sample.title)}</h2>{_sample(sample)}" for sample in found.samples]
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width">'
        f"<title>{_text(found.split)} split</title><style>{_STYLE}</style></head>\n<body>\n"
        + "\n".join(parts)
        + "\n</body></html>\n"
    )


def _text(text: str) -> str:
    return escape(visible(text))


def _sample(sample: Sample) -> str:
    gap = f'\n<span class="soft">... {sample.left_out:,} tokens ...</span>\n' if sample.left_out else ""
    return f"<pre>{''.join(map(_piece, sample.head))}{gap}{''.join(map(_piece, sample.tail))}</pre>"


def _piece(piece: Piece) -> str:
    kinds = "l " * piece.learned + "s" * piece.special
    attribute = f' class="{kinds.strip()}"' if kinds else ""
    ids = " ".join(map(str, piece.ids))
    return f'<i{attribute} title="{ids}">{escape(visible(piece.text)).replace(chr(10), "↵" + chr(10))}</i>'


def _percentiles(found: Inspection) -> str:
    header, lines = found.percentiles()
    head = "".join(f"<th>{name}</th>" for name in header)
    body = "".join(f"<tr><th>{name}</th>{''.join(f'<td>{v}</td>' for v in values)}</tr>" for name, *values in lines)
    return f'<table class="numbers"><tr>{head}</tr>{body}</table>'


def _histogram(found: Inspection) -> str:
    bars = found.histogram()
    most = max(number for _, _, number in bars)
    drawn = []
    for i, (low, high, number) in enumerate(bars):
        y, wide = i * _ROW, _WIDE * number / most
        drawn.append(
            f'<text x="{_LABEL - 8}" y="{y + 13}" text-anchor="end">{low:,} - {high:,}</text>'
            f'<rect x="{_LABEL}" y="{y + 2}" width="{wide:.1f}" height="{_ROW - 4}"/>'
            f'<text x="{_LABEL + wide + 6:.1f}" y="{y + 13}">{number:,}</text>'
        )
    size = f'width="{_LABEL + _WIDE + 80}" height="{len(bars) * _ROW}"'
    return f'<svg {size} role="img" aria-label="histogram of lengths">{"".join(drawn)}</svg>'
