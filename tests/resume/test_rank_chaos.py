"""Random kills of random processes of a run on two ranks until it is done: it equals one that was never interrupted."""

import contextlib
import os
import random
import signal
import time
from pathlib import Path

import pytest
from runs import assert_equal_runs, command, environment, train

import forked
import processes
from lmtrain.files import read_jsonl

KILLS = 3
SETTINGS = ["trainer.devices=2", "data.micro_batch_size=3", "trainer.max_steps=500", "trainer.val_check_interval=100",
            "trainer.save_every_n_steps=40", "checkpoint.keep_last=3"]  # fmt: skip
TARGETS = ["rank 0", "rank 1", "parent", "group", "all"]  # "group": the parent's process group; "all": each process


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_chaos_on_two_ranks(strategy: str, corpus: Path, tmp_path: Path) -> None:
    """Kills come from start-up on; the seed is printed and can be set to repeat a run."""
    seed = int(os.environ.get("LMTRAIN_CHAOS_SEED", time.time_ns() % 2**32))
    print(f"LMTRAIN_CHAOS_SEED={seed}")
    draw = random.Random(seed)
    settings = [*SETTINGS, f"trainer.strategy={strategy}", f"checkpoint.async_save={draw.random() < 0.5}"]
    if strategy == "fsdp":
        settings.append(f"trainer.fsdp.sharded_checkpoint={draw.random() < 0.5}")
    print(settings)
    whole, run_dir = tmp_path / "whole", tmp_path / "run"
    assert train(corpus, whole, *settings).returncode == 0
    for _ in range(KILLS):
        kill_once(draw, command(corpus, run_dir, *settings), run_dir)
    done = train(corpus, run_dir, *settings)
    assert done.returncode == 0, f"seed {seed}:\n{done.stdout}\n{done.stderr}"
    assert_equal_runs(whole, run_dir)


def kill_once(draw: random.Random, words: list[str], run_dir: Path) -> None:
    """Starts the run, signals one of its processes at a random moment, and waits until all of them end."""
    number, target = draw.choice([signal.SIGKILL, signal.SIGTERM]), draw.choice(TARGETS)
    begins, steps = draw.random() < 0.25, draw.randint(1, 150)
    before = last_step(run_dir)
    started = time.monotonic()
    run = forked.Started(words[1:], environment())
    seconds = draw.uniform(1.0, 8.0)
    while run.poll() is None and (
        time.monotonic() - started < seconds if begins else last_step(run_dir) < before + steps
    ):
        time.sleep(0.01)
    family = processes.below(run.pid)
    told = f"{number.name} to {target} after {time.monotonic() - started:.1f} s"
    send(run, target, number)
    processes.wait_until_gone(family, 60)
    output, _ = run.communicate(timeout=60)
    print(f"{told}: exit code {run.returncode}, step {last_step(run_dir)}")
    # 1: a rank was killed, or there was nothing to save yet.
    assert run.returncode in (0, 1, 75, -signal.SIGKILL, -signal.SIGTERM), f"{told}:\n{output}"


def last_step(run_dir: Path) -> int:
    return max((row["step"] for row in read_jsonl(run_dir / "metrics.jsonl")), default=0)


def send(run: forked.Started, target: str, number: signal.Signals) -> None:
    """Sends the signal to the target, or to the parent if there are no ranks yet."""
    ranks = processes.ranks(run.pid) if target.startswith("rank") or target == "all" else []
    pids = [*ranks, run.pid] if target == "all" else (ranks[int(target[-1]) :][:1] if ranks else []) or [run.pid]
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):  # it has just ended
            os.killpg(pid, number) if target == "group" else os.kill(pid, number)
