"""What may change on resume and what may not, and what happens to harmful updates."""

import json
import re
import shutil
from pathlib import Path

import pytest
from runs import stable_rows, train_here

from inprocess import Ended, snapshot
from lmtrain.checkpoints import store

BASE = [
    "data.micro_batch_size=6",
    "trainer.max_steps=4",
    "trainer.save_every_n_steps=4",
    "trainer.val_check_interval=null",
]


@pytest.fixture(scope="module")
def four_steps(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run_dir = tmp_path_factory.mktemp("four") / "run"
    done = train_here(corpus, run_dir, *BASE)
    assert done.code == 0, done.err
    return run_dir


def copy(run: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(run, tmp_path / "run", symlinks=True))


def said(text: str) -> str:
    """Returns printed text without the plan's frame and line breaks."""
    return re.sub(r"[\s│]+", " ", text)


@pytest.mark.parametrize(
    ("change", "name"),
    [("seed=2", "seed"), ("data.global_batch_size=12", "data.global_batch_size"), ("data.num_samples=9", "data")],
)
def test_a_change_that_makes_it_another_run_is_refused_by_name(
    change: str, name: str, four_steps: Path, corpus: Path, tmp_path: Path
) -> None:
    run_dir = copy(four_steps, tmp_path)
    before = snapshot(run_dir)
    done = train_here(corpus, run_dir, *BASE, "trainer.max_steps=6", change)
    assert done.code == 2, done.out
    assert f"trained with other settings: {name} (then" in done.err
    assert f"run.allow_change=[{name}]" in done.err
    assert snapshot(run_dir) == before

    allowed = train_here(corpus, run_dir, *BASE, "trainer.max_steps=6", change, f"run.allow_change=[{name}]")
    assert allowed.code == 0, allowed.err
    assert [r["step"] for r in stable_rows(run_dir) if "train/loss" in r] == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize("rule", ["keep", "rescale"])
def test_more_steps(rule: str, four_steps: Path, corpus: Path, tmp_path: Path) -> None:
    run_dir = copy(four_steps, tmp_path)
    done = train_here(corpus, run_dir, *BASE, "trainer.max_steps=8", f"run.schedule_on_resume={rule}")
    assert done.code == 0, done.err
    rates = [r["lr"] for r in stable_rows(run_dir) if "train/loss" in r]
    peak, floor = max(rates), 0.1 * max(rates)
    if rule == "keep":
        assert "keeps the schedule planned for 4" in said(done.out)
        assert rates[4:] == pytest.approx([floor] * 4, rel=1e-3), "past the planned end it stays at the floor"
    else:
        assert "planned for 4 steps, now spans 8" in said(done.out)
        assert floor < rates[4] < peak


def test_another_micro_batch_continues_the_same_rows(four_steps: Path, corpus: Path, tmp_path: Path) -> None:
    whole, run_dir = tmp_path / "whole", copy(four_steps, tmp_path)
    longer = ["trainer.max_steps=8", "run.schedule_on_resume=rescale", "model.dropout=0.1"]
    for directory, micro in ((whole, 6), (run_dir, 2)):
        done = train_here(corpus, directory, *BASE, *longer, f"data.micro_batch_size={micro}")
        assert done.code == 0, done.err
    rows_of = [[r["rows"] for r in stable_rows(d) if "train/loss" in r] for d in (whole, run_dir)]
    assert rows_of[0] == rows_of[1]


EXPLODING = [
    "optimizer.lr=1e30",
    "trainer.max_steps=50",
    "trainer.gradient_clip_val=null",
    "trainer.max_bad_steps=3",
    "optimizer.weight_decay=0",
    "callbacks.early_stopping.enabled=false",
]


@pytest.fixture(scope="module")
def exploding(tmp_path_factory: pytest.TempPathFactory, corpus: Path) -> tuple[Path, Ended]:
    """Trains at a learning rate that makes the loss overflow at once; the run ends after three bad steps."""
    run_dir = tmp_path_factory.mktemp("bad") / "run"
    done = train_here(corpus, run_dir, "data.micro_batch_size=2", *EXPLODING)
    return run_dir, done


def test_bad_steps_are_skipped_and_end_the_run(exploding: tuple[Path, Ended]) -> None:
    run_dir, done = exploding
    assert done.code == 1, done.err
    assert "3 updates in a row were skipped" in done.err
    assert "Traceback" not in done.err
    report_file = next(run_dir.glob("bad_step_*.json"))
    report = json.loads(report_file.read_text())
    assert report_file.with_suffix(".pt").exists()
    assert len(report["epoch_and_row_ids"]) == 6
    rows = stable_rows(run_dir)
    bad = [r["bad_steps"] for r in rows if "bad_steps" in r]
    assert bad[-1] >= 2
    assert rows[report["step"]]["train/loss"] is None, "not a number in JSON is null"
    # The checkpoints saved until then are undamaged.
    assert all(store.damage(p) is None for p in store.scan(run_dir / "checkpoints"))


def test_checkpoints_after_the_one_resumed_never_count(corpus: Path, tmp_path: Path) -> None:
    """A newer intact checkpoint is not silently ignored; a damaged one doesn't displace those saved later."""
    run_dir = tmp_path / "run"
    settings = [*BASE, "trainer.save_every_n_steps=2", "checkpoint.keep_last=2"]
    assert train_here(corpus, run_dir, *settings).code == 0
    older, newer = store.scan(run_dir / "checkpoints")
    refused = train_here(corpus, run_dir, *settings, f"run.resume={older}", "trainer.max_steps=6")
    assert refused.code == 2
    assert "has gone on to step_00000004" in " ".join(refused.err.split())
    (newer / "model.pt").write_bytes(b"damaged")
    (run_dir / "summary.json").unlink()
    again = train_here(corpus, run_dir, *settings, "trainer.max_steps=3", "trainer.save_every_n_steps=1")
    assert again.code == 0, again.err
    kept = store.scan(run_dir / "checkpoints")
    assert [store.step_of(path) for path in kept] == [2, 3]
    assert all(store.damage(path) is None for path in kept)
    assert (run_dir / "checkpoints" / "step_00000004.damaged" / "model.pt").read_bytes() == b"damaged"
