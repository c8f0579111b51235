"""Checks of a foreign config folder before Hydra reads it: aliases that expand to billions, packages to import."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from lmtrain.config.compose import compose
from lmtrain.config.safe_yaml import check_folder, dumped, parse
from lmtrain.errors import UserError
from lmtrain.reports.listing import read
from lmtrain.run_folder.folder import RunDir

LAUGHS = "a0: &a0 [l, l, l, l, l, l, l, l, l]\n" + "".join(
    f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]\n" for i in range(1, 9)
)


@pytest.mark.parametrize("text", [LAUGHS, "a: &a [*a]\n", "a: &a {b: {c: *a}}\n"])
def test_aliases_that_stand_for_too_much(text: str, tmp_path: Path) -> None:
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment" / "theirs.yaml").write_text(text)
    with pytest.raises(UserError, match=r"experiment/theirs\.yaml can't be read: its aliases"):
        check_folder(tmp_path, "config")


@pytest.mark.parametrize(
    "text", ["a: &a {b: 1}\nc: *a\n", "a: &a [1]\nb: {<<: {c: *a}}\n", "a: 2 & 3 * 4\n", "", "a: ["]
)
def test_other_files_are_left_to_hydra(text: str, tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text(text)
    check_folder(tmp_path, "config")


@pytest.mark.parametrize("text", [f"seed: {'9' * 5000}\n", f"a: 1\nb: -0x{'9_' * 3000}\n"])
def test_numbers_of_thousands_of_digits(text: str, tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text(text)
    with pytest.raises(UserError, match=r"config\.yaml can't be read: a number .* in line"):
        check_folder(tmp_path, "config")


@pytest.mark.parametrize("entry", ["pkg://antigravity", "PKG://a", "structured://", "http://127.0.0.1/"])
def test_hydra_looks_in_folders_only(entry: str, tmp_path: Path) -> None:
    """Entries of the search path other than folders are refused: pkg:// imports the package, and so runs its code."""
    (tmp_path / "config.yaml").write_text(f"hydra: {{searchpath: ['file:///tmp', '{entry}']}}\n")
    with pytest.raises(UserError, match=r"config\.yaml: hydra\.searchpath has .*, which Hydra would import"):
        check_folder(tmp_path, "config")
    for word in (f"hydra.searchpath=[{entry}]", f"++hydra.searchpath=['file:///tmp','{entry}']"):
        with pytest.raises(UserError, match=r"hydra\.searchpath has"):
            compose([word])


def test_folders_are_let_through(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("hydra: {searchpath: ['file:///tmp', /tmp]}\n")
    check_folder(tmp_path, "config")
    compose([f"hydra.searchpath=[file://{tmp_path}]", "data=text", "data.path='pkg://a'", "seed=1"])


@pytest.mark.parametrize("text", ["[" * 30_000, "- " * 30_000, "{a: " * 30_000], ids=["flow", "block", "mapping"])
def test_deep_nesting_is_an_error(text: str, tmp_path: Path) -> None:
    """YAML's parser in C would overflow the stack, which ends Python."""
    with pytest.raises(UserError, match=r"theirs\.yaml can't be read"):
        parse(text, "theirs.yaml")
    (tmp_path / "config.yaml").write_text(f"model:\n  {text}\n")
    assert read(RunDir(tmp_path)).status


@pytest.mark.parametrize(
    "value", ["word " * 40, "two\nlines\n", "x: y", "007", "\x07", "\u2028", "grün", "\U0001f600", [{}, 1.5, None]]
)
def test_values_are_written_as_by_python(value: Any) -> None:
    tree = {"key": value, "longer": {"a": [value]}}
    assert dumped(tree) == yaml.safe_dump(tree, sort_keys=False, allow_unicode=True)
    assert parse(dumped(tree), "mine.yaml") == tree
