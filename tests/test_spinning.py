"""OpenMP threads spin long on an idle machine and briefly beside busy programs, in every process of a run."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from lmtrain.distributed import spinning
from support import TINY, Run

# Loaded by every Python process through PYTHONPATH; records the environment when torch is about to be imported.
NOTES = """
import json, os, sys

class Notes:
    def find_spec(self, name, path=None, target=None):
        if name == "torch":
            kept = {k: os.environ.get(k) for k in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY", "RANK")}
            with open(os.environ["NOTES"], "a") as file:
                file.write(json.dumps(kept) + "\\n")

sys.meta_path.insert(0, Notes())
"""


@pytest.fixture
def notes(tmp_path: Path) -> dict[str, str]:
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text(NOTES)
    return {"PYTHONPATH": str(tmp_path / "site"), "NOTES": str(tmp_path / "notes.jsonl")}


def noted(notes: dict[str, str]) -> list[dict[str, str | None]]:
    return [json.loads(line) for line in Path(notes["NOTES"]).read_text().splitlines()]


@pytest.mark.slow
def test_it_is_set_before_torch_is_loaded_and_on_ranks(
    lmtrain: Run, notes: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "empty.txt").touch()
    for name in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY"):
        monkeypatch.delenv(name, raising=False)
    # The ranks fail because the file holds no text, which is late enough for torch to have been loaded.
    done = lmtrain("train", *TINY, "data=text", "data.path=empty.txt", "trainer.devices=2", "trainer.accelerator=cpu",
                   "data.global_batch_size=4", env=notes)  # fmt: skip
    assert done.returncode == 2, done.stderr
    found = noted(notes)
    assert {entry["RANK"] for entry in found} >= {None, "0", "1"}
    assert {entry["GOMP_SPINCOUNT"] for entry in found} == {spinning.ROUNDS}


@pytest.mark.parametrize(("name", "value"), [("GOMP_SPINCOUNT", "7"), ("OMP_WAIT_POLICY", "active")])
def test_what_the_user_has_set_is_kept(name: str, value: str) -> None:
    environ = {name: value}
    spinning.limit(environ)
    assert environ == {name: value}


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

print(json.dumps([waiting(c) for c in (contextlib.nullcontext(), spinning.spins_briefly(), contextlib.nullcontext())]))
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
    ends = time.monotonic() + 30
    while time.monotonic() < ends and not any(t.name == "spinning team" for t in threading.enumerate()):
        time.sleep(0.1)
finally:
    for process in busy:
        process.kill()
print(any(t.name == "spinning team" for t in threading.enumerate()))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="libgomp is what torch uses on Linux")
def test_busy_programs_beside_it_are_noticed() -> None:
    env = {**os.environ, "GOMP_SPINCOUNT": spinning.ROUNDS, "OMP_NUM_THREADS": "2"}
    said = subprocess.run([sys.executable, "-c", BESIDE], env=env, capture_output=True, text=True, check=True).stdout
    assert said.split()[-1] == "True"
