"""budget.minutes: the number of steps it chooses, what it gives way to, and that a continued run keeps the number."""

import json
from pathlib import Path

import pytest
import yaml

from inprocess import message
from lmtrain.config import compose as rules
from lmtrain.errors import UserError
from lmtrain.planning.budget import Measured, steps_within
from support import TINY, rows

WORDS = ["data=text", "trainer.accelerator=cpu", "trainer.val_check_interval=50", "run.name=timed"]


def config(*words: str):
    return rules.check(rules.compose([*TINY, "trainer.val_check_interval=50", *words]))


def test_the_steps_fill_what_starting_validations_and_the_end_leave() -> None:
    took = Measured(starting=12.0, step=0.5, validation=5.0)
    steps = steps_within(600.0, took, config("budget.minutes=10"))
    used = 12 + 0.5 * steps + 5 * (steps / 50 + 1) + 4  # one validation every 50 steps and after the last
    assert used <= 600 < used + 0.5 + 5 / 50


def test_a_budget_without_time_for_training_says_how_much_is_needed() -> None:
    took = Measured(starting=50.0, step=2.0, validation=20.0)
    with pytest.raises(UserError, match=r"budget.minutes=1: .* 0 steps of 2.00 s: give it 1.6 minutes or more"):
        steps_within(60.0, took, config("budget.minutes=1"))
    assert steps_within(60 * 1.7, took, config("budget.minutes=1.7")) == 11


def test_a_run_keeps_the_number_when_it_is_continued(lmtrain, corpus: Path, tmp_path: Path) -> None:
    words = [*TINY, *WORDS, f"data.path={corpus}", f"run.root={tmp_path}"]
    assert lmtrain("train", *words, "trainer.max_steps=4", "run.time_limit=00:00:01").returncode in (0, 75)
    done = lmtrain("train", *words, "budget.minutes=1")
    assert done.returncode == 0, done.stderr
    assert "measuring" not in done.stdout
    assert json.loads((tmp_path / "timed" / "summary.json").read_text())["step"] == 4


@pytest.mark.slow
def test_the_schedule_ends_with_the_steps_that_were_chosen(lmtrain, corpus: Path, tmp_path: Path) -> None:
    words = [*TINY, *WORDS, f"data.path={corpus}", "budget.minutes=1.5", f"run.root={tmp_path}"]
    done = lmtrain("train", *words)
    assert done.returncode == 0, done.stderr
    chosen = yaml.safe_load((tmp_path / "timed" / "config.yaml").read_text())["trainer"]["max_steps"]
    assert chosen >= 10
    assert f"budget.minutes=1.5 chose trainer.max_steps={chosen:,}" in (tmp_path / "timed" / "plan.txt").read_text()
    assert not list(tmp_path.glob("budget*"))  # of the measurement
    summary = json.loads((tmp_path / "timed" / "summary.json").read_text())
    assert (summary["status"], summary["step"]) == ("finished", chosen)
    rates = [row["lr"] for row in rows(tmp_path / "timed" / "metrics.jsonl") if "lr" in row]
    assert rates[-1] < 0.2 * max(rates)


def test_a_typed_length_wins(lmtrain, corpus: Path, tmp_path: Path) -> None:
    words = [*TINY, *WORDS, f"data.path={corpus}", "budget.minutes=0.6", f"run.root={tmp_path}", "trainer.max_steps=3"]
    done = lmtrain("train", *words)
    assert done.returncode == 0, done.stderr
    assert "trainer.max_steps=3 was typed and decides the length: budget.minutes is left out" in done.stdout
    assert "measuring" not in done.stdout


def test_ranks_of_another_launcher_are_refused(lmtrain, corpus: Path) -> None:
    ranks = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1",
             "MASTER_PORT": "29511", "TORCHELASTIC_RUN_ID": "none"}  # fmt: skip
    done = lmtrain("train", *TINY, "data=text", f"data.path={corpus}", "budget.minutes=1", env=ranks)
    assert done.returncode == 2, done.stdout + done.stderr
    assert "start the run without torchrun and srun, or set trainer.max_steps" in " ".join(message(done.stderr).split())
