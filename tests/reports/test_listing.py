"""`lmtrain.runs`: real runs that finished, were killed or still run, and folders that are no runs."""

import subprocess
import sys
import time
from pathlib import Path

import pytest

from inprocess import message, run
from lmtrain.files import read_jsonl
from lmtrain.reports.listing import runs_under, show
from lmtrain.reports.report import reported_run
from lmtrain.run_folder.folder import RunDir
from support import TINY, lingers

SHORT = [*TINY, "data=text", "trainer.max_steps=4", "trainer.val_check_interval=2", "trainer.limit_val_batches=2",
         "callbacks.samples.every_n_validations=0", "export.enabled=false"]  # fmt: skip


@pytest.mark.slow
def test_finished_killed_and_running(corpus: Path, tmp_path: Path) -> None:
    root, common = tmp_path / "outputs", [*SHORT, f"data.path={corpus}"]
    assert run("train", *common, f"run.dir={root / 'a' / 'first'}").code == 0
    slow = [sys.executable, "-m", "lmtrain.train", *common, f"run.dir={root / 'second'}", *lingers(3)]
    process = subprocess.Popen(slow, env=_with_tests(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        while process.poll() is None and not any(r["step"] >= 3 for r in read_jsonl(root / "second/metrics.jsonl")):
            time.sleep(0.05)
        states = {str(r.path.relative_to(root)): r for r in runs_under(root)}
        assert states["second"].status == "running"
    finally:
        process.kill()
        process.wait()
    second, first = runs_under(root)
    assert (first.status, first.step, first.max_steps) == ("finished", 4, 4)
    rows = [r for r in read_jsonl(first.path / "metrics.jsonl") if "val/loss" in r]
    best = min(rows, key=lambda r: r["val/loss"])
    assert first.best == f"val/bits_per_byte {best['val/bits_per_byte']:.4f} at step {best['step']}"
    assert (second.status, second.step) == ("interrupted", 3)
    (first.path / "summary.json").write_text("{half")
    done = run("runs", str(root))
    assert done.code == 0
    assert "a/first" in done.out
    assert "unreadable" in done.out
    assert "3 of 4" in done.out


def test_a_finished_run_and_one_that_cannot_be_read(corpus: Path, tmp_path: Path) -> None:
    root = tmp_path / "outputs"
    assert run("train", *SHORT, f"data.path={corpus}", f"run.dir={root / 'first'}").code == 0
    (first,) = runs_under(root)
    assert (first.status, first.step, first.max_steps) == ("finished", 4, 4)
    (first.path / "summary.json").write_text("{half")
    done = run("runs", str(root))
    assert done.code == 0
    assert "unreadable" in done.out


def test_a_run_that_the_clock_ended_is_whole(tmp_path: Path) -> None:
    """A run with budget.minutes ends after fewer or more steps than expected; config.yaml has the expected number."""
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.yaml").write_text("trainer: {max_steps: 76}\ncheckpoint: {}\n")
    (tmp_path / "run" / "summary.json").write_text('{"status": "finished", "step": 57}')
    assert [listed.steps() for listed in runs_under(tmp_path)] == ["57 of 57"]


def test_the_score_before_training_is_not_the_best(tmp_path: Path) -> None:
    """A pretrained model may have begun with it, but no checkpoint has it."""
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.yaml").write_text("trainer: {max_steps: 4}\ncheckpoint: {}\n")
    scores = {0: 1.0, 2: 3.0, 4: 2.0}
    rows = [f'{{"step": {step}, "val/loss": {score}}}\n' for step, score in scores.items()]
    (tmp_path / "run" / "metrics.jsonl").write_text("".join(rows))
    assert [listed.best for listed in runs_under(tmp_path)] == ["val/loss 2.0000 at step 4"]
    assert reported_run(RunDir(tmp_path / "run")).score == 2.0


def _with_tests() -> dict[str, str]:
    import os

    return {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1] / "resume")}


@pytest.mark.parametrize("folder", ["empty", "nowhere"])
def test_no_run_is_said(tmp_path: Path, folder: str) -> None:
    (tmp_path / "empty").mkdir()
    done = run("runs", str(tmp_path / folder))
    assert done.code == 2
    assert "holds no run" in message(done.err)


@pytest.mark.parametrize(("columns", "left_out"), [(200, ""), (80, "data"), (50, "changed")])
def test_each_run_takes_one_line_where_columns_can_be_left_out(
    columns: int, left_out: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("a_run", "another_run"):
        (tmp_path / name / "checkpoints").mkdir(parents=True)
        (tmp_path / name / "config.yaml").write_text(
            "data:\n  path: some/folder/with/a/long/name/conversations.jsonl\n"
        )
        (tmp_path / name / "summary.json").write_text('{"status": "finished", "step": 1234}')
    monkeypatch.setenv("COLUMNS", str(columns))
    assert show(tmp_path) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if line.strip()]
    assert len(lines) == 4, "two runs, a heading and a line below it"
    assert max(map(len, lines)) <= columns
    assert ("changed" in lines[0]) == (left_out != "changed")
    assert ("conversations.jsonl" in lines[2]) == (not left_out)
    assert "1,234 of 1,234" in lines[2]
