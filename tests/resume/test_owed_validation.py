"""A validation interrupted by a stop is made up for on resume, on one device and on two ranks."""

import json
import os
import signal
import time
from pathlib import Path

import pytest
from runs import assert_equal_runs, kill_at, stable_rows, train
from test_preemption import start

import processes
from lmtrain.checkpoints import manifest, store
from lmtrain.files import read_jsonl

SETTINGS = ["trainer.max_steps=6", "trainer.val_check_interval=3", "checkpoint.keep_last=9"]
RANKS = {
    "one": ["data.micro_batch_size=6"],
    "ddp": ["data.micro_batch_size=3", "trainer.devices=2", "trainer.strategy=ddp"],
    "fsdp": ["data.micro_batch_size=3", "trainer.devices=2", "trainer.strategy=fsdp"],
}


def stop_in_validation(corpus: Path, run_dir: Path, *settings: str, after: int, to_rank: int | None = None) -> None:
    """Sends SIGTERM in the first batch of the validation after a step, which is then left unfinished."""
    marker = run_dir.with_name(f"validating_{time.monotonic_ns()}")  # each rank touches it, more than once
    slow = f"callbacks.extra=[{{_target_: slow.SlowValidation, seconds: 10, step: {after}, marker: {marker}}}]"
    process = start(corpus, run_dir, *settings, slow, "run.allow_target=[slow]")
    while not marker.exists():
        assert process.poll() is None, process.communicate()[0]
        time.sleep(0.05)
    os.kill(process.pid if to_rank is None else processes.ranks(process.pid)[to_rank], signal.SIGTERM)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 75, output
    assert max((row["step"] for row in read_jsonl(run_dir / "metrics.jsonl") if "val/loss" in row), default=-1) < after


def summary(run_dir: Path) -> dict:
    return json.loads((run_dir / "summary.json").read_text())


@pytest.mark.slow
@pytest.mark.parametrize("ranks", ["one", "ddp", pytest.param("fsdp", marks=pytest.mark.nightly)])
def test_stopped_in_every_validation(ranks: str, corpus: Path, tmp_path: Path) -> None:
    """Stops come in mid-run, again in the validation made up for, and after the last step, with nothing else to do."""
    settings = [*SETTINGS, *RANKS[ranks]]
    assert train(corpus, tmp_path / "whole", *settings).returncode == 0
    run_dir = tmp_path / "run"
    stop_in_validation(corpus, run_dir, *settings, after=3)
    # The owed validation comes before any step; only one rank gets the signal.
    stop_in_validation(corpus, run_dir, *settings, after=3, to_rank=None if ranks == "one" else 1)
    assert summary(run_dir)["step"] == 3
    stop_in_validation(corpus, run_dir, *settings, after=6)
    kept = manifest.read(run_dir / "checkpoints" / store.name_of(3))
    assert kept["metrics"]["val/loss"] > 0, "the score belongs to the checkpoint"
    found = summary(run_dir)
    assert (found["status"], found["step"]) == ("preempted", 6)
    assert train(corpus, run_dir, *settings).returncode == 0
    assert stable_rows(run_dir) == stable_rows(tmp_path / "whole")
    expected = summary(tmp_path / "whole")
    for key in ("status", "step", "tokens", "last", "best", "best_metric", "validation"):
        assert summary(run_dir)[key] == expected[key], key


BEFORE = [*SETTINGS, "trainer.val_before_training=true"]


@pytest.mark.slow
def test_killed_around_the_validation_before_training(corpus: Path, tmp_path: Path) -> None:
    """After kills during it, right after it and after the first checkpoint, it is recorded exactly once."""
    given = [*BEFORE, *RANKS["one"]]
    assert train(corpus, tmp_path / "whole", *given).returncode == 0
    assert [row["step"] for row in stable_rows(tmp_path / "whole") if "val/loss" in row] == [0, 3, 6]
    for place, step in (("mid_validation", 0), ("mid_step", 0), ("mid_step", 2)):
        assert train(corpus, tmp_path / "run", *given, *kill_at(place, step)).returncode == -signal.SIGKILL
    assert train(corpus, tmp_path / "run", *given).returncode == 0
    assert_equal_runs(tmp_path / "run", tmp_path / "whole")


@pytest.mark.slow
@pytest.mark.parametrize("ranks", ["one", "ddp"])
def test_stopped_in_the_validation_before_training(ranks: str, corpus: Path, tmp_path: Path) -> None:
    """Nothing can be saved yet, so the same command begins again. Two ranks validate as one does."""
    settings = [*BEFORE, *RANKS[ranks]]
    run_dir = tmp_path / "run"
    stop_in_validation(corpus, run_dir, *settings, after=0, to_rank=None if ranks == "one" else 1)
    assert (summary(run_dir)["status"], summary(run_dir)["step"]) == ("preempted", 0)
    assert not store.scan(run_dir / "checkpoints")
    assert train(corpus, run_dir, *settings).returncode == 0
    assert train(corpus, tmp_path / "without", *settings, "trainer.val_before_training=false").returncode == 0
    first, *rest = stable_rows(run_dir)
    assert (first["step"], "val/loss" in first) == (0, True)
    assert rest == stable_rows(tmp_path / "without")
