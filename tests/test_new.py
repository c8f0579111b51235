"""The files that `python -m lmtrain.new` writes work without changes, outside the source tree."""

import subprocess
import sys
from pathlib import Path

import pytest

from inprocess import run
from lmtrain.new import KINDS


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_the_written_test_passes(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    ended = run("new", kind, "my_thing")
    assert ended.code == 0, ended.err
    assert sorted(p.name for p in tmp_path.iterdir()) == ["my_thing.py", "test_my_thing.py"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_my_thing.py"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:]
    assert "1 passed" in done.stdout
    again = run("new", kind, "my_thing")
    assert again.code == 2
    assert "my_thing.py is there already" in again.err


def test_what_it_refuses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    cases = {
        ("data", "my_thing"): "environment, objective, model, optimizer",
        ("reward", "My-Thing"): "name a module",
        ("dataset", "lambda"): "no word of Python's",
    }
    for argv, said in cases.items():
        ended = run("new", *argv)
        assert ended.code == 2
        assert said in ended.err
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "test_mine.py").touch()
    assert "test_mine.py is there already" in run("new", "reward", "mine").err
    assert [p.name for p in tmp_path.iterdir()] == ["test_mine.py"]
