"""The heap of a run on a CPU: what a step frees stays for the next one."""

import os
import subprocess
import sys

import pytest

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="glibc's heap")

# 64 MB in blocks of 256 KiB, taken and freed as a step does with its activations; prints the page faults of a round.
ROUNDS = """
import ctypes, resource, sys
import numpy as np
from lmtrain.distributed import heap
if len(sys.argv) > 1:
    heap.keep()
for _ in range(3):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    blocks = [np.ones(2**15) for _ in range(256)]
    del blocks
    faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
print(faults)
"""


def faults(*words: str, **settings: str) -> int:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("MALLOC_", "GLIBC_TUNABLES"))}
    done = subprocess.run(
        [sys.executable, "-c", ROUNDS, *words], env=kept | settings, stdout=subprocess.PIPE, check=True
    )
    return int(done.stdout)


def test_what_a_step_frees_is_there_for_the_next_one() -> None:
    assert faults() > 1000, "glibc has returned it"
    assert faults("keep") < 100


def test_a_users_own_settings_of_the_heap_stay() -> None:
    assert faults("keep", MALLOC_TRIM_THRESHOLD_="100000") > 1000
