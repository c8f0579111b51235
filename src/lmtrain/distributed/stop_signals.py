"""Signals that ask a run to stop, recorded by a thread as they arrive.

Python runs a signal handler only once the main thread returns from C code, where a long step, a save or a hanging
collective may keep it. A handler could therefore neither tell one request sent twice from a second request, nor end a
hanging process. The thread needs only Python's lock, which such C code releases.
"""

import contextlib
import ctypes
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from types import FrameType

from lmtrain.errors import PREEMPTED

SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)

# Signals within this time are one request: a scheduler may signal a process and its launcher, which forwards it, and
# Linux sends PR_SET_PDEATHSIG (ranks.py) again for each thread of a killed parent. On an overloaded machine the
# launcher's signal arrives late.
_ONE_REQUEST_SECONDS = 2.0
_ONE_KEY_SECONDS = 0.5  # of a single process, which gets no signal but the user's Ctrl-C and maybe that of `make` or uv


class Preempted(BaseException):
    """Raised in the main thread by a stop signal while there is nothing to save: before the first step or after all."""

    def __init__(self, number: int) -> None:
        super().__init__(f"stopped by {signal.Signals(number).name} outside of training; the same command goes on")


class _Reader:
    """A thread that gets the numbers of signals as they arrive, also while the main thread is busy in C code."""

    def __init__(
        self, numbers: Sequence[int], handler: Callable[..., None], read: Callable[[socket.socket], None], name: str
    ) -> None:
        """Starts reading; must be called by the main thread.

        Args:
            handler: what Python calls in the main thread; only with one it writes the signal's byte to the socket.
            read: what the thread does with the socket, until it is at its end.
            name: the thread's.
        """
        inbox, self._outbox = socket.socketpair()
        self._outbox.setblocking(False)
        self._wakeup_fd = signal.set_wakeup_fd(self._outbox.fileno(), warn_on_full_buffer=False)
        self._handlers = {number: signal.signal(number, handler) for number in numbers}
        threading.Thread(target=read, args=(inbox,), name=name, daemon=True).start()

    def close(self) -> None:
        """Ends the thread and restores the handlers from before."""
        for number, handler in self._handlers.items():
            signal.signal(number, handler if handler is not None else signal.SIG_DFL)
        signal.set_wakeup_fd(self._wakeup_fd)
        self._outbox.shutdown(socket.SHUT_RDWR)  # ends the thread even if a forked worker holds a copy
        self._outbox.close()


_GRACE_SECONDS = 5.0  # for the main thread to clean up; C code may keep it, such as a rendezvous


@contextlib.contextmanager
def preempted_by_signals() -> Iterator[None]:
    """Lets SIGTERM and SIGUSR1 end the process with PREEMPTED while no other handler is set, such as StopSignals'.

    The handler raises Preempted, so that temporary files are removed; a thread ends the process if that takes too long.
    """
    numbers = (signal.SIGTERM, signal.SIGUSR1)
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or any(signal.getsignal(number) != signal.SIG_DFL for number in numbers):
        yield
        return

    came: list[int] = []

    def preempt(number: int, frame: FrameType | None) -> None:
        came.append(number)
        if len(came) == 1:  # another one must not end the cleaning up
            raise Preempted(number)

    reader = _Reader(numbers, preempt, partial(_end_if_busy, preempt=preempt), "first signals")
    try:
        yield
    finally:
        reader.close()


def _end_if_busy(inbox: socket.socket, preempt: Callable[..., None]) -> None:
    """Ends the process if it hasn't ended by itself after a signal that `preempt` was to handle."""
    with inbox:
        while received := inbox.recv(1):
            if signal.getsignal(received[0]) is not preempt:
                continue
            inbox.settimeout(_GRACE_SECONDS)
            with contextlib.suppress(TimeoutError):
                while inbox.recv(1):  # further signals
                    pass
                return  # the context has ended
            os._exit(PREEMPTED)


class StopSignals:
    """A listener for stop signals: `first` names the first since `listen`, or is None; a second ends the process.

    Both are answered on stderr as they arrive, however long the step takes that the main thread is in.

    Attributes:
        how_to_go_on: returns the command that continues the run, which the second signal's answer has; None: no answers
            (of ranks other than the first).
    """

    def __init__(self) -> None:
        self.first: str | None = None
        self.how_to_go_on: Callable[[], str] | None = None
        self._command = ""
        self._came = 0.0
        self._reader: _Reader | None = None

    def listen(self) -> None:
        """Starts listening; must be called by the main thread."""
        self._reader = _Reader(SIGNALS, lambda *_: None, self._read, "signals")

    @property
    def listens(self) -> bool:
        return self._reader is not None

    def close(self) -> None:
        """Stops listening and restores the signal handlers from before `listen`."""
        if self._reader is not None:
            self._reader.close()
            self._reader = None

    def _read(self, inbox: socket.socket) -> None:
        with inbox:
            while numbers := inbox.recv(64):  # one byte per signal, written by Python on arrival
                for number in numbers:
                    if number in SIGNALS:
                        self._note(number)

    def _note(self, number: int) -> None:
        now, name = time.monotonic(), signal.Signals(number).name
        is_key = number == signal.SIGINT and "RANK" not in os.environ
        if self.first is None:
            self.first, self._came = name, now
            again = "press Ctrl-C again" if is_key else "a second signal"
            self._answer(f"{name}: stopping after this step; {again} to stop at once")
            self._command = self.how_to_go_on() if self.how_to_go_on is not None else ""
        elif now - self._came >= (_ONE_KEY_SECONDS if is_key else _ONE_REQUEST_SECONDS):
            self._answer(f"stopped at once; from the last checkpoint it continues with:\n  {self._command}")
            ctypes.CDLL(None).signal(number, 0)  # SIG_DFL; signal.signal works in the main thread only
            os.kill(os.getpid(), number)

    def _answer(self, text: str) -> None:
        """Writes to stderr, not by its stream: the main thread may hold that, in the middle of a line."""
        if self.how_to_go_on is not None:
            begin = "\n" if os.isatty(2) else ""
            with contextlib.suppress(OSError):
                os.write(2, f"{begin}{text}\n".encode(errors="replace"))


class StopRequest:
    """A request to stop: `asked()` is per rank; `agreed` is set on all ranks at the same step, once any was asked."""

    def __init__(self, time_limit: float | None = None, started: float = 0.0) -> None:
        """Sets the deadline to `time_limit` seconds after `started`, a time.time()."""
        self.signals = StopSignals()
        self.deadline = None if time_limit is None else started + time_limit
        self.reason: str | None = None
        self.error: Exception | None = None  # with which the run ends once it is saved
        self.agreed = False

    def asked(self) -> bool:
        if self.reason is None:
            past = self.deadline is not None and time.time() >= self.deadline
            self.reason = self.signals.first or ("run.time_limit" if past else None)
        return self.reason is not None

    def ask(self, reason: str, error: Exception | None = None) -> None:
        """Requests a stop; with an error, the run ends as failed."""
        self.reason, self.error = self.reason or reason, error

    def why(self) -> str:
        """Returns what requested the stop. A signal to all ranks may reach this one after another has reported it."""
        return self.reason or self.signals.first or "a signal to another rank"
