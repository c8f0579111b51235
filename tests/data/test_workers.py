"""Loader workers end with the training process, whenever it dies."""

import os
import signal
import sys
import time
from pathlib import Path

import pytest
import torch
from torch.utils.data import TensorDataset

import forked
from inprocess import TWO_STEPS
from lmtrain.config.batch import Stages
from lmtrain.data.modules import TokenDataModule
from processes import read
from support import TINY


def die_after_the_second_fork(written: str) -> None:
    """Starts two workers, which write their process ids and sleep, so that the parent is dead when they continue."""
    module = TokenDataModule(
        None, None, seed=0, sizes=Stages.constant(1), micro_batch_size=1, total_steps=1, max_epochs=None,
        limit_val_batches=None, num_workers=2,
    )  # fmt: skip
    forks = []

    def in_worker() -> None:
        with Path(written).open("a") as file:
            file.write(f"{os.getpid()}\n")
        time.sleep(1)

    def in_parent() -> None:
        forks.append(1)
        if len(forks) == 2:
            os.kill(os.getpid(), signal.SIGKILL)

    os.register_at_fork(after_in_child=in_worker, after_in_parent=in_parent)
    iter(module._loader(TensorDataset(torch.zeros(4)), None))


@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc and prctl")
def test_workers_of_a_killed_parent_are_gone(tmp_path: Path) -> None:
    """Workers whose parent died first end too; torch's own watchdog takes the process adopting them for the parent."""
    written, deadline = tmp_path / "workers", time.monotonic() + 60  # torch's watchdog checks every 5 s
    process = forked.start(die_after_the_second_fork, str(written))
    process.join(60)
    assert process.exitcode == -signal.SIGKILL
    while written.read_text().count("\n") < 2 and time.monotonic() < deadline:
        time.sleep(0.01)
    workers = [int(line) for line in written.read_text().splitlines()]
    try:
        assert len(workers) == 2
        while any(map(read, workers)) and time.monotonic() < deadline:
            time.sleep(0.2)
        assert not any(map(read, workers))
    finally:
        for pid in filter(read, workers):
            os.kill(pid, signal.SIGKILL)


def test_workers_start_where_the_default_is_a_server_process(corpus: Path, tmp_path: Path) -> None:
    """Python 3.14's default on Linux, and that of forked processes: the server would be the parent of workers."""
    words = [*TINY, *TWO_STEPS, "data=text", f"data.path={corpus}", f"run.dir={tmp_path}/run", "data.num_workers=1"]
    ended = forked.run("train", *words, env=os.environ)
    assert ended.returncode == 0, ended.stderr
