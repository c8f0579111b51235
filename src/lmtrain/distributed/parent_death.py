"""Processes that end when the process that started them does, however that one ended."""

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1  # prctl(2)


def is_first() -> bool:
    """Whether this process prints messages: rank 0, or a process on its own."""
    return os.environ.get("RANK", os.environ.get("SLURM_PROCID", "0")) == "0"


def end_with_parent(parent: int, by: signal.Signals) -> None:
    """Asks the kernel to send this process `by` when its parent dies; ends it now where `parent` is gone already.

    `parent` is the process id of the one that started this process, read there: asked for here, a parent that died in
    between could not be told from a living one. Off Linux only a parent that is gone already is noticed.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, by, 0, 0, 0)
    if os.getppid() != parent:
        os.kill(os.getpid(), by)
