"""Runs a verb in its own process, which is killed with SIGKILL just before one of its file operations.

The operations are those that Python's audit hooks report below one folder: files opened for writing, renamed,
removed or linked, folders created and removed. Writes by Rust and C++ code are not among them; `run` can also kill the
process after a given time.
"""

import importlib
import json
import os
import resource
import signal
import subprocess
import sys
import time
import uuid
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import forked
from processes import read

MARK = "LMTRAIN_TEST_MARK"  # a variable that all descendants of a verb inherit
_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC
_EVENTS = ("open", "os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.symlink", "os.link", "os.truncate")


@dataclass(frozen=True)
class Command:
    """The command `python -m lmtrain.VERB words`, run in the folder `here`."""

    verb: str
    words: tuple[str, ...]
    here: Path
    forked: bool  # from a process that has imported torch already; not for verbs that start further processes


@dataclass(frozen=True)
class End:
    code: int
    operations: int | None  # None if it was killed
    output: str
    left_over: list[str]  # commands of processes that it started and that still run


def run(
    command: Command,
    fatal: int | None = None,
    after: float | None = None,
    limits: tuple[tuple[int, int], ...] = (),
) -> End:
    """Runs the command to its end, or kills it before file operation `fatal` (from 1) or after `after` seconds.

    Args:
        limits: pairs of one of `resource`'s limits and its value.
    """
    mark = uuid.uuid4().hex
    log, counted = command.here / f"{mark}.log", command.here / f"{mark}.json"
    log.touch()  # the process may be killed before it opens the log
    arguments = (command.verb, list(command.words), str(command.here), fatal, limits, mark)
    if command.forked:
        process = forked.start(live, *arguments)
        process.join(after or 600)
        code = _code_of(process)
    else:
        words = [sys.executable, "-c", f"import mortal; mortal.live(*{arguments!r})"]
        path = os.pathsep.join(
            [str(Path(__file__).parent), str(Path(__file__).parents[1] / "helpers"), os.environ.get("PYTHONPATH", "")]
        )
        started = subprocess.Popen(words, env={**os.environ, "PYTHONPATH": path, MARK: mark})
        try:
            code = started.wait(after or 600)
        except subprocess.TimeoutExpired:
            started.kill()
            code = started.wait()
    operations = json.loads(counted.read_text()) if counted.exists() else None
    return End(code, operations, log.read_text(), _left_over(mark))


def _code_of(process: BaseProcess) -> int:
    if process.exitcode is None:
        process.kill()
        process.join()
    assert process.exitcode is not None
    return process.exitcode


def live(
    verb: str, words: list[str], here: str, fatal: int | None, limits: tuple[tuple[int, int], ...], mark: str
) -> None:
    """Runs the verb inside the child process, with limits, a log and the audit hook."""
    os.environ[MARK] = mark
    os.environ["OMP_NUM_THREADS"] = "1"
    os.chdir(here)
    log = os.open(f"{mark}.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(log, 1)
    os.dup2(log, 2)
    done = 0

    def before(event: str, args: tuple[Any, ...]) -> None:
        nonlocal done
        if event not in _EVENTS or (event == "open" and not (isinstance(args[2], int) and args[2] & _WRITES)):
            return
        names = [os.fsdecode(a) for a in args[:2] if isinstance(a, str | bytes | os.PathLike)]
        if any(os.path.abspath(name).startswith(f"{here}/work") for name in names):
            done += 1
            if done == fatal:
                os.kill(os.getpid(), signal.SIGKILL)

    main = importlib.import_module(f"lmtrain.{verb}").main
    for limit, value in limits:
        resource.setrlimit(limit, (value, value))
    sys.addaudithook(before)
    code = main(words)
    sys.stdout.flush()
    sys.stderr.flush()
    Path(here, f"{mark}.json").write_text(json.dumps(done))
    os._exit(code)


def _left_over(mark: str, seconds: float = 20) -> list[str]:
    """Returns the commands of processes with this mark that still run after `seconds` seconds."""
    deadline = time.monotonic() + seconds
    while (found := _marked(mark)) and time.monotonic() < deadline:
        time.sleep(0.05)
    return found


def _marked(mark: str) -> list[str]:
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            environ = (folder / "environ").read_bytes()
        except OSError:
            continue
        if f"{MARK}={mark}".encode() in environ and (process := read(int(folder.name))) is not None:
            found.append(process.command)
    return found
