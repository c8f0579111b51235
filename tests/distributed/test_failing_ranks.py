"""Ranks of one launcher that fail print one message, from a rank that encountered the error."""

import dataclasses
import os
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.elastic.multiprocessing.api import PContext
from torch.distributed.launcher.api import LaunchConfig

import slow_to_leave
from lmtrain.config import compose
from lmtrain.config.schema import Config
from lmtrain.errors import FAILED, WRONG_INPUT, RunError, UserError
from lmtrain.run import launch


def failing(folder: Path, rank: int, error: Exception, monkeypatch: pytest.MonkeyPatch) -> int:
    """Returns the exit code of a rank whose job raises the error."""
    monkeypatch.setenv("RANK", str(rank))
    monkeypatch.setattr(launch, "_SAME_ERROR_SECONDS", 0)
    (folder / "config.yaml").write_text(compose.dump(compose.check(compose.compose(["data=text", "data.path=x"]))))

    def job(config: Config) -> int:
        raise error

    return launch.as_rank([str(folder / "config.yaml")], job)


def test_the_first_rank_prints_before_it_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """If another rank has left already, the launcher ends this one soon, so it must print first."""
    printed = list[str]()
    monkeypatch.setattr(launch, "write_atomic", lambda *_: printed.append(capsys.readouterr().err))
    assert failing(tmp_path, 0, UserError("no such file"), monkeypatch) == WRONG_INPUT
    assert printed == ["error: no such file\n"]


@pytest.mark.parametrize("met_by_first", [False, True])
def test_a_mistake_that_one_rank_alone_meets_is_printed(
    met_by_first: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if met_by_first:
        failing(tmp_path, 0, UserError("no such file"), monkeypatch)
    assert failing(tmp_path, 1, UserError("no such file"), monkeypatch) == WRONG_INPUT
    assert capsys.readouterr().err == "error: no such file\n"
    assert (tmp_path / "rank_1_failed_at").exists()


def test_a_failed_run_is_printed_by_its_rank(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert failing(tmp_path, 1, RunError("the disk is full"), monkeypatch) == FAILED
    assert capsys.readouterr().err == "error: the disk is full\n"


def test_a_mistake_counts_where_its_note_can_not_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(launch, "_note_of_failure", lambda folder, rank: folder / "gone" / str(rank))
    assert failing(tmp_path, 1, UserError("no such file"), monkeypatch) == WRONG_INPUT
    assert capsys.readouterr().err == "error: no such file\n"


def test_a_mistake_counts_as_one_where_its_rank_was_ended_before_it_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    config = compose.check(compose.compose(["data=text", "data.path=x"]))
    monkeypatch.setenv("PYTHONPATH", str(Path(slow_to_leave.__file__).parent), prepend=os.pathsep)
    assert launch.launch_ranks("slow_to_leave", config, tmp_path, 2) == WRONG_INPUT
    assert [line for line in capfd.readouterr().err.splitlines() if "error" in line] == ["error: no such file"]


def test_an_older_launcher_waits_as_long(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch 2.11's LaunchConfig has no shutdown_timeout: it waits for as long as a default argument says."""

    class Older:
        def __init__(self, logs_specs: Any, **options: Any) -> None:
            assert set(options) <= {field.name for field in dataclasses.fields(LaunchConfig)} - {"shutdown_timeout"}

    monkeypatch.setattr("torch.distributed.launcher.api.LaunchConfig", Older)
    monkeypatch.setattr("torch.distributed.launcher.api.elastic_launch", lambda *_: lambda *_: None)
    monkeypatch.setattr(PContext.close, "__defaults__", (None, 30))
    config = compose.check(compose.compose(["data=text", "data.path=x"]))
    assert launch.launch_ranks("slow_to_leave", config, tmp_path, 2) == 0
    assert PContext.close.__defaults__ == (None, launch._SHUTDOWN_SECONDS)
