"""Tools in a process of their own, which is ended when a call takes too long, whatever the tool does.

The time limit of other tools is an alarm. A tool that catches every exception or sits in a long call of C code outlasts
it, and one that ends the process, as a crash in C code does, ends the run.
"""

import asyncio
import contextlib
import ctypes
import functools
import importlib
import inspect
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any

_serving = False  # whether this process is one of a tool


class ToolFailed(Exception):
    """Raised in the place of an exception of the tool's process; its text is class and text of that exception."""


def own_process(function: Callable[..., Any]) -> Callable[..., Any]:
    """Makes a function at the top of a module a tool that runs in a process of its own.

        @own_process
        def search(query: str) -> str: ...

    The process imports the module, which should import little, and lives until a call takes too long; what the module
    has kept is then lost. Arguments and results are passed as JSON.

    Raises:
        ValueError: the process could not find the function, since it isn't at the top of a module that can be imported.
    """
    if _serving:
        return function
    if function.__module__ == "__main__" or "." in function.__qualname__:
        raise ValueError(f"own_process: {function.__qualname__} must be a function at the top of an importable module")
    process = _Process(function.__module__, function.__name__)

    @functools.wraps(function)
    def call(*positional: Any, **named: Any) -> Any:
        return process.call(inspect.signature(function).bind(*positional, **named).arguments)

    call.start_process = process.start  # type: ignore[attr-defined]
    return call


class _Process:
    def __init__(self, module: str, name: str) -> None:
        self.module, self.name = module, name
        self.running: subprocess.Popen[bytes] | None = None
        self.is_ready = False

    def start(self) -> None:
        """Starts the process if it doesn't run; it imports its module meanwhile."""
        if self.running is not None and self.running.poll() is None:
            return
        self.wire, theirs = Pipe()
        command = f"from lmtrain.rewards import own_process; own_process.serve({theirs.fileno()})"
        path = os.pathsep.join(path or os.getcwd() for path in sys.path)
        self.running = subprocess.Popen(
            [sys.executable, "-c", command, self.module, self.name],
            env={**os.environ, "PYTHONPATH": path},
            stdin=subprocess.DEVNULL,
            pass_fds=[theirs.fileno()],
            start_new_session=True,
        )
        theirs.close()
        self.is_ready = False

    def call(self, arguments: dict[str, Any]) -> Any:
        """Calls the function; an exception of the caller's, such as that of a time limit, ends the process."""
        self.start()
        if not self.is_ready:  # not ended by a time limit, or it never would be
            self._reply()
            self.is_ready = True
        try:
            self.wire.send_bytes(json.dumps(arguments).encode())
            value, failed = json.loads(self._reply())
        except BaseException:
            self.end()
            self.start()  # for the next call
            raise
        if failed:
            raise ToolFailed(value)
        return value

    def _reply(self) -> bytes:
        assert self.running is not None
        while not self.wire.poll(0.1):  # in short steps, for time limits of threads
            pass
        try:
            return self.wire.recv_bytes()
        except (OSError, EOFError):
            raise ToolFailed(f"the process of {self.name} ended with exit code {self.running.wait()}") from None

    def end(self) -> None:
        assert self.running is not None
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.running.pid, signal.SIGKILL)
        self.running.wait()
        self.wire.close()


def serve(wire: int) -> None:
    """Executes calls of the function that the command line names, in the tool's process, until they end.

    wire: the descriptor of the connection along which arguments and results are passed as JSON.
    """
    global _serving
    _serving = True
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: it ends with the run
    function = getattr(importlib.import_module(sys.argv[1]), sys.argv[2])
    calls = Connection(wire)
    calls.send_bytes(b"ready")
    with contextlib.suppress(EOFError):
        while True:
            calls.send_bytes(_outcome(function, json.loads(calls.recv_bytes())))


def _outcome(function: Callable[..., Any], arguments: dict[str, Any]) -> bytes:
    try:
        value = function(**arguments)
        if inspect.iscoroutine(value):
            value = asyncio.run(value)
        if isinstance(value, bytes | bytearray):
            value = bytes(value).decode("utf-8", "replace")
        return json.dumps([value, False], default=str).encode()
    except BaseException as error:  # also SystemExit, which is the tool's
        return json.dumps([described(error), True]).encode()


def described(error: BaseException) -> str:
    """Returns class and text of an exception of the user's code in one line."""
    if isinstance(error, ToolFailed):
        return str(error)
    try:
        words = " ".join(str(error).split())
    except BaseException:  # its __str__ is the user's code, too
        words = "its text can't be read, as its __str__ raises"
    return f"{type(error).__name__}: {words}"
