"""Loader workers end with the training process, whenever it dies."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import forked
from inprocess import TWO_STEPS
from processes import read
from support import TINY

# The workers sleep at their start, so that the parent is dead when they continue.
DIES_AT_FORK = """
import os, signal, sys, time
import torch
from torch.utils.data import TensorDataset
from lmtrain.config.batch import Stages
from lmtrain.data.modules import TokenDataModule

module = TokenDataModule(None, None, seed=0, sizes=Stages.constant(1), micro_batch_size=1, total_steps=1,
                         max_epochs=None, limit_val_batches=None, num_workers=2)
forks = []

def dies_after_the_second():
    forks.append(1)
    if len(forks) == 2:
        os.kill(os.getpid(), signal.SIGKILL)

os.register_at_fork(after_in_child=lambda: (print(os.getpid(), flush=True), time.sleep(1)),
                    after_in_parent=dies_after_the_second)
batches = iter(module._loader(TensorDataset(torch.zeros(4)), None))
time.sleep(60)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc and prctl")
def test_workers_of_a_killed_parent_are_gone() -> None:
    """Workers whose parent died first end too; torch's own watchdog takes the process adopting them for the parent."""
    process = subprocess.Popen([sys.executable, "-c", DIES_AT_FORK], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    workers = [int(process.stdout.readline()) for _ in range(2)]
    assert process.wait(timeout=60) == -signal.SIGKILL
    try:
        deadline = time.monotonic() + 60  # torch's watchdog checks every 5 s
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
