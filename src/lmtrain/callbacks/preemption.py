"""Stops a run cleanly: a signal or the time limit asks, the next step boundary saves, and the run ends with exit 75.

The handler only notes the signal. Ranks agree on stopping in the all-reduce that counts the step's tokens
(objectives/base.py), so no rank stops alone and no extra collective is paid. A second signal ends the process at once;
the last complete checkpoint stays.
"""

import os
import signal
import time
from types import FrameType
from typing import Any

import lightning.pytorch as pl

from lmtrain.objectives.base import Objective

SIGNALS = tuple(getattr(signal, name) for name in ("SIGTERM", "SIGUSR1", "SIGINT") if hasattr(signal, name))


# Signals that come together are one request: a scheduler may signal a process and its group, and Linux sends
# PR_SET_PDEATHSIG (orphans.py) again for each thread of a killed parent.
_ONE_REQUEST_SECONDS = 0.5


class ValidationInterrupted(Exception):
    """Raised between two validation batches when a stop was asked for; the validation is owed to the resumed run."""


class Preemption(pl.Callback):
    """`reason` says why the run is stopping, or is None."""

    def __init__(self, time_limit: float | None, started: float) -> None:
        self.deadline = None if time_limit is None else started + time_limit
        self.reason: str | None = None
        self.stopped = False
        self._asked_at = 0.0
        self._before: dict[int, Any] = {}

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        # Here and not earlier: Lightning installs its own SIGTERM handler at the start of fit.
        for number in SIGNALS:
            self._before[number] = signal.signal(number, self._on_signal)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self.reason is not None:
            if time.monotonic() - self._asked_at < _ONE_REQUEST_SECONDS:
                return
            self._restore()
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
            return
        self.reason, self._asked_at = signal.Signals(number).name, time.monotonic()

    def asked_to_stop(self) -> bool:
        if self.reason is None and self.deadline is not None and time.time() >= self.deadline:
            self.reason = "run.time_limit"
        return self.reason is not None

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        assert isinstance(pl_module, Objective)
        pl_module.stop_requested = self.asked_to_stop()

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        assert isinstance(pl_module, Objective)
        alone = trainer.world_size == 1
        if pl_module.stop_agreed or (alone and self.asked_to_stop()):
            self.stopped = True
            trainer.should_stop = True

    def on_validation_batch_end(self, trainer: pl.Trainer, *_: Any, **__: Any) -> None:
        # Several ranks would have to agree first; they finish their validation.
        if trainer.world_size == 1 and trainer.training is False and self._before and self.asked_to_stop():
            raise ValidationInterrupted

    def _restore(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler if handler is not None else signal.SIG_DFL)
        self._before = {}

    # Not in teardown, which comes after Lightning has put back what it found: its own handler would stay for ever.
    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._restore()

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        self._restore()
