"""Tools in processes of their own, which import little."""

import contextlib
import os
import signal
import time

from lmtrain.rewards.own_process import own_process

calls = 0


@own_process
def count(step: int = 1) -> int:
    """Counts its calls.

    Args:
        step: how much one counts.
    """
    global calls
    calls += step
    return calls


@own_process
async def later() -> dict[str, str]:
    """Waits for nothing."""
    return {"process": str(os.getpid())}


@own_process
def crash() -> None:
    """Ends its process."""
    os.kill(os.getpid(), signal.SIGSEGV)


@own_process
def leave() -> None:
    """Exits."""
    raise SystemExit(3)


@own_process
def hold() -> str:
    """Catches all that could end it."""
    signal.signal(signal.SIGALRM, signal.SIG_IGN)
    until = time.monotonic() + 60
    while time.monotonic() < until:
        with contextlib.suppress(BaseException):
            time.sleep(0.1)
    return "done"


@own_process
def compute() -> int:
    """Stays in one call of C code."""
    return sum(range(10**11))
