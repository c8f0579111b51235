"""Whether a run was asked to stop: signals and the time limit write it, callbacks and objectives read it."""

import time

from lmtrain.distributed.stop_signals import StopSignals


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
