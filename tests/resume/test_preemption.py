"""Signals and the time limit: a checkpoint at the next step boundary, exit code 75, and an equal run afterwards."""

import json
import os
import signal
import subprocess
import time
from pathlib import Path

import pytest
from runs import assert_equal_runs, command, environment, stable_rows, train, train_here

import forked
from lmtrain.checkpoints import store
from lmtrain.files import read_jsonl
from support import lingers

LONG = [
    "data.micro_batch_size=6",
    "trainer.max_steps=120",
    "trainer.val_check_interval=50",
    "trainer.save_every_n_steps=30",
]
SIGNALS = [
    pytest.param(signal.SIGTERM, id="SIGTERM"),
    pytest.param(signal.SIGUSR1, id="SIGUSR1", marks=pytest.mark.slow),
    pytest.param(signal.SIGINT, id="SIGINT", marks=pytest.mark.slow),
]


def start(corpus: Path, run_dir: Path, *extra: str) -> forked.Started:
    return forked.Started(command(corpus, run_dir, *extra)[1:], environment())


def wait_for_step(process: forked.Started, run_dir: Path, step: int) -> None:
    while process.poll() is None:
        if any(row["step"] >= step for row in read_jsonl(run_dir / "metrics.jsonl")):
            return
        time.sleep(0.005)
    raise AssertionError(f"ended before step {step}: {process.communicate()[0]}")


@pytest.fixture(scope="module")
def whole(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run_dir = tmp_path_factory.mktemp("whole") / "run"
    done = train_here(corpus, run_dir, *LONG)
    assert done.code == 0, done.err
    return run_dir


@pytest.mark.parametrize("number", SIGNALS)
def test_signal_saves_stops_and_resumes_equal(
    number: signal.Signals, whole: Path, corpus: Path, tmp_path: Path
) -> None:
    run_dir = tmp_path / "run"
    workers = ["data.num_workers=2"] if number == signal.SIGTERM else []
    process = start(corpus, run_dir, *LONG, *workers, *lingers(12))
    wait_for_step(process, run_dir, 12)
    # With loader workers the whole group gets it, as from a scheduler or a terminal.
    os.killpg(process.pid, number) if workers else process.send_signal(number)
    asked = time.monotonic()
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 75, output
    assert time.monotonic() - asked < 45
    summary = json.loads((run_dir / "summary.json").read_text())
    assert summary["status"] == "preempted"
    last_logged = max(row["step"] for row in read_jsonl(run_dir / "metrics.jsonl"))
    assert summary["step"] == last_logged == store.step_of(store.scan(run_dir / "checkpoints")[-1])
    assert f"stopped by {number.name}" in output
    assert f"run.dir={run_dir} run.resume=auto" in output, "it must say how to go on"

    resumed = train_here(corpus, run_dir, *LONG)
    assert resumed.code == 0, resumed.err
    assert stable_rows(run_dir) == stable_rows(whole)
    assert_equal_runs(whole, run_dir)


@pytest.mark.slow
def test_what_a_stop_saved_takes_no_checkpoints_place(corpus: Path, tmp_path: Path) -> None:
    """Stops come between scheduled saves; the last one's checkpoint would be among the newest at the end."""
    settings = ["data.micro_batch_size=6", "checkpoint.keep_last=2"]
    assert train_here(corpus, tmp_path / "whole", *settings).code == 0
    run_dir = tmp_path / "run"
    for step in (5, 7, 11):
        stop = [f"callbacks.extra=[{{_target_: slow.StopAt, step: {step}}}]", "run.allow_target=[slow]"]
        done = train(corpus, run_dir, *settings, *stop)
        assert done.returncode == 75, done.stdout + done.stderr
        kept = [store.step_of(p) for p in store.scan(run_dir / "checkpoints")]
        assert kept[-1] == step
        assert json.loads((run_dir / "summary.json").read_text())["last"] == f"checkpoints/{store.name_of(step)}"
    assert kept == [9, 10, 11], "the newest two of the schedule, one of them the best, and the one the stop made"
    assert train_here(corpus, run_dir, *settings).code == 0
    assert_equal_runs(tmp_path / "whole", run_dir)


def stop_in_c(corpus: Path, run_dir: Path, again: float, work: int) -> subprocess.CompletedProcess[str]:
    marker = run_dir.with_name("work_done")
    extra = f"[{{_target_: slow.StopInC, step: 7, again: {again}, work: {work}, marker: {marker}}}]"
    return train(corpus, run_dir, *LONG, f"callbacks.extra={extra}", "run.allow_target=[slow]")


@pytest.mark.slow
def test_a_signal_sent_twice_at_once_is_one_request(corpus: Path, tmp_path: Path) -> None:
    """This holds however late Python sees the second signal because of the step in which both come."""
    done = stop_in_c(corpus, tmp_path / "run", again=0.02, work=10)
    assert done.returncode == 75, done.stdout + done.stderr
    assert [store.step_of(p) for p in store.scan(tmp_path / "run" / "checkpoints")] == [7]


def test_ctrl_c_is_answered_within_a_long_step(corpus: Path, tmp_path: Path) -> None:
    """The first at once, while the step goes on; the second ends the process and says how to continue."""
    run_dir, marker = tmp_path / "run", tmp_path / "in_the_step"
    busy = f"callbacks.extra=[{{_target_: slow.BusyInC, step: 7, marker: {marker}}}]"
    process = start(corpus, run_dir, *LONG, busy, "run.allow_target=[slow]")
    while not marker.exists():
        assert process.poll() is None, process.communicate()[0]
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    process.wait_for("\nSIGINT: stopping after this step; press Ctrl-C again to stop at once")
    assert process.poll() is None, "it is still in that step"
    time.sleep(0.7)
    process.send_signal(signal.SIGINT)
    rest, _ = process.communicate(timeout=20)
    assert process.returncode == -signal.SIGINT, rest
    said, command = rest.splitlines()[-2:]
    assert said == "stopped at once; from the last checkpoint it continues with:"
    assert command.startswith("  python -m lmtrain.train ")
    assert command.endswith(f"run.dir={run_dir} run.resume=auto")


@pytest.mark.slow
def test_a_second_signal_ends_what_hangs(corpus: Path, tmp_path: Path) -> None:
    done = stop_in_c(corpus, tmp_path / "run", again=2.5, work=300)
    assert done.returncode == -signal.SIGTERM, done.stdout + done.stderr
    assert not (tmp_path / "work_done").exists()


@pytest.mark.slow
def test_a_second_signal_ends_a_save(corpus: Path, tmp_path: Path) -> None:
    run_dir, marker = tmp_path / "run", tmp_path / "saving"
    settings = [*LONG, "trainer.val_check_interval=null"]
    # The first signal comes after a save at step 30, which SlowSave doesn't slow down.
    slow = f"callbacks.extra=[{{_target_: slow.StopAt, step: 40}}, {{_target_: slow.SlowSave, marker: {marker}}}]"
    process = start(corpus, run_dir, *settings, slow, "run.allow_target=[slow]")
    while not marker.exists():
        assert process.poll() is None, process.communicate()[0]
        time.sleep(0.02)
    time.sleep(2.5)
    assert process.poll() is None, "the slow save should still be running"
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=60)
    assert process.returncode == -signal.SIGTERM
    kept = store.scan(run_dir / "checkpoints")
    assert store.step_of(kept[-1]) == 30
    assert store.damage(kept[-1]) is None


@pytest.mark.slow
@pytest.mark.parametrize("devices", [1, 2])
def test_time_limit(devices: int, corpus: Path, tmp_path: Path) -> None:
    run_dir, settings = tmp_path / "run", [*LONG, "data.micro_batch_size=3", f"trainer.devices={devices}"]
    done = train(corpus, run_dir, *settings, "trainer.max_steps=100000", "run.time_limit=00:00:08")
    assert done.returncode == 75, done.stdout + done.stderr
    assert "stopped by run.time_limit" in done.stdout
    assert store.scan(run_dir / "checkpoints")


@pytest.mark.slow
def test_a_long_validation_is_interrupted_and_owed(corpus: Path, tmp_path: Path) -> None:
    """A signal during a validation ends it at once, and the resumed run begins with it."""
    settings = ["data.micro_batch_size=6", "trainer.max_steps=6", "trainer.val_check_interval=3"]
    whole = tmp_path / "whole"
    assert train_here(corpus, whole, *settings).code == 0
    run_dir = tmp_path / "run"
    batches = tmp_path / "batches"
    slow = f"callbacks.extra=[{{_target_: slow.SlowValidation, seconds: 30, marker: {batches}}}]"
    extra = [slow, "run.allow_target=[slow]"]
    process = start(corpus, run_dir, *settings, *extra)
    while not batches.exists():
        assert process.poll() is None, process.communicate()[0]
        time.sleep(0.02)
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 75, output
    assert batches.read_text() == "1", "of three batches the first alone was begun"
    assert not any("val/loss" in row for row in read_jsonl(run_dir / "metrics.jsonl"))
    assert train_here(corpus, run_dir, *settings).code == 0
    assert stable_rows(run_dir) == stable_rows(whole)
