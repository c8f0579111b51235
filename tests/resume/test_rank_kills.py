"""SIGKILL of one of two ranks anywhere, or a signal to any process: the resumed run equals the uninterrupted one."""

import json
import os
import signal
from pathlib import Path

import pytest
from runs import assert_equal_runs, kill_at, train
from test_preemption import start, wait_for_step

import processes
from lmtrain.checkpoints import store
from lmtrain.files import read_jsonl
from support import lingers

RANKS = ["trainer.devices=2", "data.micro_batch_size=3"]
PLACES = [  # place, step and rank; only rank 0 writes
    ("mid_step", 1, 1),  # before the first checkpoint: starts over
    ("mid_save", 2, 0),
    ("mid_save", 2, 1),
    ("before_publish", 4, 0),
    ("mid_validation", 6, 1),
    ("before_prune", 8, 0),
    ("mid_validation", 9, 0),
    ("mid_prune", 10, 0),
    ("mid_step", 11, 0),
    ("before_prune", 12, 0),  # nothing is left to train
]


@pytest.fixture(scope="module", params=["ddp", "fsdp"])
def strategy(request: pytest.FixtureRequest) -> str:
    return f"trainer.strategy={request.param}"


@pytest.fixture(scope="module")
def whole(strategy: str, corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run_dir = tmp_path_factory.mktemp("whole") / "run"
    done = train(corpus, run_dir, *RANKS, strategy)
    assert done.returncode == 0, done.stdout + done.stderr
    return run_dir


@pytest.mark.nightly
@pytest.mark.slow
def test_killed_ranks_start_again_by_themselves(whole: Path, strategy: str, corpus: Path, tmp_path: Path) -> None:
    """Covers every place in one command: after each kill the launcher ends the other rank and starts both again.

    Under fsdp both ranks write the checkpoint; the result equals what rank 0 alone writes.
    """
    targets = ",".join(
        f"{{_target_: killer.KillAt, place: {place}, step: {step}, rank: {rank}, marker: {tmp_path / str(n)}}}"
        for n, (place, step, rank) in enumerate(PLACES)
    )
    settings = [f"callbacks.extra=[{targets}]", "run.allow_target=[killer]", f"trainer.max_restarts={len(PLACES)}",
                f"trainer.fsdp.sharded_checkpoint={'fsdp' in strategy}"]  # fmt: skip
    done = train(corpus, tmp_path / "run", *RANKS, strategy, *settings, timeout=900)
    assert done.returncode == 0, done.stdout + done.stderr
    assert all((tmp_path / str(n)).exists() for n in range(len(PLACES)))
    assert_equal_runs(whole, tmp_path / "run")


@pytest.mark.slow
def test_a_killed_rank_ends_the_run(whole: Path, strategy: str, corpus: Path, tmp_path: Path) -> None:
    """Rank 0 is killed under ddp and rank 1 under fsdp: the launcher sees processes, not what they compute."""
    rank = 0 if "ddp" in strategy else 1
    run_dir = tmp_path / "run"
    words = kill_at("mid_step", 7)
    process = start(corpus, run_dir, *RANKS, strategy, words[0].replace("step: 7", f"step: 7, rank: {rank}"), words[1])
    wait_for_step(process, run_dir, 1)
    family = processes.below(process.pid)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 1
    processes.wait_until_gone(family, 60)
    assert f"rank {rank} failed first, ended by SIGKILL: the machine ran out of memory, most likely" in output
    done = train(corpus, run_dir, *RANKS, strategy)
    assert done.returncode == 0, done.stdout + done.stderr
    assert_equal_runs(whole, run_dir)


LONG = [*RANKS, "trainer.max_steps=120", "trainer.val_check_interval=50", "trainer.save_every_n_steps=40"]


@pytest.mark.slow
def test_a_signal_to_any_process_stops_all_at_one_step(strategy: str, corpus: Path, tmp_path: Path) -> None:
    settings, run_dir = [*LONG, strategy], tmp_path / "run"
    assert train(corpus, tmp_path / "whole", *settings).returncode == 0
    reached = 0
    for target in ("parent", "group", "rank 0", "rank 1"):
        process = start(corpus, run_dir, *settings, *lingers(reached + 10))
        wait_for_step(process, run_dir, reached + 10)
        family = processes.below(process.pid)
        send(process.pid, target)
        output, _ = process.communicate(timeout=60)
        assert process.returncode == 75, f"{target}:\n{output}"
        processes.wait_until_gone(family, 60)
        summary = json.loads((run_dir / "summary.json").read_text())
        last_logged = max(row["step"] for row in read_jsonl(run_dir / "metrics.jsonl"))
        assert summary["status"] == "preempted"
        assert summary["step"] == last_logged == store.step_of(store.scan(run_dir / "checkpoints")[-1])
        assert f"stopped by {'a signal to another rank' if target == 'rank 1' else 'SIGTERM'}" in output
        reached = summary["step"]
    assert reached < 120, "the last signal came when nothing was left to interrupt"
    assert train(corpus, run_dir, *settings).returncode == 0
    assert_equal_runs(tmp_path / "whole", run_dir)


@pytest.mark.slow
def test_a_signal_that_reaches_the_first_rank_last_is_named(corpus: Path, tmp_path: Path) -> None:
    stop = ["callbacks.extra=[{_target_: slow.StopOneThenAll, step: 5}]", "run.allow_target=[slow]"]
    done = train(corpus, tmp_path / "run", *RANKS, *stop)
    assert done.returncode == 75, done.stdout + done.stderr
    assert "stopped by SIGTERM at step" in done.stdout


def send(parent: int, target: str) -> None:
    if target == "group":
        os.killpg(parent, signal.SIGTERM)
    else:
        os.kill(parent if target == "parent" else processes.ranks(parent)[int(target[-1])], signal.SIGTERM)
