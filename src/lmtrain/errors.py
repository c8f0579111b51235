"""The errors a user sees: one message saying what was found, where, and what to change."""

import errno

FINISHED = 0
FAILED = 1
WRONG_INPUT = 2
PREEMPTED = 75  # EX_TEMPFAIL: a scheduler may start the job again


class UserError(Exception):
    """The config or the data is wrong; printed without a traceback, exit code 2."""

    exit_code = WRONG_INPUT


class RunError(Exception):
    """The run failed for a reason outside the config (a full disk, say); no traceback, exit code 1."""

    exit_code = FAILED


def disk_full(error: BaseException) -> bool:
    """Whether a write failed for want of space; torch.save and libraries written in Rust say so only in words."""
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return True
    if error.__cause__ is not None and disk_full(error.__cause__):
        return True
    words = ("No space left on device", "Disk quota exceeded", "File too large", "unexpected pos")
    return any(w in str(error) for w in words)


def reason(error: BaseException) -> str:
    """Why a write failed, in a few words."""
    if disk_full(error):
        return "the disk is full"
    return getattr(error, "strerror", None) or str(error)
