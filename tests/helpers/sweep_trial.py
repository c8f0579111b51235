"""Failures of trials in tests of sweeps, as a user's callbacks; none occurs once a file `repaired` exists."""

import os
import signal
import time
from pathlib import Path

import lightning.pytorch as pl

from lmtrain.callbacks.stopping import Preemption


class Raises(pl.Callback):
    def on_train_batch_end(self, trainer: pl.Trainer, *_: object) -> None:
        if not Path("repaired").exists():
            raise ZeroDivisionError("a mistake [of the user's]")


class IsKilled(pl.Callback):
    """Kills the process after a step, as the kernel does when memory runs out."""

    def on_train_batch_end(self, trainer: pl.Trainer, *_: object) -> None:
        if not Path("repaired").exists():
            os.kill(os.getpid(), signal.SIGKILL)


class Waits(pl.Callback):
    """Writes the process id for the test at the end of step 2 and waits until a signal is noticed."""

    def on_train_batch_end(self, trainer: pl.Trainer, *_: object) -> None:
        if trainer.global_step == 2 and not Path("repaired").exists():
            Path("waiting").write_text(str(os.getpid()))
            preemption = next(c for c in trainer.callbacks if isinstance(c, Preemption))  # type: ignore[attr-defined]
            while preemption.stop.signals.first is None:
                time.sleep(0.05)
