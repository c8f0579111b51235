"""Random kills until the run is done: it equals one that was never interrupted."""

import os
import random
import signal
import time
from pathlib import Path

import pytest
from runs import assert_equal_runs, command, environment, train, train_here

import forked

KILLS = 6
LONG = ["data.micro_batch_size=3", "trainer.max_steps=800", "trainer.val_check_interval=100", "checkpoint.keep_last=3"]


@pytest.mark.slow
def test_chaos(corpus: Path, tmp_path: Path) -> None:
    """SIGKILL and SIGTERM come at random moments from start-up on; the printed seed can be set to repeat a run."""
    seed = int(os.environ.get("LMTRAIN_CHAOS_SEED", time.time_ns() % 2**32))
    print(f"LMTRAIN_CHAOS_SEED={seed}")
    draw = random.Random(seed)
    # With a save every 40 steps, a kill costs 20 steps on average, so the run makes progress.
    settings = [*LONG, "trainer.save_every_n_steps=40", f"checkpoint.async_save={draw.random() < 0.5}"]
    whole, run_dir = tmp_path / "whole", tmp_path / "run"
    assert train_here(corpus, whole, *settings).code == 0

    for kill in range(KILLS):
        process = forked.Started(command(corpus, run_dir, *settings)[1:], environment())
        number = draw.choice([signal.SIGKILL, signal.SIGTERM])
        # Some moments are during start-up, most during training.
        deadline = time.monotonic() + draw.uniform(0.5, 4.0)
        while process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.01)
        if process.poll() is None:
            process.send_signal(number)
        output, _ = process.communicate(timeout=60)
        assert process.returncode in (0, 75, -signal.SIGKILL, -signal.SIGTERM), f"kill {kill}, seed {seed}:\n{output}"
    done = train(corpus, run_dir, *settings)
    assert done.returncode == 0, f"seed {seed}:\n{done.stdout}\n{done.stderr}"
    assert_equal_runs(whole, run_dir)
