"""OpenMP threads spin long on an idle machine and briefly beside busy programs, in every process of a run."""

import json
import os
import subprocess
import sys

import pytest

# After a product on two threads the second waits for the next: seconds of CPU time that it takes while this one sleeps.
WAITING = """
import contextlib, json, time, torch
from lmtrain.distributed import spinning
torch.set_num_threads(2)
matrix = torch.ones(512, 512)

def waiting(context):
    with context:
        matrix @ matrix
        before = time.process_time()
        time.sleep(0.3)
        return time.process_time() - before

before, briefly = waiting(contextlib.nullcontext()), waiting(spinning.spins_briefly())
# libgomp ends the second team's threads a little later.
after = max(waiting(contextlib.nullcontext()) for _ in range(5))
print(json.dumps([before, briefly, after]))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="libgomp is what torch uses on Linux")
def test_waiting_threads_stop_spinning_while_asked_to() -> None:
    """With a limit that is never reached a waiting thread takes all the time it can get, with a brief one none."""
    env = {**os.environ, "GOMP_SPINCOUNT": "10000000000", "OMP_NUM_THREADS": "2"}
    said = subprocess.run([sys.executable, "-c", WAITING], env=env, capture_output=True, text=True, check=True).stdout
    before, briefly, after = json.loads(said.splitlines()[-1])
    assert briefly < 0.02
    assert min(before, after) > 3 * max(briefly, 0.005)


BESIDE = """
import os, subprocess, sys, threading, time, torch
from lmtrain.distributed import spinning
spinning.watch()
torch.ones(512, 512) @ torch.ones(512, 512)
busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(os.cpu_count())]
try:
    ends = time.monotonic() + float(os.environ.get("SECONDS", "30"))
    while time.monotonic() < ends and not any(t.name == "spinning team" for t in threading.enumerate()):
        time.sleep(0.1)
finally:
    for process in busy:
        process.kill()
print(any(t.name == "spinning team" for t in threading.enumerate()))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="libgomp is what torch uses on Linux")
def test_busy_programs_beside_it_are_noticed() -> None:
    assert _shortens_beside_busy_programs({}) == "True"


@pytest.mark.skipif(sys.platform != "linux", reason="libgomp is what torch uses on Linux")
@pytest.mark.parametrize(("name", "value"), [("GOMP_SPINCOUNT", "7"), ("OMP_WAIT_POLICY", "active")])
def test_what_the_user_has_set_is_kept(name: str, value: str) -> None:
    assert _shortens_beside_busy_programs({name: value, "SECONDS": "2"}) == "False"


def _shortens_beside_busy_programs(more: dict[str, str]) -> str:
    environ = {k: v for k, v in os.environ.items() if k not in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")}
    environ |= {"OMP_NUM_THREADS": "2"} | more
    done = subprocess.run([sys.executable, "-c", BESIDE], env=environ, capture_output=True, text=True, check=True)
    return done.stdout.split()[-1]
