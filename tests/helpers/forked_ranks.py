"""Forked ranks: those that torch's elastic launcher starts as `python -m MODULE` spend most of their time on imports.

Before it does anything else, a launcher forks a process that waits, and asks that one for its ranks. So they inherit
nothing of what the launcher has done since. They become the launcher's own children, with exit codes and a session of
their own, as if it had started them itself.
"""

import ctypes
import faulthandler
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

from lmtrain.distributed.ranks import leave

_PR_SET_CHILD_SUBREAPER = 36  # orphans below this process become its children: linux/prctl.h


def install() -> None:
    """Makes torch's elastic launcher fork ranks, if it is used in this process, which has no other threads yet."""
    from torch.distributed.elastic.multiprocessing.subprocess_handler.subprocess_handler import SubprocessHandler

    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    launcher = os.getpid()
    if os.fork() == 0:
        ours.close()
        _serve(theirs, launcher)
    theirs.close()

    def start(_: SubprocessHandler, args: tuple[str, ...], env: dict[str, str]) -> Rank:
        ours.send(json.dumps([args[1:], env, str(Path.cwd())]).encode())
        return Rank(int(ours.recv(64)))

    SubprocessHandler._popen = start  # type: ignore[assignment,method-assign]


class Rank:
    """A forked rank, with those parts of subprocess.Popen that the launcher uses."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        end = None if timeout is None else time.monotonic() + timeout
        while (code := self.poll()) is None:
            if end is not None and time.monotonic() > end:
                raise subprocess.TimeoutExpired("a forked rank", timeout or 0)
            time.sleep(0.02)
        return code


def _serve(requests: socket.socket, launcher: int) -> None:
    """Forks a rank at each request, until the launcher is gone."""
    os.setsid()  # signals to the launcher's group are not for this process
    while request := requests.recv(1 << 20):
        args, env, here = json.loads(request)
        read, write = os.pipe()
        middle = os.fork()
        if middle == 0:
            rank = os.fork()
            if rank == 0:
                for number in (requests.fileno(), read, write):
                    os.close(number)
                _be_rank(args, env, here, launcher)
            os.write(write, str(rank).encode())
            os._exit(0)  # the rank becomes a child of the launcher
        os.waitpid(middle, 0)
        requests.send(os.read(read, 64))
        os.close(read)
        os.close(write)
    os._exit(0)


def _be_rank(args: list[str], env: dict[str, str], here: str, launcher: int) -> None:
    while os.getppid() != launcher:  # the process between them is about to end
        if not Path(f"/proc/{launcher}").exists():
            os._exit(1)
        time.sleep(0.001)
    os.setsid()
    os.environ.clear()
    os.environ.update(env)
    os.chdir(here)
    Path("/proc/self/comm").write_text(f"rank {env['RANK']}")  # found by processes.ranks
    live(args)


def live(args: list[str]) -> None:
    """Runs `python ARGS` ("-m MODULE ..." or a script) in this process, and ends it."""
    if "PYTHONFAULTHANDLER" in os.environ:
        faulthandler.enable()
    sys.argv = args[args[0] == "-u" :]
    try:
        if sys.argv[0] == "-m":
            sys.argv.pop(0)
            sys.path.insert(0, str(Path.cwd()))
            sys.modules.pop(sys.argv[0], None)  # it runs as __main__, whether it was imported before or not
            runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
        else:
            sys.path.insert(0, str(Path(sys.argv[0]).parent))
            runpy.run_path(sys.argv[0], run_name="__main__")
    except SystemExit as end:
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
        leave(int(end.code or 0) if not isinstance(end.code, str) else 1)
    except KeyboardInterrupt:  # which ends an interpreter by the signal
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    except BaseException:
        sys.excepthook(*sys.exc_info())
        leave(1)
    leave(0)
