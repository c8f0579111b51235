"""Verbs as child processes that a parent starts, shows and ends: trials of a sweep, stages of a pipeline."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from filelock import FileLock, Timeout

from lmtrain import errors
from lmtrain.config.effect import TRIAL
from lmtrain.distributed.ranks import end_with_parent, without_ranks
from lmtrain.errors import UserError
from lmtrain.run_folder.links import refuse_links

POLL_SECONDS = 0.1
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)  # on these, running children save and end


def refuse_strange_files(folder: Path, what: str, marker: str, instead: str) -> None:
    """Raises UserError if the folder has files but not `marker`, the file that every sweep or pipeline folder has.

    Args:
        what: sweep or pipeline.
        instead: the keys that choose another folder.
    """
    try:
        names = {path.name for path in folder.iterdir()} if folder.exists() else set()
    except OSError as error:
        raise UserError(f"cannot read {folder}: {errors.reason(error)}; choose another {instead}") from None
    if names - {f"{what}.lock"} and marker not in names:
        raise UserError(f"{folder} holds files that are not a {what}'s: choose another {instead}")


@contextmanager
def locked(folder: Path, what: str, root: str) -> Iterator[None]:
    """Creates the folder and locks it against other processes that run the same sweep or pipeline.

    Args:
        what: sweep or pipeline.
        root: the key that moves the folder elsewhere.

    Raises:
        UserError: another process holds the lock, or the folder can't be written.
    """
    if folder.is_dir():
        refuse_links(folder)
    with errors.writing(str(folder), f"; set {root} elsewhere"):
        folder.mkdir(parents=True, exist_ok=True)
        try:
            lock = FileLock(folder / f"{what}.lock").acquire(timeout=0)
        except Timeout:
            raise UserError(f"{folder}: this {what} is running already, in another process") from None
    with lock:
        yield


@dataclass
class Child:
    """A verb that runs in a child process."""

    process: subprocess.Popen[bytes]
    log: Path
    shown: int  # bytes of the log that have been printed
    started: float

    def code(self) -> int | None:
        """Returns the exit code, or None while the process runs."""
        return self.process.poll()

    def show(self) -> None:
        """Prints what was added to the log since the last call."""
        with self.log.open("rb") as file:
            file.seek(self.shown)
            new = file.read()
        if new:
            self.shown += len(new)
            sys.stdout.write(new.decode("utf-8", errors="replace"))
            sys.stdout.flush()

    def seconds(self) -> float:
        return round(time.monotonic() - self.started, 1)


class Children:
    """The running children; inside `with`, a signal asks them to save and end, and a second one kills them."""

    def __init__(self) -> None:
        self.running: list[Child] = []
        self.stopping = 0  # number of requests to stop
        self._before: dict[Any, Any] = {}

    def __enter__(self) -> Self:
        self._before = {number: signal.signal(number, lambda *_: self.stop()) for number in SIGNALS}
        return self

    def __exit__(self, *_: object) -> None:
        for child in self.running:  # left only after an error in this process itself
            end_session(child.process)
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def stop(self) -> None:
        """Asks the running children to save and end; the second call kills them."""
        self.stopping += 1
        for child in self.running:
            if self.stopping == 1:
                child.process.terminate()
            else:
                end_session(child.process)

    def start(self, verb: str, words: list[str], log: Path, **variables: str) -> Child:
        """Starts a verb, see `start`."""
        shown, started = log.stat().st_size if log.exists() else 0, time.monotonic()  # earlier output is not shown
        child = Child(start(verb, words, log, **variables), log, shown, started)
        self.running.append(child)
        if self.stopping:  # a signal came while the process was being started
            child.process.terminate()
        return child

    def ended(self, child: Child, code: int) -> None:
        """Removes a child that has ended; after a crash, kills what is left of it, which may hold needed memory."""
        self.running.remove(child)
        if code != errors.FINISHED:
            end_session(child.process)


def start(verb: str, words: list[str], log: Path, **variables: str) -> subprocess.Popen[bytes]:
    """Starts `python -m lmtrain.VERB words`, with its output appended to `log`.

    The process has its own session, ends with this process, and does not inherit this process's rank variables.

    Args:
        variables: further environment variables; TRIAL is "1", as for a trial of a sweep, unless given.
    """
    parent = os.getpid()
    environ = without_ranks(os.environ) | {TRIAL: "1", **variables}
    with log.open("ab") as output:
        return subprocess.Popen(
            [sys.executable, "-u", "-m", f"lmtrain.{verb}", *words],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=environ,
            start_new_session=True,  # Ctrl-C reaches this process alone, which forwards it once
            preexec_fn=lambda: end_with_parent(parent, signal.SIGTERM),
        )


def end_session(process: subprocess.Popen[bytes]) -> None:
    """Kills a process and its process group, which holds what it started."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.kill()  # in case it has no session of its own yet
