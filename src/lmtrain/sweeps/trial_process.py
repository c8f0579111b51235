"""A trial as a process of its own: forked from one that has imported torch already, or started again."""

import atexit
import importlib
import multiprocessing
import os
import signal
import sys
from multiprocessing.process import BaseProcess
from pathlib import Path

from lmtrain.config.effect import TRIAL
from lmtrain.distributed.ranks import end_with_parent
from lmtrain.sweeps.trials import without_ranks

_DRIVER = Path("/dev/nvidiactl")  # of NVIDIA's GPUs


def start(verb: str, words: list[str], log: Path, gpus: str | None = None) -> BaseProcess:
    """Starts a trial: in a session of its own, ended with this process, without this one's ranks.

    Forked from a warm process, which saves the seconds that the imports take; but where there are GPUs, because CUDA
    can't be used in a fork once any library has so much as counted them.

    Args:
        gpus: its CUDA_VISIBLE_DEVICES; None leaves it those of this process.
    """
    environ = without_ranks(os.environ) | {TRIAL: "1"} | ({} if gpus is None else {"CUDA_VISIBLE_DEVICES": gpus})
    log.touch()  # who reads along does not wait for the process to open it
    process = context().Process(target=_run, args=(verb, words, str(log), environ))
    process.start()
    return process


def context() -> multiprocessing.context.ForkServerContext | multiprocessing.context.SpawnContext:
    if sys.platform != "linux" or _DRIVER.exists():
        return multiprocessing.get_context("spawn")
    server = multiprocessing.get_context("forkserver")
    server.set_forkserver_preload(["lmtrain.sweeps.fork_server"])
    return server


def _run(verb: str, words: list[str], log: str, environ: dict[str, str]) -> None:
    """What the process does: `python -m lmtrain.<verb> <words>`, printing to `log`."""
    os.setsid()  # Ctrl-C reaches the sweep alone, which passes it on once
    end_with_parent(os.getppid(), signal.SIGTERM)
    sweep = multiprocessing.parent_process()
    if sweep is not None and not sweep.is_alive():  # it ended before the kernel was asked
        return
    os.environ.clear()
    os.environ.update(environ)
    _print_to(log)
    module = importlib.import_module(f"lmtrain.{verb}")
    sys.argv = [str(module.__file__), *words]
    try:
        sys.exit(module.main(words))
    finally:
        atexit._run_exitfuncs()  # multiprocessing leaves them out; trackers end their runs there


def _print_to(log: str) -> None:
    """Standard output and error, of what this process starts too, to the end of a file; every write at once."""
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
    for stream, number in ((sys.stdout, 1), (sys.stderr, 2)):
        stream.flush()
        os.dup2(file, number)
        stream.reconfigure(write_through=True)  # type: ignore[union-attr]
    os.close(file)
