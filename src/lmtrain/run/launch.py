"""Launches ranks on one node with torch's elastic launcher, which forwards signals and ends all ranks if one fails.

The parent process resolves the config and writes it into a file that the ranks read: a rank never parses the command
line. Training ranks read <run>/ranks/config.yaml; Lightning finds their layout through TorchElasticEnvironment.
"""

import contextlib
import json
import logging
import os
import shutil
import signal
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from lmtrain import errors
from lmtrain.config import compose as rules
from lmtrain.config import trust
from lmtrain.config.override_text import Command
from lmtrain.config.schema import Config
from lmtrain.distributed import process_group as world
from lmtrain.distributed import ranks
from lmtrain.errors import RunError, UserError
from lmtrain.files import write_atomic
from lmtrain.run_folder.folder import RunDir, continue_after_restart
from lmtrain.terminal import prepare_output

_SIGNALS = ("SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT", "SIGUSR1")
_LAUNCHER = "LMTRAIN_LAUNCHER_PID"  # environment variable with the launcher's process id: ranks end when it does
_SHUTDOWN_SECONDS = 300  # time for ranks to finish their step and save after a signal
_SAME_ERROR_SECONDS = 5  # time for rank 0 to encounter and print the error that another rank noted


@contextlib.contextmanager
def _process_as_it_was() -> Iterator[None]:
    """Restores what the elastic launcher changes; hides its log lines, since the ranks print their own."""
    handlers = {number: signal.getsignal(number) for number in map(signal.Signals.__getitem__, _SIGNALS)}
    environ, disabled = dict(os.environ), logging.root.manager.disable
    logging.disable(logging.ERROR)
    try:
        yield
    finally:
        logging.disable(disabled)
        os.environ.clear()
        os.environ.update(environ)
        for number, handler in handlers.items():
            signal.signal(number, handler if handler is not None else signal.SIG_DFL)


def launch_ranks(module: str, config: Config, folder: Path, processes: int, max_restarts: int = 0) -> int:
    """Runs `processes` ranks of `python -m MODULE <folder>/config.yaml GRANTS COMMAND` until the last one has exited.

    Args:
        folder: an existing folder for the config, the launcher's logs and the failure notes of ranks.

    Returns:
        0 on success; WRONG_INPUT if a rank failed with it, after it has printed why; FAILED for any other failure,
        after printing it here; -n if signal n arrived, which was forwarded to the ranks.
    """
    write_atomic(folder / "config.yaml", rules.dump(config))
    words = [trust.as_word(trust.granted(config)), json.dumps([config.command.words, config.command.notes])]
    with _process_as_it_was(), tempfile.TemporaryDirectory(prefix="lmtrain_") as meeting:
        os.environ[world.MEETING] = meeting
        return _launch(module, folder, processes, max_restarts, words)


def _launch(module: str, folder: Path, processes: int, max_restarts: int, words: list[str]) -> int:
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
    from torch.distributed.elastic.multiprocessing.api import PContext, SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    # What the ranks inherit.
    os.environ[_LAUNCHER] = str(os.getpid())
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // processes)))
    os.environ.setdefault("PYTHONFAULTHANDLER", "1")  # a rank that crashes in native code prints its stack
    world.write_traces_to(folder)

    # A rendezvous on this machine alone.
    settings = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=processes,
        run_id=uuid.uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        max_restarts=max_restarts,
        monitor_interval=0.2,
        signals_to_handle=",".join(_SIGNALS),
        logs_specs=DefaultLogsSpecs(log_dir=str(folder)),
    )
    if hasattr(settings, "shutdown_timeout"):
        settings.shutdown_timeout = _SHUTDOWN_SECONDS
    else:  # torch 2.11 waits for as long as a default argument says, 30 seconds
        PContext.close.__defaults__ = (None, _SHUTDOWN_SECONDS)

    # The ranks, until all have ended or the first has failed.
    try:
        elastic_launch(settings, sys.executable)("-m", module, str(folder / "config.yaml"), *words)
    except ChildFailedError as failure:
        rank = _first_to_fail(folder, failure.failures)
        note = _read_note(folder, rank)
        code = failure.failures[rank].exitcode if note is None else note[1]
        if code == errors.WRONG_INPUT:
            return errors.WRONG_INPUT  # the rank, or rank 0 on behalf of all, has printed why
        errors.print_error(f"rank {rank} failed first, {_how(code)}")
        return errors.FAILED
    except SignalException as stopped:
        return -int(stopped.sigval)
    return errors.FINISHED


def _note_of_failure(folder: Path, rank: int) -> Path:
    return folder / f"rank_{rank}_failed_at"


def _note_failure(path: Path, nanoseconds: int, code: int) -> None:
    with contextlib.suppress(RunError):  # a disk failure may be the cause
        write_atomic(path, f"{nanoseconds} {code}")


def _read_note(folder: Path, rank: int) -> tuple[int, int] | None:
    """Returns (time in ns, intended exit code) as noted by a failed rank, or None; SIGTERM may precede its exit."""
    note = _note_of_failure(folder, rank)
    if not note.exists():
        return None
    nanoseconds, code = note.read_text().split()
    return int(nanoseconds), int(code)


def _has_failed(folder: Path, rank: int) -> bool:
    """Returns whether the rank has noted an error, waiting up to _SAME_ERROR_SECONDS for it."""
    end = time.monotonic() + _SAME_ERROR_SECONDS
    while not _note_of_failure(folder, rank).exists():
        if time.monotonic() > end:
            return False
        time.sleep(0.05)
    return True


def _first_to_fail(folder: Path, failures: dict[int, Any]) -> int:
    """Returns the rank whose failure made the others fail, given torch's ProcessFailure by rank.

    A rank that raised an error has noted the time. A rank without a note was killed and made the others fail, unless it
    was ended because of them: by the launcher (SIGTERM, SIGKILL seconds later) or by NCCL's watchdog (SIGABRT).
    """
    earliest = min(failure.timestamp for failure in failures.values())  # seconds

    def order(rank: int) -> tuple[int, int]:
        failure, note = failures[rank], _read_note(folder, rank)
        if note is not None:
            return 1, note[0]
        if failure.exitcode == -signal.SIGTERM or failure.timestamp > earliest + 1:
            return 3, 0
        return (2, 0) if failure.exitcode == -signal.SIGABRT else (0, 0)

    return min(failures, key=order)


def _how(code: int) -> str:
    """Describes how a rank ended, from its exit code."""
    if code >= 0:
        return f"with exit code {code}; what it said stands above"
    memory = ": the machine ran out of memory, most likely" if code == -signal.SIGKILL else ""
    return f"ended by {signal.Signals(-code).name}{memory}"


def as_rank(words: Sequence[str], job: Callable[[Config], int]) -> int:
    """Runs `job` in one rank, which ends with its launcher; prints errors as one message and returns the exit code.

    Args:
        words: the rank's command line: the config file, and what no file can hold: its parent's trust grants, and the
            words and notes of its command.
    """
    config_path = Path(words[0])
    if _LAUNCHER in os.environ:  # a killed launcher can't forward a signal: save and exit
        ranks.end_with_parent(int(os.environ[_LAUNCHER]), signal.SIGTERM)
        ranks.end_after_parent(int(os.environ[_LAUNCHER]), _SHUTDOWN_SECONDS)
    prepare_output(goes_on=True)
    failed_at = _note_of_failure(config_path.parent, int(os.environ["RANK"]))
    failed_at.unlink(missing_ok=True)  # left by an earlier start
    try:
        typed, notes = json.loads(words[2]) if words[2:] else ((), ())
        command = Command(tuple(typed), notes=tuple(notes))
        return job(rules.load(config_path, trust.of_words(words[1:]), own=True, command=command))
    except (UserError, RunError) as error:
        now = time.time_ns()
        printed = ranks.print_from_rank(error)  # before writing: this rank is ended soon after another has exited
        _note_failure(failed_at, now, error.exit_code)
        if not printed and not _has_failed(config_path.parent, rank=0):
            errors.print_error(str(error))
        return error.exit_code
    except Exception as error:
        _note_failure(failed_at, time.time_ns(), errors.FAILED)
        message = errors.no_right(error)
        if message is None:
            raise
        errors.print_error(message)
        return errors.FAILED
    finally:
        _clear_after_launcher()


def _clear_after_launcher() -> None:
    """Removes the ranks' rendezvous folder if the launcher was killed before it could do so."""
    launcher = os.environ.get(_LAUNCHER)
    if launcher is not None and os.getppid() != int(launcher) and ranks.is_first():
        shutil.rmtree(os.environ[world.MEETING], ignore_errors=True)


def launch(run: RunDir, config: Config, processes: int) -> int:
    """Trains on `processes` ranks; returns the exit code. Rank 0 writes the run's config.yaml once it is checked."""
    run.ranks.mkdir(exist_ok=True)
    before = run.read_summary()  # of an earlier start; removed when training begins
    code = launch_ranks("lmtrain.run.launch", config, run.ranks, processes, config.trainer.max_restarts)
    if code <= 0:  # after a signal the ranks have saved, if possible
        code = _by_summary(run, before if code < 0 else None, code)
    if code != errors.FAILED:  # only a failed launch keeps its rank logs
        shutil.rmtree(run.ranks, ignore_errors=True)
    return code


def _by_summary(run: RunDir, before: dict[str, Any] | None, code: int) -> int:
    """Returns the exit code of a launch in which no rank failed, from summary.json.

    Args:
        code: 0, or -n after signal n.
        before: the summary before ranks that a signal ended, which they replace if they save; None: all ranks ended by
            themselves, and leave the summary of a run that had nothing to do as it was.
    """
    summary = run.read_summary()
    status = summary["status"] if summary is not None else None
    if status is None or (summary == before and status != "preempted"):
        errors.print_error(f"the ranks of {run.path} were stopped before they saved; the same command starts again")
        return errors.FAILED if code in (0, -signal.SIGINT) else errors.PREEMPTED
    return errors.PREEMPTED if status == "preempted" else errors.FINISHED


def rank_main(words: Sequence[str]) -> int:
    """Trains as one rank. If preempted it returns 0, which torch's launcher needs; the parent reads summary.json."""
    from lmtrain.run.session import Session

    def train(config: Config) -> int:
        folder = RunDir(Path(words[0]).parents[1])
        if ranks.was_restarted():
            continue_after_restart(config, folder)
        return Session(config, folder).run()

    code = as_rank(words, train)
    return errors.FINISHED if code == errors.PREEMPTED else code


if __name__ == "__main__":
    ranks.leave_after(lambda: rank_main(sys.argv[1:]))
