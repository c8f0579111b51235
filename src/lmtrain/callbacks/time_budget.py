"""Makes a run end with its budget of time: looks at the clock now and then and changes the number of steps.

The learning rate's schedule spans the steps that the run has, so it ends with the time, too. A checkpoint holds the
number of steps as it was and the time that was used; a resumed run goes on from both. `Forecast` says early where it
will end.
"""

import time
from collections.abc import Sequence
from typing import Any

import lightning.pytorch as pl
from rich.console import Console

from lmtrain.callbacks.metrics import Metrics
from lmtrain.config.options import WarmupStableDecayConfig
from lmtrain.models import dial
from lmtrain.objectives.base import Objective
from lmtrain.optim.schedules import lr_factor

ENDING_S = 4.0  # the last checkpoint, the export and the report
_FORWARD = 0.4  # of a training step's time a token: what a token of validation takes
ENDLESS = 2**40  # steps: more than any loader of a run with a budget will be asked for
_WARM, _FIRST = 3, 12  # steps: from the first on they are timed, at the second they are counted again
_LOOKS = 12  # and then after this part of the time that is left
_RANKS_ASK = 10  # steps between the first rank's answers to the others
_WORTH_SAYING = 0.3  # share by which the length has to change before a line says so

SCORE = "val/bits_per_byte"
_FEWEST = 3  # validations at the full rate
_FULL = 0.9  # of the peak: the clock may have made the run shorter since its validations were spread


def steps_of_validation(rows: int, global_batch_size: int) -> float:
    """The training steps that take as long as a validation of so many rows, whose tokens only go forward."""
    return _FORWARD * rows / global_batch_size


class TimeBudget(pl.Callback):
    def __init__(
        self,
        seconds: float,
        began: float,
        console: Console,
        *,
        at_most: int,
        validate_every: int | None,
        validation_steps: float,
        parts: Sequence[Any],
    ) -> None:
        """
        Args:
            seconds: of the whole run, the time before this process's training included.
            began: when this process's command was given, a time.time().
            at_most: steps that the run has however much time there is.
            validate_every: steps between validations; None: after the last step alone.
            validation_steps: the training steps that a validation is expected to take as long as, until one was timed.
            parts: all whose `total_steps` has to be told of another length, besides Trainer and objective.
        """
        self.seconds, self.began, self.console = seconds, began, console
        self.at_most = at_most
        self.validate_every, self.validation_steps, self.parts = validate_every, validation_steps, parts
        self.spent = 0.0  # seconds of earlier processes
        self.validation: float | None = None  # seconds of the last validation
        # Since the clock was looked at: the step, the time, seconds of validations; and how long until the next look.
        self._from, self._since, self._paused, self._pause = 0, 0.0, 0.0, 0.0
        self._start, self._said = 0, 0

    def used(self) -> float:
        """Seconds of the budget that are used up."""
        return self.spent + time.time() - self.began

    def state_dict(self) -> dict[str, Any]:
        return {"used": self.used()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.spent = state_dict["used"]

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        assert isinstance(pl_module, Objective)
        self._said, self._start = pl_module.total_steps, trainer.global_step
        self._begin_window(trainer.global_step)

    def _begin_window(self, step: int) -> None:
        self._since, self._from, self._paused = time.perf_counter(), step, 0.0
        self._pause = (self.seconds - self.used()) / _LOOKS

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._validation_began = time.perf_counter()

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.validation = time.perf_counter() - self._validation_began
        self._paused += self.validation

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any, **__: Any) -> None:
        assert isinstance(pl_module, Objective)
        done = trainer.global_step - self._start
        if done == _WARM:  # in the first steps memory is taken
            self._begin_window(trainer.global_step)
        alone = trainer.world_size == 1
        if done < _FIRST or trainer.global_step >= pl_module.total_steps or not (alone or done % _RANKS_ASK == 0):
            return
        steps = self._look(trainer.global_step, first=done == _FIRST)
        steps = steps if alone else trainer.strategy.broadcast(steps)  # the first rank's clock is the run's
        if steps is not None:
            self.set_length(trainer, pl_module, steps)

    def _look(self, step: int, first: bool) -> int | None:
        """The length of the run by the clock, where it is time to look at it."""
        seconds = time.perf_counter() - self._since
        if not first and seconds < self._pause:
            return None
        took = (seconds - self._paused) / (step - self._from)
        validation = self.validation if self.validation is not None else self.validation_steps * took
        left = self.seconds - self.used() - ENDING_S - validation
        steps = step + max(1, int(left / (took + (validation / self.validate_every if self.validate_every else 0.0))))
        steps = min(steps, self.at_most)
        self._begin_window(step)
        if abs(steps / self._said - 1) > _WORTH_SAYING:
            said = f"steps take {took:.2f} s: {steps:,} end with budget.minutes, not {self._said:,}"
            self.console.print(said, highlight=False)
            self._said = steps
        return steps

    def set_length(self, trainer: pl.Trainer, module: Objective, steps: int) -> None:
        """Tells all that know the run's length of another."""
        for part in self.parts:
            part.total_steps = steps
        module.total_steps = module.schedule_steps = steps
        trainer.fit_loop.epoch_loop.max_steps = steps


class Forecast(pl.Callback):
    """Says early which loss a run of model=dial, whose curves models/dial.py was fitted to, will end at."""

    def __init__(
        self, metrics: Metrics, schedule: WarmupStableDecayConfig, minutes: float, at_most: float, console: Console
    ) -> None:
        """
        Args:
            minutes: of the budget.
            at_most: steps of a run that the law holds for, which ends before the model memorizes the text.
        """
        self.metrics, self.schedule, self.minutes, self.console = metrics, schedule, minutes, console
        self.at_most = at_most
        self.scores: list[tuple[int, float]] = []  # (step, bits per byte)
        self.made: dict[str, float] | None = None  # of summary.json

    def state_dict(self) -> dict[str, Any]:
        return {"minutes": self.minutes, "scores": [list(score) for score in self.scores], "made": self.made}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.scores = [(step, bits) for step, bits in state_dict["scores"]]
        if state_dict["minutes"] == self.minutes:  # a larger budget is another run's length
            self.made = state_dict["made"]

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        assert isinstance(pl_module, Objective)
        step, bits, steps = trainer.global_step, self.metrics.last_val.get(SCORE), pl_module.total_steps
        if bits is None or step == 0 or self.made is not None or lr_factor(self.schedule, step, steps) < _FULL:
            return  # said already, in the warmup, or where the rate falls
        self.scores.append((step, bits))
        # The clock changes the number of steps after the validations were spread: what counts is where they stand now.
        if len(self.scores) >= _FEWEST and step >= dial.READ_AT[-1] * steps and steps <= self.at_most:
            self._say(step, steps)

    def _say(self, step: int, steps: int) -> None:
        bits = dial.forecast(self.scores, steps)
        low, high = bits * (1 - dial.SPREAD), bits * (1 + dial.SPREAD)
        self.made = {SCORE: bits, "low": low, "high": high, "step": step}
        said = f"by the validations so far {SCORE} will be about {bits:.3f} at the end ({low:.2f} to {high:.2f})"
        self.console.print(said, highlight=False)
