"""Processes that do work for this one over their standard input and output.

One that reads finds the end of its input when the process that started it is gone, however that ended. Ctrl-C, which a
terminal sends to both, is left to the one that started it.
"""

import os
import signal
import struct
import subprocess
import sys
from pathlib import Path
from typing import IO

_LENGTH = struct.Struct("<Q")


def start(module: str, *arguments: str) -> subprocess.Popen[bytes]:
    """`python -m module arguments`, with pipes to its standard input and from its standard output."""
    package = str(Path(__file__).resolve().parents[2])
    path = os.pathsep.join(p for p in (package, os.environ.get("PYTHONPATH")) if p)
    return subprocess.Popen(
        [sys.executable, "-m", module, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": path},
    )


def ignore_interrupts() -> None:
    """In the process itself."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def why(code: int, lower: str) -> str:
    """How such a process ended. lower: the option that makes it need less memory."""
    memory = f": out of memory, most likely; lower {lower}" if code == -signal.SIGKILL else ""
    return f"ended with exit code {code}{memory}"


def send(pipe: IO[bytes], raw: bytes) -> None:
    """Writes its length in bytes (8 bytes, little endian), then the bytes."""
    pipe.write(_LENGTH.pack(len(raw)))
    pipe.write(raw)
    pipe.flush()


def receive(pipe: IO[bytes]) -> bytes | None:
    """What `send` wrote; None at the end of the pipe."""
    header = pipe.read(_LENGTH.size)
    if len(header) < _LENGTH.size:
        return None
    length = _LENGTH.unpack(header)[0]
    raw = pipe.read(length)
    return raw if len(raw) == length else None
