"""docs/metrics.md defines each number of each objective, and the tests that compared.yaml names exist."""

import re

import yaml

import metrics_page
from lmtrain.config.targets import find_class
from lmtrain.objectives.base import Objective
from support import REPO

PAGE = REPO / "docs" / "metrics.md"


def test_the_page_is_part_of_the_site_and_its_rows_are_whole() -> None:
    assert "metrics.md" in (REPO / "mkdocs.yml").read_text()
    rows = [line for line in PAGE.read_text(encoding="utf-8").splitlines() if line.startswith("|")]
    assert all(len(re.findall(r"(?<!\\)\|", row)) == 4 for row in rows)
    for section, names in metrics_page.SECTIONS.items():
        assert len(set(names)) == len(names), section


def test_each_objective_of_ours_has_definitions() -> None:
    files = {file.stem: file for file in (REPO / "conf" / "objective").glob("*.yaml") if file.stem != "custom"}
    assert metrics_page.OBJECTIVES.keys() == files.keys()
    for name, file in files.items():
        target = yaml.safe_load(file.read_text())["_target_"]
        assert tuple(metrics_page.OBJECTIVES[name]) == find_class(target, "objective", Objective).reported


def test_what_is_compared_is_defined_and_the_tests_exist() -> None:
    titles = {"records": "Every record", "validation": "`val/`", "summary.json": "summary.json"}
    rows = yaml.safe_load((REPO / "tests" / "compared.yaml").read_text(encoding="utf-8"))
    assert len(rows) > 30
    for numbers, _, test in rows:
        for part in numbers.split("; "):
            place, _, names = part.partition(": ")
            title = titles.get(place) or f"`train/`, `val/`: {place.replace(' and ', ', ')}"
            defined = next(known for other, known in metrics_page.SECTIONS.items() if other.startswith(title))
            assert names == "all" or set(names.split(", ")) <= set(defined), numbers
        file, name = test.split("::")
        assert re.search(rf"^def {name}\(", (REPO / "tests" / file).read_text(), re.MULTILINE), test
