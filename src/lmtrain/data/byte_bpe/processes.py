"""Worker processes that communicate over standard input and output, and byte-level BPE encoding in them.

A worker that reads sees the end of its input when its parent process is gone, however the parent ended. Ctrl-C, which
a terminal sends to both, is left to the parent. ByteBPE runs in processes because in threads of one process most
operations would wait for each other: each worker reads a tokenizer's JSON, then lists of texts, and writes their ids.
"""

import contextlib
import os
import signal
import struct
import subprocess
import sys
import threading
from pathlib import Path
from types import TracebackType
from typing import IO

import numpy as np
from tokenizers import Tokenizer

from lmtrain.data.byte_bpe.encoder import ByteBPE
from lmtrain.errors import RunError

_LENGTH = struct.Struct("<Q")


def start(module: str, *arguments: str) -> subprocess.Popen[bytes]:
    """Starts `python -m module arguments` with pipes to its standard input and from its standard output."""
    package = str(Path(__file__).resolve().parents[3])
    path = os.pathsep.join(p for p in (package, os.environ.get("PYTHONPATH")) if p)
    return subprocess.Popen(
        [sys.executable, "-m", module, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": path},
    )


def end(process: subprocess.Popen[bytes]) -> int:
    """Closes the pipes of a process from `start`, which ends its work, and returns its exit code."""
    for pipe in (process.stdin, process.stdout):
        with contextlib.suppress(BrokenPipeError):
            _open(pipe).close()
    return process.wait()


def ignore_interrupts() -> None:
    """Makes the calling worker process ignore Ctrl-C, which its parent process handles."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def why(code: int, lower: str) -> str:
    """Describes how a worker process ended. lower: the config key to lower so that it needs less memory."""
    memory = f": out of memory, most likely; lower {lower}" if code == -signal.SIGKILL else ""
    return f"ended with exit code {code}{memory}"


def send(pipe: IO[bytes], raw: bytes) -> None:
    """Writes the length of `raw` in bytes (8 bytes, little endian), then `raw`."""
    pipe.write(_LENGTH.pack(len(raw)))
    pipe.write(raw)
    pipe.flush()


def receive(pipe: IO[bytes]) -> bytes | None:
    """Returns the bytes written by one `send`, or None if the pipe ends first."""
    header = pipe.read(_LENGTH.size)
    if len(header) < _LENGTH.size:
        return None
    length = _LENGTH.unpack(header)[0]
    raw = pipe.read(length)
    return raw if len(raw) == length else None


class EncodeProcesses:
    """A context in which each calling thread encodes like ByteBPE in a process of its own, which ends with the context.

    Entering the context starts nothing: a thread's process is started by its first call of `encode`.
    """

    def __init__(self, backend: Tokenizer) -> None:
        """backend: a tokenizer for which `ByteBPE.covers` is true."""
        self._backend = backend
        self._mine = threading.local()
        self._all: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> "EncodeProcesses":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        for process in self._all:
            if kind is not None:
                process.kill()
            end(process)

    def encode(self, texts: list[str]) -> list[np.ndarray]:
        """Returns the token ids of each text, uint32 [n].

        Raises:
            RunError: the process has ended unexpectedly, for example for lack of memory.
        """
        with contextlib.suppress(BrokenPipeError):
            process = self._process()
            _send_all(_open(process.stdin), [text.encode() for text in texts])
            if (found := _receive_all(_open(process.stdout))) is not None:
                return [np.frombuffer(raw, dtype=np.uint32) for raw in found]
        raise RunError(f"a process that tokenizes text {why(process.wait(), 'data.num_proc')}")

    def _process(self) -> subprocess.Popen[bytes]:
        if not hasattr(self._mine, "process"):
            self._mine.process = start(__name__)
            self._all.append(self._mine.process)
            send(_open(self._mine.process.stdin), self._backend.to_str().encode())
        process: subprocess.Popen[bytes] = self._mine.process
        return process


def _open(pipe: IO[bytes] | None) -> IO[bytes]:
    assert pipe is not None  # every process here was started with pipes
    return pipe


def _send_all(pipe: IO[bytes], parts: list[bytes]) -> None:
    send(pipe, np.array([len(part) for part in parts], dtype=np.int64).tobytes())
    send(pipe, b"".join(parts))


def _receive_all(pipe: IO[bytes]) -> list[memoryview] | None:
    """Returns the byte strings written by one `_send_all`, or None if the pipe ends first."""
    lengths, raw = receive(pipe), receive(pipe)
    if lengths is None or raw is None:
        return None
    ends = np.cumsum(np.frombuffer(lengths, dtype=np.int64)).tolist()
    whole = memoryview(raw)
    return [whole[begin:end] for begin, end in zip([0, *ends], ends, strict=False)]


def main() -> None:
    """Runs the worker process until its input ends, when its parent has no more texts or is gone."""
    ignore_interrupts()
    settings = receive(sys.stdin.buffer)
    if settings is None:
        return
    backend = Tokenizer.from_str(settings.decode())
    backend.encode_special_tokens = True  # not part of the JSON
    tokenizer = ByteBPE(backend)
    while (texts := _receive_all(sys.stdin.buffer)) is not None:
        found = tokenizer.encode([str(text, "utf-8") for text in texts])
        with contextlib.suppress(BrokenPipeError):
            _send_all(sys.stdout.buffer, [ids.tobytes() for ids in found])


if __name__ == "__main__":
    main()
