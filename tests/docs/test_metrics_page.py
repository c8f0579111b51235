"""docs/metrics.md is the output of `python docs/metrics.py`, and the tests that it names exist."""

import importlib.util
import re
from types import ModuleType

import pytest
import yaml

from lmtrain.config.targets import find_class
from lmtrain.objectives.base import Objective
from support import REPO


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("metrics_page", REPO / "docs" / "metrics.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_is_made_of_the_definitions(script: ModuleType) -> None:
    assert script.PAGE.read_text(encoding="utf-8") == script.page(), "run: python docs/metrics.py"
    assert "metrics.md" in (REPO / "mkdocs.yml").read_text()


def test_each_objective_of_ours_has_definitions(script: ModuleType) -> None:
    files = {file.stem: file for file in (REPO / "conf" / "objective").glob("*.yaml") if file.stem != "custom"}
    assert script.OBJECTIVES.keys() == files.keys()
    for name, file in files.items():
        target = yaml.safe_load(file.read_text())["_target_"]
        assert tuple(script.OBJECTIVES[name]) == find_class(target, "objective", Objective).reported


def test_the_tests_that_are_named_exist(script: ModuleType) -> None:
    named = {test for _, _, definition in script.lines() for test in definition.compared.values()}
    assert len(named) > 10
    for test in named:
        file, name = test.split("::")
        assert re.search(rf"^def {name}\(", (REPO / file).read_text(), re.MULTILINE), test
