"""Lets waiting OpenMP threads spin briefly while other programs need the cores of this machine.

Threads of libgomp (GCC's OpenMP, which torch uses on Linux) spin at a barrier for some milliseconds before they sleep.
On idle cores this saves up to a quarter of a small step; beside a busy program it takes the time that the awaited
thread needs, and a step takes many times as long. libgomp reads the number of rounds once, when torch is loaded. But
while a process has more OpenMP threads than there are cores, they spin a hundred rounds only
(gomp_throttled_spin_count_var in GCC's libgomp/env.c), so `watch` keeps a second team of threads, asleep, for as long
as others need the cores. Imports no torch.
"""

import contextlib
import ctypes
import os
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from time import monotonic, process_time

_EVERY_S = 0.5
# Cores that others use beyond those that are left to them: above the first they need them, below the second no longer.
_NEEDED, _FREE = 0.25, 0.1
_CALM = 2  # checks in a row below _FREE, after which waiting threads spin long again
_started_in: int | None = None  # the process whose thread watches; a forked process has no such thread
_threads = os.cpu_count() or 1


def watch() -> None:
    """Shortens spinning while others need the cores, until the process ends; not where the user has set a limit."""
    global _started_in
    theirs = any(name in os.environ for name in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY"))
    alone = os.environ.get("OMP_NUM_THREADS") == "1"  # a single thread waits for no other
    if sys.platform == "linux" and not (theirs or alone) and _started_in != os.getpid():
        _started_in = os.getpid()
        threading.Thread(target=_watch, name="spinning", daemon=True).start()


def use_threads(number: int) -> None:
    """Says how many threads this process computes with; it leaves the other cores to others."""
    global _threads
    _threads = number


def _watch() -> None:
    is_brief, calm = False, 0
    # Where there is no /proc/stat, or in another form, nothing is known of others.
    with contextlib.suppress(OSError, ValueError), contextlib.ExitStack() as brief:
        for used in _used_by_others():
            beyond = used - (_cores() - _threads)
            calm = calm + 1 if beyond < _FREE else 0
            if not is_brief and beyond > _NEEDED and _libgomp() is not None:
                is_brief = brief.enter_context(spins_briefly())
            elif is_brief and calm >= _CALM:
                brief.close()
                is_brief = False


def _used_by_others() -> Iterator[float]:
    """Yields, twice a second, the number of cores that other processes have used since the last time."""
    pause, tick = threading.Event(), os.sysconf("SC_CLK_TCK")
    at, busy, own = monotonic(), _busy_ticks(), process_time()
    while True:
        pause.wait(_EVERY_S)
        now = monotonic(), _busy_ticks(), process_time()
        seconds, ticks, ours = (new - old for new, old in zip(now, (at, busy, own), strict=True))
        yield max(0.0, (ticks / tick - ours) / seconds)
        at, busy, own = now


def _busy_ticks() -> int:
    """Returns the ticks in which the cores that this process may use have been busy, since the machine's start."""
    names = {f"cpu{number}" for number in os.sched_getaffinity(0)}
    busy = 0
    for line in Path("/proc/stat").read_text().splitlines():
        name, *ticks = line.split()
        if name in names:
            user, nice, system, _idle, _waiting, *interrupts = map(int, ticks[:8])
            busy += user + nice + system + sum(interrupts)
    return busy


def _cores() -> int:
    return len(os.sched_getaffinity(0))


@contextlib.contextmanager
def spins_briefly() -> Iterator[bool]:
    """Makes waiting threads of this process spin for a hundred rounds only; yields False where libgomp isn't loaded."""
    library = _libgomp()
    if library is None:
        yield False
        return
    ended, there = threading.Event(), threading.Event()

    def sleep() -> None:
        # One more thread than cores, all of which free nothing; they stay asleep until the thread that made them ends.
        library.GOMP_parallel(ctypes.cast(ctypes.CDLL(None).free, ctypes.c_void_p), None, _cores() + 1, 0)
        there.set()
        ended.wait()

    thread = threading.Thread(target=sleep, name="spinning team", daemon=True)
    thread.start()
    there.wait()
    try:
        yield True
    finally:
        ended.set()
        thread.join()


def _libgomp() -> ctypes.CDLL | None:
    """Returns the libgomp that this process has loaded, if any."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    path = next((line.split(maxsplit=5)[-1] for line in lines if "libgomp" in line), None)
    if path is None:
        return None
    library = ctypes.CDLL(path)
    library.GOMP_parallel.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint]
    return library
