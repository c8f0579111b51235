"""A time limit for code that others have written: chat templates, tools, environments, rewards."""

import contextlib
import ctypes
import signal
import threading
import time
from collections.abc import Iterator


class TookTooLong(BaseException):
    """Raised in code that runs longer than `time_limit` allows; not an Exception, which that code may catch."""


def _too_long(*_: object) -> None:
    raise TookTooLong


@contextlib.contextmanager
def time_limit(seconds: float | None) -> Iterator[None]:
    """Raises TookTooLong inside the context after this many seconds; None: never.

    In the main thread, a process alarm interrupts Python code and system calls; in other threads, only Python code is
    interrupted. A long call of C code never is, nor code that catches every BaseException.
    """
    if seconds is None:
        yield
    elif threading.current_thread() is not threading.main_thread() or not hasattr(signal, "setitimer"):
        with _limit_of_thread(seconds):
            yield
    else:
        began, before = time.monotonic(), signal.signal(signal.SIGALRM, _too_long)
        outer, _ = signal.setitimer(signal.ITIMER_REAL, seconds)  # seconds left of a limit around this one
        if 0 < outer < seconds:
            signal.setitimer(signal.ITIMER_REAL, outer)
        try:
            yield
        finally:
            left = max(outer - (time.monotonic() - began), 1e-3) if outer else 0.0
            signal.setitimer(signal.ITIMER_REAL, left)
            signal.signal(signal.SIGALRM, before)


@contextlib.contextmanager
def _limit_of_thread(seconds: float) -> Iterator[None]:
    thread = ctypes.c_ulong(threading.get_ident())
    lock = threading.Lock()
    ended = False
    is_late = False

    def interrupt() -> None:
        nonlocal is_late
        with lock:
            if not ended:
                is_late = True
                ctypes.pythonapi.PyThreadState_SetAsyncExc(thread, ctypes.py_object(TookTooLong))

    timer = threading.Timer(seconds, interrupt)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        with lock:
            ended = True
        timer.cancel()
        # One that was set a moment ago must not be raised after the context. Clearing it would leave the interpreter
        # looking for one at every step (CPython 3.11), which under a profiler never ends, so it is let out here.
        with contextlib.suppress(TookTooLong):
            for _ in range(100 if is_late else 0):
                time.sleep(0)
