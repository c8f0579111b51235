"""A trial as a separate process: forked from a process that has already imported torch, or newly spawned."""

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

_DRIVER = Path("/dev/nvidiactl")  # exists where the NVIDIA driver is loaded


def start(verb: str, words: list[str], log: Path, gpus: str | None = None) -> BaseProcess:
    """Starts a trial in its own session; it ends with this process and does not inherit this process's rank variables.

    The trial is forked from a process that has done all imports, which saves seconds. With GPUs it is spawned instead,
    because CUDA can't be used in a forked process once any library has even counted the GPUs.

    Args:
        gpus: the trial's CUDA_VISIBLE_DEVICES; None leaves it unchanged.
    """
    environ = without_ranks(os.environ) | {TRIAL: "1"} | ({} if gpus is None else {"CUDA_VISIBLE_DEVICES": gpus})
    log.touch()  # so that the log can be read before the process opens it
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
    """Runs `python -m lmtrain.<verb> <words>` in the new process, with its output appended to `log`."""
    os.setsid()  # Ctrl-C reaches the sweep alone, which forwards it once
    end_with_parent(os.getppid(), signal.SIGTERM)
    sweep = multiprocessing.parent_process()
    if sweep is not None and not sweep.is_alive():  # the sweep ended before the call above
        return
    os.environ.clear()
    os.environ.update(environ)
    _print_to(log)
    module = importlib.import_module(f"lmtrain.{verb}")
    sys.argv = [str(module.__file__), *words]
    try:
        sys.exit(module.main(words))
    finally:
        atexit._run_exitfuncs()  # multiprocessing skips them; in these, trackers finish their runs


def _print_to(log: str) -> None:
    """Appends stdout and stderr of this process and of those it starts to a file, without buffering."""
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
    for stream, number in ((sys.stdout, 1), (sys.stderr, 2)):
        stream.flush()
        os.dup2(file, number)
        stream.reconfigure(write_through=True)  # type: ignore[union-attr]
    os.close(file)
