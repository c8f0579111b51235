"""The page of all numbers, made of docs/metrics.yaml. `python docs/metrics.py` writes docs/metrics.md."""

import itertools
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import yaml

PAGE = Path(__file__).with_suffix(".md")
HEAD = """# What each number means

```
tail -n 1 outputs/my_run/metrics.jsonl
```

`train/...` belongs to the optimizer step of the record, `val/...` to a whole validation, `val/<set>/...` to a set of
`data.val_sets`. Means are over all micro-batches and ranks of the step, or all rows of the validation. `s` is the
logistic function, `log` the natural logarithm, `p_ref` the probability under the reference model. Training metrics
use the weights before the step's update, validation metrics those after it, or their average with `callbacks=ema`.
Times and rates count from the last record on, without validations, saves and samples. `python docs/metrics.py` makes
this page of docs/metrics.yaml, which also names the tests that compare each number with an independent computation.
"""
COLUMNS = ("name", "over; unit", "is")
STEP_AND_VALIDATION = "`train/`, `val/`"


class Definition(NamedTuple):
    """The meaning of a number: its unit, the items that it is a mean or sum over, its formula, and tests of it."""

    unit: str
    over: str
    formula: str
    compared: Mapping[str, str]  # library or plain loop: the test that compares with it


Table = Mapping[str, Definition]


def _table(plain: dict[str, Any]) -> Table:
    return {name: Definition(d["unit"], d["over"], d["is"], d.get("compared", {})) for name, d in plain.items()}


_READ = yaml.safe_load(PAGE.with_suffix(".yaml").read_text(encoding="utf-8"))
# Names stand after train/ and val/, or val/<set>/ of data.val_sets. Objectives may share a table.
_TABLES = {id(plain): _table(plain) for plain in _READ["objectives"].values()}
OBJECTIVES: dict[str, Table] = {name: _TABLES[id(plain)] for name, plain in _READ["objectives"].items()}
# After both too; after val/ alone; as they are.
OF_ANY_OBJECTIVE, OF_VALIDATION, RECORD, OF_SUMMARY = (
    _table(_READ[name]) for name in ("routers", "validation", "record", "summary")
)


def lines() -> Iterator[tuple[str, str, Definition]]:
    """(name, where it stands, definition)."""
    yield from _lines(RECORD, "Every record")
    shared: dict[int, list[str]] = {}
    for name, table in OBJECTIVES.items():
        shared.setdefault(id(table), []).append(name)
    for names in shared.values():
        yield from _lines(OBJECTIVES[names[0]], f"{STEP_AND_VALIDATION}: {', '.join(names)}")
    yield from _lines(OF_ANY_OBJECTIVE, f"{STEP_AND_VALIDATION}: routers; `router/memory/` beside experts")
    yield from _lines(OF_VALIDATION, "`val/`")
    yield from _lines(OF_SUMMARY, "summary.json")


def _lines(table: Mapping[str, Definition], where: str) -> Iterator[tuple[str, str, Definition]]:
    for name, definition in table.items():
        yield name, where, definition


def page() -> str:
    sections = [_section(where, list(found)) for where, found in itertools.groupby(lines(), key=lambda line: line[1])]
    return "\n".join([HEAD, *sections])


def _section(where: str, found: list[tuple[str, str, Definition]]) -> str:
    rows = [
        COLUMNS,
        tuple("---" for _ in COLUMNS),
        *((f"`{name}`", f"{d.over}; {d.unit}", d.formula) for name, _, d in found),
    ]
    table = [f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in row)} |" for row in rows]
    return "\n".join([f"## {where}", "", *table, ""])


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
