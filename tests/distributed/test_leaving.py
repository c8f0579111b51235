"""When a process began, and how it ends: without finalizing Python, but after its threads and exit functions."""

import subprocess
import sys
import time


def python(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)


def test_a_process_knows_when_it_began() -> None:
    before = time.time()
    done = python("import time; from lmtrain.distributed import ranks; time.sleep(1); print(ranks.process_began())")
    assert done.returncode == 0, done.stderr
    # A tick of the kernel's clock is 0.01 s; a busy machine may begin the process late, but a second is slept.
    assert before - 0.05 <= float(done.stdout) <= time.time() - 0.9


END = """
import atexit, sys, threading, time
from lmtrain import cli

class Finalized:
    def __del__(self):
        print("finalized", flush=True)

def late():
    time.sleep(0.3)
    print("thread")

kept = Finalized()  # a global of the main module, which Python finalizes last
kept.itself = kept
atexit.register(print, "exit function")
threading.Thread(target=late).start()
cli.main = lambda words: 75
cli.program(["train"])
"""


def test_a_program_ends_after_its_threads_without_finalizing_python() -> None:
    done = python(END)
    assert (done.returncode, done.stdout.split("\n")) == (75, ["thread", "exit function", ""]), done.stderr
