"""Resuming, listing and reporting a long run: only the ends of its logs are parsed, and little of them is held."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lmtrain.reports import listing, report
from lmtrain.reports.curves import MAX_POINTS, Curve
from lmtrain.run import loggers
from lmtrain.run_folder.cut_back import cut_back
from lmtrain.run_folder.folder import RunDir

LENGTHS = [1_000, 20_000]  # steps


@pytest.fixture
def parsed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Returns a list that gets every JSON text that is parsed."""
    found: list[str] = []
    loads = json.loads
    monkeypatch.setattr(json, "loads", lambda text, **options: found.append(text) or loads(text, **options))
    return found


def log(path: Path, steps: int) -> list[str]:
    """Writes a record for each step and a validation every 500; returns the lines."""
    lines = []
    for step in range(1, steps + 1):
        lines.append(json.dumps({"step": step, "rows": 7, "train/loss": 2 + 1 / step, "padding": "x" * 200}) + "\n")
        if step % 500 == 0:
            lines.append(json.dumps({"step": step, "val/loss": 3 - step / steps}) + "\n")
    path.write_text("".join(lines))
    return lines


def folder(path: Path, steps: int, **summary: Any) -> RunDir:
    run = RunDir(path)
    path.mkdir()
    run.config.write_text(f"checkpoint:\n  monitor: val/loss\n  mode: min\ntrainer:\n  max_steps: {steps}\nother: 1\n")
    log(run.metrics, steps)
    if summary:
        run.summary.write_text(json.dumps({"step": steps, **summary}))
    return run


@pytest.mark.parametrize("steps", LENGTHS)
def test_resuming_parses_the_end_of_the_log(steps: int, tmp_path: Path, parsed: list[str]) -> None:
    path = tmp_path / "metrics.jsonl"
    lines = log(path, steps)
    stay = [line for line in lines if json.loads(line)["step"] <= steps - 100]
    parsed.clear()
    assert cut_back(path, steps - 100, True, pytest.fail) == len(stay)
    assert path.read_text() == "".join(stay)
    assert len(parsed) < 500


@pytest.mark.parametrize("harm", [b"garbage\n", b"\0" * 300 + b"\n", b"[1]\n"])
def test_damage_long_before_the_step_is_said(harm: bytes, tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    lines = [line.encode() for line in log(path, 5_000)]
    path.write_bytes(b"".join([*lines[:9], harm, *lines[10:]]))
    reported: list[str] = []
    assert cut_back(path, 5_000, True, reported.append) == len(lines) - 1
    assert "metrics.jsonl is damaged: line 10 can't be read" in reported[0]
    assert path.read_bytes() == b"".join([*lines[:9], *lines[10:]])


@pytest.mark.parametrize("steps", LENGTHS)
def test_trackers_get_what_is_logged_again(
    steps: int, tmp_path: Path, parsed: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loggers.WandB, "is_known", True)  # a server holds the run; else it gets everything again
    run, wandb, written = folder(tmp_path / "run", steps), loggers.WandB.__new__(loggers.WandB), list[int]()
    wandb.write_record = lambda row, validation: written.append(row["step"])  # type: ignore[method-assign]
    loggers.note_sent([wandb], run, steps - 100)
    assert wandb.sent["train/loss"] == set(range(steps - 100, steps + 1))
    loggers.write_again([wandb], run, steps - 10)
    assert sorted(set(written)) == list(range(steps - 10, steps + 1))
    assert len(parsed) < 1_500


@pytest.mark.parametrize("steps", LENGTHS)
def test_a_finished_run_is_listed_from_its_summary(steps: int, tmp_path: Path, parsed: list[str]) -> None:
    best = {"best": f"checkpoints/step_{steps:08d}", "best_metric": {"val/loss": 2.0}}
    run = folder(tmp_path / "run", steps, status="finished", **best)
    found = listing.read(run)
    assert (found.status, found.step, found.best) == ("finished", steps, f"val/loss 2.0000 at step {steps:,}")
    assert len(parsed) < 400


@pytest.mark.parametrize("steps", LENGTHS)
def test_a_killed_run_is_listed_from_its_validations(steps: int, tmp_path: Path, parsed: list[str]) -> None:
    found = listing.read(folder(tmp_path / "run", steps))
    assert (found.status, found.step, found.best) == ("interrupted", steps, f"val/loss 2.0000 at step {steps:,}")
    assert len(parsed) < 400 + steps // 500


def test_a_section_of_the_config_that_refers_to_another(tmp_path: Path) -> None:
    run = folder(tmp_path / "run", 10)
    run.config.write_text("a: &a {monitor: train/loss, mode: min}\ncheckpoint: *a\ntrainer: {max_steps: 10}\n")
    assert listing.read(run).best == "train/loss 2.1000 at step 10"


def test_a_report_holds_a_part_of_each_curve(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    held = []
    add: Callable[[Curve, int, float], None] = Curve.add
    monkeypatch.setattr(Curve, "add", lambda c, step, value: add(c, step, value) or held.append(len(c.x)))
    run = folder(tmp_path / "run", 20_000)
    run.samples.write_text("".join(json.dumps({"step": n, "prompt": "a", "text": str(n)}) + "\n" for n in range(5_000)))
    reported = report.reported_run(run)
    (train, val) = sorted(reported.charts["loss"], key=lambda curve: curve.name)
    assert max(held) <= 4 * MAX_POINTS
    assert (train.x[0], train.x[-1], max(train.y), min(train.y)) == (1, 20_000, 3.0, 2 + 1 / 20_000)
    assert val.x == list(range(500, 20_500, 500))
    gaps = [b - a for a, b in zip(train.x, train.x[1:], strict=False)]
    assert max(gaps) < 3 * 20_000 / MAX_POINTS, "early steps are drawn as finely as late ones"
    assert reported.score == 2.0
    samples = [sample.step for sample in reported.samples["a"]]
    assert (len(samples), samples[0], samples[-1]) == (15, 0, 4_999)
    assert all(abs(step - i * 4_999 / 14) < 20 for i, step in enumerate(samples))
