"""Commands in processes of their own, forked from one that has imported torch and Lightning already.

They can be killed and have their own memory, environment and exit code, as if started by `python -m lmtrain.VERB`. Only
the interpreter's start and the imports, most of a short run's time, are left out.
"""

import multiprocessing
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

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


def run(
    verb: str, *words: str, env: Mapping[str, str], here: Path | None = None, timeout: float = 600
) -> subprocess.CompletedProcess[str]:
    """Runs a command in the folder `here` and returns it when it has ended, with a signal's negative number as code."""
    with tempfile.TemporaryDirectory() as folder:
        files = [Path(folder, name) for name in ("stdout", "stderr")]
        argv = [verb, *words]
        process = start(_live, argv, dict(env), str(here or Path.cwd()), *map(str, files))
        process.join(timeout)
        if process.exitcode is None:
            process.kill()
            process.join()
            ends = "\n".join(file.read_text()[-2000:] for file in files)
            raise TimeoutError(f"{argv} did not end in {timeout} s; the ends of stdout and stderr:\n{ends}")
        return subprocess.CompletedProcess(argv, process.exitcode, *(file.read_text() for file in files))


def _live(argv: list[str], env: dict[str, str], here: str, *files: str) -> None:
    for number, file in enumerate(files, start=1):
        os.dup2(os.open(file, os.O_WRONLY | os.O_CREAT), number)
    os.environ.clear()
    os.environ.update(env)
    os.chdir(here)
    sys.path[:0] = env.get("PYTHONPATH", "").split(os.pathsep)
    sys.argv = [f"lmtrain.{argv[0]}", *argv[1:]]
    from lmtrain import cli

    sys.exit(cli.main(argv))
