"""A run writes within its folder: links that lead out aren't followed, and other places are reported."""

import os
from pathlib import Path

import pytest

from inprocess import train_tiny
from lmtrain.config.compose import check, compose
from lmtrain.errors import UserError
from lmtrain.files import write_atomic
from lmtrain.run_folder.folder import open_run
from lmtrain.run_folder.links import refuse_link_at
from lmtrain.sweeps.processes import locked


@pytest.fixture
def theirs(tmp_path: Path) -> Path:
    """Creates a run's folder received from somebody else, and `outside` next to it with a file of the user's."""
    (tmp_path / "outside" / "step_00000001").mkdir(parents=True)
    (tmp_path / "outside" / "mine.txt").write_text("mine")
    run = tmp_path / "run"
    (run / "checkpoints").mkdir(parents=True)
    (run / "config.yaml").write_text("seed: 1\n")
    return run


@pytest.mark.parametrize("name", ["checkpoints", "metrics.jsonl", "starts.jsonl", "checkpoints/last", "wandb/x/deep"])
def test_a_run_is_not_continued_through_a_link_that_leads_out(name: str, theirs: Path) -> None:
    link = theirs / name
    link.parent.mkdir(parents=True, exist_ok=True)
    if link.is_dir():
        link.rmdir()
    link.symlink_to(theirs.parent / "outside")
    with pytest.raises(UserError, match=rf"{name} is a link to .*outside, outside of the run's folder"):
        open_run(check(compose([f"run.dir={theirs}", "run.resume=auto"])))
    assert (theirs.parent / "outside" / "mine.txt").read_text() == "mine"


def test_links_within_a_run_are_its_own(theirs: Path) -> None:
    (theirs / "checkpoints" / "step_00000001").mkdir()
    (theirs / "checkpoints" / "last").symlink_to("step_00000001")
    assert open_run(check(compose([f"run.dir={theirs}", "run.resume=auto"]))).path == theirs


def test_evaluations_and_sweeps_do_not_follow_links_either(theirs: Path) -> None:
    (theirs / "evaluations").symlink_to(theirs.parent / "outside")
    with pytest.raises(UserError, match="evaluations is a link"):
        refuse_link_at(theirs / "evaluations", theirs)
    with pytest.raises(UserError, match="evaluations is a link"), locked(theirs, "sweep", "sweep.root"):
        pass


def test_a_file_is_not_written_through_a_link_left_for_it(theirs: Path) -> None:
    target = theirs.parent / "outside" / "mine.txt"
    (theirs / "summary.json").symlink_to(target)
    (theirs / f"summary.json.tmp{os.getpid()}").symlink_to(target)
    write_atomic(theirs / "summary.json", "{}")
    assert target.read_text() == "mine"
    assert (theirs / "summary.json").read_text() == "{}"


def test_a_callback_that_writes_elsewhere_is_said(corpus: Path, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    extra = f"callbacks.extra=[{{_target_: lightning.pytorch.callbacks.ModelCheckpoint, dirpath: {elsewhere}}}]"
    done = train_tiny(corpus, f"run.dir={tmp_path / 'run'}", extra)
    assert done.code == 0, done.err
    plan = " ".join((tmp_path / "run" / "plan.txt").read_text().replace("\u2502", " ").split())
    assert f"callbacks.extra, ModelCheckpoint: dirpath is {elsewhere}, outside the run's folder" in plan
