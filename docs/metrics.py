"""The page of all numbers, made of the definitions in the code. `python docs/metrics.py` writes docs/metrics.md."""

from collections.abc import Iterator, Mapping
from pathlib import Path

import yaml

from lmtrain.callbacks import metrics, routing, step_numbers
from lmtrain.config.defaults import conf_dir
from lmtrain.config.targets import find_class
from lmtrain.generation import text_metrics
from lmtrain.objectives.base import Objective
from lmtrain.objectives.parts import Definition
from lmtrain.objectives.routing import ROUTERS
from lmtrain.run.summary import SUMMARY

PAGE = Path(__file__).with_suffix(".md")
HEAD = """# What each number means

Made by `python docs/metrics.py` from the definitions that stand in the code beside what produces a number.

Each record of a run's metrics.jsonl, and each point that a tracker gets, has numbers of these names. `train/...` is of
the optimizer step that the record names, `val/...` of a whole validation, `val/<set>/...` of a set of `data.val_sets`.
A mean is over all micro-batches and ranks of the step, or over all rows of the validation: each token, pair or answer
weighs the same, whatever `data.micro_batch_size` and the number of devices. `s` is the logistic function, `log` the
natural logarithm, `p_ref` the reference's probability. The weights are those before the step's update; in a validation
those after it, or their average with `callbacks=ema`.

*Compared with*: what gives the same number, and the test that shows it; `-` where nothing else measures it. What a
user's code logs with `self.log` stands under its own name and is not listed.
"""
COLUMNS = ("name", "where", "unit", "over", "is", "compared with")
STEP_AND_VALIDATION = "`train/`, `val/`"


Table = Mapping[str, Definition]


def _of_objectives() -> dict[str, Table]:
    """The definitions of each objective of conf/."""
    files = sorted((conf_dir() / "objective").glob("*.yaml"))
    named = {file.stem: yaml.safe_load(file.read_text(encoding="utf-8")).get("_target_") for file in files}
    classes = {
        name: find_class(target, "objective", Objective)  # type: ignore[type-abstract]
        for name, target in named.items()
        if target
    }
    return {name: cls.definitions for name, cls in classes.items()}


# Names stand after train/ and val/, or val/<set>/ of data.val_sets.
OBJECTIVES: dict[str, Table] = _of_objectives()
OF_ANY_OBJECTIVE: Table = ROUTERS
# After val/ alone.
OF_VALIDATION: Table = {**metrics.DERIVED, **text_metrics.DEFINITIONS}
# As they are.
RECORD: Table = {**metrics.STEP, **step_numbers.GROWN, **step_numbers.MACHINE, **routing.USE}
OF_SUMMARY: Table = SUMMARY


def lines() -> Iterator[tuple[str, str, Definition]]:
    """(name, where it stands, definition)."""
    yield from _lines(RECORD, "records of a step")
    shared: dict[int, list[str]] = {}
    for name, table in OBJECTIVES.items():
        shared.setdefault(id(table), []).append(name)
    for names in shared.values():
        yield from _lines(OBJECTIVES[names[0]], f"{STEP_AND_VALIDATION}: {', '.join(names)}")
    yield from _lines(OF_ANY_OBJECTIVE, f"{STEP_AND_VALIDATION}; of a memory in a mixture: router/memory/")
    yield from _lines(OF_VALIDATION, "`val/`")
    yield from _lines(OF_SUMMARY, "summary.json")


def _lines(table: Mapping[str, Definition], where: str) -> Iterator[tuple[str, str, Definition]]:
    for name, definition in table.items():
        yield name, where, definition


def page() -> str:
    rows = [COLUMNS, tuple("---" for _ in COLUMNS)]
    for name, where, d in lines():
        compared = "; ".join(f"{who}: `{test}`" for who, test in d.compared.items())
        rows.append((f"`{name}`", where, d.unit, d.over, d.formula, compared or "-"))
    table = "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows)
    return f"{HEAD}\n{table}\n"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
