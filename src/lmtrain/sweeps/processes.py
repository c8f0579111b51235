"""Verbs as processes that another one starts, shows and ends: trials of a sweep, stages of a pipeline."""

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.process import BaseProcess
from pathlib import Path

from filelock import FileLock, Timeout

from lmtrain import errors
from lmtrain.config.effect import TRIAL
from lmtrain.distributed.ranks import end_with_parent
from lmtrain.errors import UserError
from lmtrain.run_folder.folder import refuse_links
from lmtrain.sweeps.trials import without_ranks

POLL_SECONDS = 0.1
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)  # the running ones save and end


def refuse_strange_files(folder: Path, what: str, marker: str, instead: str) -> None:
    """Raises UserError where files lie in the folder, and among them no `marker`, which every sweep or pipeline has.

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
    """Makes the folder, and keeps other processes that run this sweep or pipeline out of it.

    Args:
        what: sweep or pipeline.
        root: the key that puts the folder elsewhere.

    Raises:
        UserError: another process runs it, or the folder can't be written.
    """
    if folder.is_dir():
        refuse_links(folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = FileLock(folder / f"{what}.lock", timeout=0)
        lock.acquire()
    except Timeout:
        raise UserError(f"{folder}: this {what} is running already, in another process") from None
    except OSError as error:
        raise UserError(f"cannot write {folder}: {errors.reason(error)}; set {root} elsewhere") from None
    with lock:
        yield


def start(verb: str, words: list[str], log: Path, part_of: str = "1") -> subprocess.Popen[bytes]:
    """`python -m lmtrain.VERB words`, printing to `log`: in a session of its own, ended with this process, and no rank
    where this one is.

    Args:
        part_of: of what, as TRIAL says it.
    """
    parent = os.getpid()
    environ = without_ranks(os.environ) | {TRIAL: part_of}
    with log.open("ab") as output:
        return subprocess.Popen(
            [sys.executable, "-u", "-m", f"lmtrain.{verb}", *words],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=environ,
            start_new_session=True,  # Ctrl-C reaches this process alone, which passes it on once
            preexec_fn=lambda: end_with_parent(parent, signal.SIGTERM),
        )


def show(log: Path, shown: int) -> int:
    """Prints what was added to a log after its first `shown` bytes; returns how many it has now."""
    with log.open("rb") as file:
        file.seek(shown)
        new = file.read()
    if new:
        sys.stdout.write(new.decode("utf-8", errors="replace"))
        sys.stdout.flush()
    return shown + len(new)


def end_session(process: BaseProcess | subprocess.Popen[bytes]) -> None:
    """Kills a process and what it started."""
    assert process.pid is not None, "it was started"
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.kill()  # before it has a session of its own
