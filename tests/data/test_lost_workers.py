"""Loader workers that an error leaves behind do not keep the process from ending."""

import subprocess
import sys
from pathlib import Path

SCRIPT = """
import functools, multiprocessing, os
from torch.utils.data import DataLoader
from lmtrain.data import loaders

start = functools.partial(loaders.start_worker, os.getpid())
with loaders.no_workers_left():
    kept = iter(DataLoader(range(99), num_workers=2, multiprocessing_context="fork", worker_init_fn=start))
    next(kept)
    print(*[child.pid for child in multiprocessing.active_children()])
    raise ValueError("an error while another loader starts")
"""


def test_an_error_that_keeps_an_iterator_alive_ends_the_process() -> None:
    """The iterator lives in the error's traceback, so that torch never ends its workers itself."""
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=120)
    assert done.returncode == 1, done.stderr
    assert done.stderr.strip().endswith("ValueError: an error while another loader starts")
    assert "killed by signal" not in done.stderr
    workers = done.stdout.split()
    assert len(workers) == 2
    assert not [pid for pid in workers if Path("/proc", pid).exists()]
