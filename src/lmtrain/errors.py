"""The errors a user sees: one message saying what was found, where, and what to change."""

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
