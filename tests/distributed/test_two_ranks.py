"""Two gloo ranks give one process's losses, gradient norms and validation, and end if the parent dies or one hangs."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from test_launch import environment

from lmtrain.files import read_jsonl
from support import EXPORT, SAMPLES, TINY, Run, rows

SETTINGS = [
    *TINY,
    EXPORT,
    SAMPLES,
    "data=text",
    "trainer.max_steps=20",
    "trainer.val_check_interval=10",
    "trainer.limit_val_batches=3",
]


def settings(corpus: Path, run_dir: Path, devices: int) -> list[str]:
    batch = ["data.global_batch_size=8", "data.micro_batch_size=2"]
    return [*SETTINGS, *batch, f"data.path={corpus}", f"run.dir={run_dir}", f"trainer.devices={devices}"]


@pytest.mark.slow
def test_numbers_do_not_depend_on_the_number_of_ranks(corpus: Path, tmp_path: Path, forked_lmtrain: Run) -> None:
    for devices in (1, 2):
        done = forked_lmtrain("train", *settings(corpus, tmp_path / str(devices), devices))
        assert done.returncode == 0, done.stdout + done.stderr
    one, two = (rows(tmp_path / n / "metrics.jsonl") for n in ("1", "2"))
    assert len(one) == len(two) == 22
    for a, b in zip(one, two, strict=True):
        assert a.get("rows") == b.get("rows")
        assert a["tokens_seen"] == b["tokens_seen"]
        for key in ("train/loss", "val/loss", "grad_norm"):
            if key in a:
                assert b[key] == pytest.approx(a[key], rel=1e-5), (a["step"], key)
    assert (tmp_path / "2" / "export" / "model.safetensors").exists()
    assert not (tmp_path / "2" / "ranks").exists()


@pytest.mark.slow
def test_ranks_of_a_killed_parent_save_and_leave(corpus: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    command = [*settings(corpus, run_dir, 2), "trainer.max_steps=40000"]
    meetings = tmp_path / "tmp"
    meetings.mkdir()
    process = subprocess.Popen(
        [sys.executable, "-m", "lmtrain.train", *command], env=environment() | {"TMPDIR": str(meetings)},
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    while process.poll() is None and not any(r["step"] >= 15 for r in read_jsonl(run_dir / "metrics.jsonl")):
        time.sleep(0.02)
    process.kill()
    process.communicate(timeout=60)  # the ranks hold the pipe: this returns when they are gone
    assert json.loads((run_dir / "summary.json").read_text())["status"] == "preempted"
    assert (run_dir / "checkpoints" / "last").exists()
    assert not list(meetings.glob("lmtrain_*"))


@pytest.mark.slow
def test_a_rank_that_hangs_ends_the_run_in_the_time_that_is_set(corpus: Path, tmp_path: Path, lmtrain: Run) -> None:
    hangs = ["callbacks.extra=[{_target_: slow.HangsOnOneRank, step: 3}]", "run.allow_target=[slow]"]
    words = [*settings(corpus, tmp_path / "run", 2), "trainer.rank_timeout=8", "trainer.save_every_n_steps=2", *hangs]
    path = os.pathsep.join([str(Path(__file__).parents[1] / "resume"), os.environ.get("PYTHONPATH", "")])
    done = lmtrain("train", *words, env={"PYTHONPATH": path}, timeout=200)
    assert done.returncode == 1
    assert "rank 0 waited 8 s for another that did nothing (trainer.rank_timeout)" in done.stderr
    assert "the last checkpoint is untouched (step_00000002)" in done.stderr
    assert "Traceback" not in done.stderr
