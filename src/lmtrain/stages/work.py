"""Stages as processes, one after the other: what they print is shown and kept, a signal ends them properly."""

import os
import signal
import subprocess
import time
from pathlib import Path
from types import TracebackType
from typing import Any

from lmtrain import errors
from lmtrain.sweeps.processes import POLL_SECONDS, SIGNALS, end_session, show, start


class Work:
    """Runs verbs; within `with` a signal asks the running one to save and end, a second one ends it at once."""

    def __init__(self) -> None:
        self.stopping = 0
        self.process: subprocess.Popen[bytes] | None = None
        self._before: dict[Any, Any] = {}

    def __enter__(self) -> "Work":
        self._before = {number: signal.signal(number, lambda *_: self._stop()) for number in SIGNALS}
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        if self.process is not None and self.process.poll() is None:  # an error here
            end_session(self.process)
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _stop(self) -> None:
        self.stopping += 1
        if self.process is None or self.process.poll() is not None:
            return
        if self.stopping == 1:
            self.process.terminate()
        else:
            end_session(self.process)

    def run(self, verb: str, words: list[str], log: Path) -> int:
        """The exit code of `python -m lmtrain.VERB words`; 75 where it ended because a signal asked for it."""
        if self.stopping:
            return errors.PREEMPTED
        shown = log.stat().st_size if log.exists() else 0
        self.process = start(verb, words, log)
        if self.stopping:  # the signal came while the process was made
            self.process.terminate()
        while self.process.poll() is None:
            time.sleep(POLL_SECONDS)
            shown = show(log, shown)
        show(log, shown)
        code = self.process.returncode
        if code != errors.FINISHED:
            end_session(self.process)  # what a crash left over would hold memory that the next start needs
        return errors.PREEMPTED if self.stopping and code != errors.FINISHED else code


def last_words(log: Path) -> str:
    """The last line that a process printed, without what `errors` puts before it."""
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines() if log.exists() else []
    told = [line for line in lines if line.strip()]
    errors_ = [line for line in told if line.startswith("error: ")]
    return (errors_[-1:] or told[-1:] or [f"see {os.fspath(log)}"])[0].removeprefix("error: ")
