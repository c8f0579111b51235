"""What all numbers of a run mean, gathered from where they are produced; docs/metrics.md shows it."""

from collections.abc import Mapping

import yaml

from lmtrain.callbacks import metrics, routing, step_numbers, system
from lmtrain.config.defaults import conf_dir
from lmtrain.config.targets import find_class
from lmtrain.objectives.base import Objective
from lmtrain.objectives.parts import Definition
from lmtrain.objectives.routing import ROUTERS
from lmtrain.outputs import text_metrics
from lmtrain.run.summary import SUMMARY

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
RECORD: Table = {**metrics.STEP, **step_numbers.GROWN, **system.MACHINE, **routing.USE}
OF_SUMMARY: Table = SUMMARY
