"""Commands in processes of their own, forked from one that has imported torch and Lightning already.

They can be killed and have their own memory, environment and exit code, as if started by `python -m lmtrain.VERB`. Only
the interpreter's start and the imports, most of a short run's time, are left out.
"""

import multiprocessing
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import forked_ranks
from support import environment_kept


def start(target: Callable[..., None], *args: Any) -> BaseProcess:
    """Starts a process that calls `target`, a function of a module, in a fork of the server."""
    server = multiprocessing.get_context("forkserver")
    server.set_forkserver_preload(["forked_server"])
    process = server.Process(target=target, args=args)
    with environment_kept():
        # Where the server, started with the first process, finds what it preloads: Python 3.11 tells it no sys.path.
        os.environ["PYTHONPATH"] = f"{Path(__file__).parent}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
        process.start()
    return process


def call_in_ranks(target: Callable[..., None], *args: Any, ranks: int = 2) -> None:
    """Calls `target(rank, *args)` in a process of each rank, with the environment of this process, until all return."""
    processes = [start(_rank, dict(os.environ), target, rank, args) for rank in range(ranks)]
    deadline = time.monotonic() + 600
    for process in processes:
        process.join(max(1.0, deadline - time.monotonic()))
    codes = [process.exitcode for process in processes]
    for process in processes:
        process.kill()
    assert codes == [0] * ranks, f"the exit codes of the ranks, whose errors stand on stderr: {codes}"


def _rank(env: dict[str, str], target: Callable[..., None], rank: int, args: tuple[Any, ...]) -> None:
    os.environ.clear()
    os.environ.update(env)
    target(rank, *args)


class Started:
    """A command under way that leads a session of its own, with those parts of subprocess.Popen that tests use."""

    def __init__(self, args: list[str], env: Mapping[str, str], here: Path | None = None, joined: bool = True) -> None:
        """Starts `python ARGS` in the folder `here`; joined: what it writes to stderr stands among its output."""
        self.args = args
        self._folder = tempfile.TemporaryDirectory()
        self._files = [Path(self._folder.name, name) for name in ("stdout", "stdout" if joined else "stderr")]
        self._files[0].touch()
        self._process = start(_live, args, dict(env), str(here or Path.cwd()), *map(str, self._files))
        assert self._process.pid is not None
        self.pid = self._process.pid

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def poll(self) -> int | None:
        return self._process.exitcode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self._process.kill()

    def wait_for(self, words: str, timeout: float = 600) -> None:
        """Waits until it has printed the words, and fails if it ends without them."""
        end = time.monotonic() + timeout
        while words not in self._files[0].read_text():
            missing = f"no {words!r} in:\n{self._files[0].read_text()}"
            assert self.poll() is None, missing
            assert time.monotonic() < end, missing
            time.sleep(0.02)

    def communicate(self, timeout: float = 600) -> tuple[str, str]:
        """Waits until it has ended and returns its output and, unless joined with that, its error output."""
        self._process.join(timeout)
        if self.returncode is None:
            self.kill()
            self._process.join()
            ends = "\n".join(file.read_text()[-2000:] for file in set(self._files))
            raise TimeoutError(f"{self.args} did not end in {timeout} s; the ends of its output:\n{ends}")
        output, errors = (file.read_text() for file in self._files)
        return output, "" if self._files[0] == self._files[1] else errors


def run(
    verb: str, *words: str, env: Mapping[str, str], here: Path | None = None, timeout: float = 600
) -> subprocess.CompletedProcess[str]:
    """Runs a command in the folder `here` and returns it when it has ended, with a signal's negative number as code."""
    return run_python(["-m", f"lmtrain.{verb}", *words], env, here, timeout)


def run_python(
    args: list[str], env: Mapping[str, str], here: Path | None = None, timeout: float = 600
) -> subprocess.CompletedProcess[str]:
    """Runs `python ARGS` as `run` does."""
    started = Started(args, env, here, joined=False)
    output, errors = started.communicate(timeout)
    assert started.returncode is not None
    return subprocess.CompletedProcess(args, started.returncode, output, errors)


def _live(args: list[str], env: dict[str, str], here: str, *files: str) -> None:
    os.setsid()
    for number, file in enumerate(files, start=1):
        os.dup2(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND), number)
    os.environ.clear()
    os.environ.update(env)
    os.chdir(here)
    sys.path[:0] = env.get("PYTHONPATH", "").split(os.pathsep)
    if sys.platform == "linux":
        forked_ranks.install()
    forked_ranks.live(args)
