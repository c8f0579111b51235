"""`lmtrain.doctor`: one line per component, exit code 1 if training can't run."""

import re
import tomllib
from pathlib import Path

import pytest

from inprocess import run
from lmtrain.reports import machine


def test_everything_needed_is_found(tmp_path: Path) -> None:
    done = run("doctor", str(tmp_path / "outputs"))
    assert done.code == 0, done.out + done.err
    for part in ("torch", "transformers", "trainer.precision=auto is", "C compiler"):
        assert part in done.out
    assert not (tmp_path / "outputs").exists()  # doctor doesn't create it


def test_a_folder_that_cannot_be_written_is_exit_1() -> None:
    done = run("doctor", "/proc/outputs")
    assert done.code == 1
    assert "set run.root" in done.out
    assert "can't run here" in done.err


def test_a_missing_package_names_its_requirement(monkeypatch) -> None:
    found = machine.importlib.metadata.version

    def version(name: str) -> str:
        if name == "peft":
            raise machine.importlib.metadata.PackageNotFoundError(name)
        return found(name)

    monkeypatch.setattr(machine.importlib.metadata, "version", version)
    (peft,) = [f for f in machine._packages() if f.name == "peft"]
    assert (peft.good, peft.needed) == (False, True)
    assert "pip install" in peft.words


def test_what_is_optional_comes_with_an_extra_that_there_is() -> None:
    """The packages that doctor checks are in the extras that it names for them."""
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    for name, (extra, _) in machine.OPTIONAL.items():
        assert any(re.match(rf"{name}\b", line) for line in project["optional-dependencies"][extra]), name
    assert machine.OPTIONAL["nvidia-ml-py"][0] == "nvml"


def test_pip_lines_keep_their_extras(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    lacking = [machine.Finding(name, False, f'pip install "lmtrain[{name}]"') for name in ("ray", "lm-eval")]
    monkeypatch.setattr(machine, "findings", lambda folder: iter(lacking))
    done = run("doctor", str(tmp_path))
    assert 'pip install "lmtrain[ray]"' in done.out
    assert 'pip install "lmtrain[lm-eval]"' in done.out
