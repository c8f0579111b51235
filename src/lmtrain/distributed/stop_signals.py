"""Signals that ask a run to stop, noted by a thread as they come.

Python runs a handler only once the main thread is back from C, where a long step, a save or a collective that hangs may
keep it. A handler could then not tell a signal that was sent twice at once from a second one, nor end what hangs. The
thread needs no more than Python's lock, which such work lets go of.
"""

import ctypes
import os
import signal
import socket
import sys
import threading
import time
from types import FrameType
from typing import Any

SIGNALS = tuple(getattr(signal, name) for name in ("SIGTERM", "SIGUSR1", "SIGINT") if hasattr(signal, name))

# Signals that come together are one request: a scheduler may signal a process and its launcher, which passes it on, and
# Linux sends PR_SET_PDEATHSIG (orphans.py) again for each thread of a killed parent. On a machine with too much to do
# the launcher's comes late.
_ONE_REQUEST_SECONDS = 2.0


class StopSignals:
    """`first` is the name of the first signal since `listen`, or None; a second one ends the process at once."""

    def __init__(self) -> None:
        self.first: str | None = None
        self._came = 0.0
        self._outbox: socket.socket | None = None
        self._handlers: dict[int, Any] = {}
        self._wakeup_fd = -1

    def listen(self) -> None:
        """Starts listening; has to be called by the main thread."""
        inbox, self._outbox = socket.socketpair()
        self._outbox.setblocking(False)
        self._wakeup_fd = signal.set_wakeup_fd(self._outbox.fileno(), warn_on_full_buffer=False)
        self._handlers = {number: signal.signal(number, _do_nothing) for number in SIGNALS}
        threading.Thread(target=self._read, args=(inbox,), name="signals", daemon=True).start()

    @property
    def listens(self) -> bool:
        return self._outbox is not None

    def close(self) -> None:
        """Puts back what was there before `listen`."""
        if self._outbox is None:
            return
        for number, handler in self._handlers.items():
            signal.signal(number, handler if handler is not None else signal.SIG_DFL)
        signal.set_wakeup_fd(self._wakeup_fd)
        self._outbox.shutdown(socket.SHUT_RDWR)  # ends the thread, also where a forked worker still holds a copy
        self._outbox.close()
        self._outbox = None

    def _read(self, inbox: socket.socket) -> None:
        with inbox:
            while numbers := inbox.recv(64):  # one byte a signal, written by Python where it arrives
                for number in numbers:
                    if number in SIGNALS:
                        self._note(number)

    def _note(self, number: int) -> None:
        now = time.monotonic()
        if self.first is None:
            self.first, self._came = signal.Signals(number).name, now
        elif now - self._came >= _ONE_REQUEST_SECONDS:
            if sys.platform != "win32":
                ctypes.CDLL(None).signal(number, 0)  # SIG_DFL; Python's own call is the main thread's alone
            os.kill(os.getpid(), number)


def _do_nothing(number: int, frame: FrameType | None) -> None:
    """That there is a handler makes Python write the byte."""


class StopRequest:
    """`asked()` is this rank's own; `agreed` is set on all ranks in the same step, once any of them was asked."""

    def __init__(self, time_limit: float | None = None, started: float = 0.0) -> None:
        """`time_limit` in seconds after `started`, a time.time()."""
        self.signals = StopSignals()
        self.deadline = None if time_limit is None else started + time_limit
        self.reason: str | None = None
        self.error: Exception | None = None  # for which the run has failed once it is saved
        self.agreed = False

    def asked(self) -> bool:
        if self.reason is None:
            past = self.deadline is not None and time.time() >= self.deadline
            self.reason = self.signals.first or ("run.time_limit" if past else None)
        return self.reason is not None

    def ask(self, reason: str, error: Exception | None = None) -> None:
        """Asks for a stop; with an error for one that ends as a failed run."""
        self.reason, self.error = self.reason or reason, error

    def why(self) -> str:
        """What asked for the stop. A signal to all ranks may have reached this one after another had told it."""
        return self.reason or self.signals.first or "a signal to another rank"
