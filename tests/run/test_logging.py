"""Values logged by a user's callback or module reach every logger once, at their step, also across a resume."""

import csv
import json
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from inprocess import message, train_tiny
from lmtrain.callbacks.metrics import TIME_FIELDS, without_times
from support import Run, rows

USER = ["run.allow_target=[users_callbacks,inprocess]", "export.enabled=false", "run.dir=run", "run.resume=auto"]
LOGS = "{_target_: users_callbacks.LogsAll}"
RATE = "{_target_: lightning.pytorch.callbacks.LearningRateMonitor}"
STATS = "{_target_: lightning.pytorch.callbacks.DeviceStatsMonitor, cpu_stats: true}"
SIX = [
    "trainer.max_steps=6",
    "trainer.log_every_n_steps=2",
    "trainer.val_check_interval=3",
    "trainer.save_every_n_steps=2",
]


def logged(path: Path) -> list[dict[str, Any]]:
    return [without_times(row) for row in rows(path)]


def test_everything_logged_stands_in_its_steps_record(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    plain = train_tiny(corpus, *SIX, *USER, "run.dir=plain", "run.resume=none")
    done = train_tiny(
        corpus, *SIX, *USER, f"callbacks.extra=[{LOGS}]", "logger=[tensorboard,csv]", "checkpoint.monitor=val/mine"
    )
    assert (plain.code, done.code) == (0, 0), done.err
    found = logged(tmp_path / "run" / "metrics.jsonl")
    train = {row["step"]: row for row in found if "val/loss" not in row}
    validations = {row["step"]: row for row in found if "val/loss" in row}
    assert len(found) == len(train) + len(validations)  # one object each
    assert train.pop(0) == {"step": 0, "at_start": 1.0}
    for step in (1, 2, 4, 6):
        mine = {
            "before_step": step - 1,
            "mine/step": step,
            "mine/direct": 10 * step,
            "mine/rank": 0,
            "mine/mean_rank": 0,
        }
        assert mine.items() <= train[step].items()
        assert "train/loss" in train[step]
        assert "mine/once" not in train[step]  # logged in step 3 only
    assert train[3] == {"step": 3, "mine/direct": 30.0}  # Lightning's log keeps to log_every_n_steps
    assert {step: row["val/mine"] for step, row in validations.items()} == {3: 97.0, 6: 94.0}
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["best_metric"] == {"val/mine": 94.0}
    # The keys and order of lmtrain's own numbers are those of a run without callbacks.
    own = [row for row in found if "tokens_seen" in row]
    before = logged(tmp_path / "plain" / "metrics.jsonl")
    assert [list(row)[: len(b)] for row, b in zip(own, before, strict=True)] == [list(b) for b in before]
    assert all(b.items() <= row.items() for row, b in zip(own, before, strict=True))
    assert train[6]["mine/epoch_mean"] == 3.5


def scalars(folder: Path) -> dict[str, list[tuple[int, float]]]:
    events = EventAccumulator(str(folder), size_guidance={"scalars": 0})
    events.Reload()
    return {tag: [(e.step, e.value) for e in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


def test_a_killed_run_goes_on_without_doubles(corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    loggers = ["logger=[tensorboard,csv]"]
    whole = train_tiny(corpus, *SIX, *USER, *loggers, f"callbacks.extra=[{LOGS}]", "run.dir=whole")
    assert whole.code == 0, whole.err
    with pytest.raises(ZeroDivisionError):
        train_tiny(corpus, *SIX, *USER, *loggers, f"callbacks.extra=[{LOGS},{{_target_: inprocess.Breaks, at: 5}}]")
    assert rows(tmp_path / "run" / "metrics.jsonl")[-1]["step"] == 4
    # As after a kill: records and TensorBoard events exist beyond the last checkpoint.
    done = train_tiny(corpus, *SIX, *USER, *loggers, f"callbacks.extra=[{LOGS}]", "trainer.save_every_n_steps=4")
    assert done.code == 0, done.err
    a, b = (logged(tmp_path / name / "metrics.jsonl") for name in ("whole", "run"))
    for row in (*a, *b):
        row.pop("mine/epoch_mean", None)  # over the steps since the last start
    assert a == b
    assert scalars_alike(tmp_path / "whole" / "tensorboard", tmp_path / "run" / "tensorboard")
    steps = [row["step"] for row in csv.DictReader((tmp_path / "run" / "csv" / "metrics.csv").open())]
    assert steps == [row["step"] for row in csv.DictReader((tmp_path / "whole" / "csv" / "metrics.csv").open())]


def scalars_alike(a: Path, b: Path) -> bool:
    timed = (*TIME_FIELDS, "mine/epoch_mean")
    left, right = ({k: v for k, v in scalars(p).items() if k not in timed} for p in (a, b))
    doubles = {tag: found for tag, found in right.items() if len({step for step, _ in found}) < len(found)}
    assert doubles == {}
    assert left == right
    return True


@pytest.mark.parametrize(
    ("callback", "says"),
    [
        ("at: on_train_batch_end, what: [1.0, 2.0]", "must have a single element"),
        ("at: on_train_batch_end, what: high", "was called, but"),
        ("at: on_train_batch_end, what: [1.0, 2.0], directly: true", "mine was logged with a tensor of shape (2,)"),
        ("at: on_train_batch_end, what: high, directly: true", "mine was logged with a str"),
        ("at: on_fit_start, what: 1.0", "You can't `self.log()` inside `on_fit_start`"),
        ("at: on_fit_start, what: 1.0, directly: true", "mine was logged before training"),
    ],
)
def test_what_no_record_can_hold_is_refused(
    callback: str, says: str, corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    ended = train_tiny(corpus, *USER, f"callbacks.extra=[{{_target_: users_callbacks.LogsOnce, {callback}}}]")
    assert ended.code == 1
    assert says in message(ended.err)


def test_a_callback_that_accumulates_is_an_error(corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    ended = train_tiny(corpus, *USER, "callbacks.extra=[{_target_: users_callbacks.Accumulates}]")
    assert ended.code == 1
    assert "trainer.accumulate_grad_batches=2" in message(ended.err)
    assert "data.global_batch_size says how many rows it has" in message(ended.err)


def test_a_monitor_that_is_never_logged_is_an_error(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    ended = train_tiny(corpus, *USER, f"callbacks.extra=[{LOGS}]", "checkpoint.monitor=val/yours")
    assert ended.code == 1
    assert "checkpoint.monitor=val/yours was not logged in the validation after step 1" in message(ended.err)


@pytest.mark.slow
def test_two_ranks_log_their_mean(corpus: Path, tmp_path: Path, forked_lmtrain: Run) -> None:
    from support import TINY

    done = forked_lmtrain("train", *TINY, *SIX, *USER, "data=text", f"data.path={corpus}", "data.global_batch_size=8",
                   "trainer.devices=2", f"callbacks.extra=[{LOGS},{RATE},{STATS}]", timeout=600,
                   env={"PYTHONPATH": str(Path(__file__).parent)})  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = rows(tmp_path / "run" / "metrics.jsonl")
    assert [r["mine/mean_rank"] for r in found if "mine/mean_rank" in r] == [0.5] * 4
    assert [r["val/mine"] for r in found if "val/mine" in r] == [97.0, 94.0]
    for row in (r for r in found if "train/loss" in r and r["step"] > 1):
        assert {value for name, value in row.items() if name.startswith("lr-AdamW")} == {row["lr"]}
        assert any(name.startswith("DeviceStatsMonitor.on_train_batch_end/cpu_") for name in row)


def test_every_token_is_counted_beyond_what_fp32_holds(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    late = "callbacks.extra=[{_target_: users_callbacks.LongAgo, tokens: 20000001}]"
    ended = train_tiny(corpus, *USER, "run.resume=none", late)
    assert ended.code == 0, ended.err
    found = [row["tokens_seen"] for row in logged(tmp_path / "run" / "metrics.jsonl") if "train/loss" in row]
    assert found == [20_000_001 + 6 * 32, 20_000_001 + 2 * 6 * 32]
