"""Makes a run end when its time budget is used up: checks the clock regularly and adjusts the number of steps.

The learning rate schedule spans the current number of steps, so it also ends with the budget. A checkpoint holds that
number and the time used so far; a resumed run continues from both. `Forecast` predicts the final loss.
"""

import math
import os
import time
from collections.abc import Sequence
from typing import Any

import lightning.pytorch as pl
from rich.console import Console

from lmtrain.callbacks.length import DependsOnLength, Length
from lmtrain.callbacks.metrics import Metrics
from lmtrain.callbacks.parts import Parts, Phase, Placed
from lmtrain.callbacks.samples import Samples
from lmtrain.config.batch import step_sizes
from lmtrain.config.options import WarmupStableDecayConfig
from lmtrain.config.schema import Config
from lmtrain.distributed import ranks
from lmtrain.models import dial
from lmtrain.models.feature import Feature
from lmtrain.objectives.base import Objective
from lmtrain.optim.schedules import warmup_steps
from lmtrain.terminal import counted

ENDING_S = 4.0  # reserved for the last checkpoint, the export and the report
_FORWARD = 0.4  # time per token of validation, relative to training
ENDLESS = 2**40  # steps: more than a run with a budget can ever ask its data loader for
_WARM, _FIRST = 3, 12  # steps: timing starts after the first number, the length is first adjusted after the second
_LOOKS = 12  # then it is adjusted whenever 1/12 of the remaining time has passed
_RANKS_ASK = 10  # steps between broadcasts of rank 0's decision
_WORTH_SAYING = 0.3  # relative change of the length above which a line is printed

SCORE = "val/bits_per_byte"
_FEWEST = 3  # validations after the warmup that a forecast needs


def steps_of_validation(rows: int, global_batch_size: int) -> float:
    """Returns how many training steps take as long as a validation of `rows` rows, which needs no backward pass."""
    return _FORWARD * rows / global_batch_size


class TimeBudget(pl.Callback):
    """A callback that keeps the run within budget.minutes, including the time before this process's training."""

    def __init__(
        self,
        config: Config,
        length: Length,
        console: Console,
        parts: Sequence[DependsOnLength],
        samples: Samples | None = None,
    ) -> None:
        """
        Args:
            parts: the other callbacks that depend on the length.
            samples: writes a sample early in the run, whose time is no part of a step.
        """
        self.samples = samples
        assert config.budget.minutes is not None
        self.seconds, self.console, self.parts = 60 * config.budget.minutes, console, parts
        self.began = float(os.environ.get(ranks.BEGAN, time.time()))  # when this process's command was given
        self.sizes = step_sizes(config.data)  # steps are counted by their rows, as early ones may be smaller
        self.at_most, self.validate_every = length.at_most, config.trainer.val_check_interval
        # The expected time of a validation in training steps, used until one has been timed.
        self.validation_steps = steps_of_validation(length.validated, config.data.global_batch_size)
        self.spent = 0.0  # seconds used by earlier processes
        self.validation: float | None = None  # seconds of the last validation
        # The step and time of the last adjustment, seconds of validations (and the early sample) since then, seconds
        # until the next one.
        self._from, self._since, self._paused, self._pause = 0, 0.0, 0.0, 0.0
        self._start, self._said = 0, 0

    def used(self) -> float:
        """Returns the seconds of the budget that are used up."""
        return self.spent + time.time() - self.began

    def state_dict(self) -> dict[str, Any]:
        return {"used": self.used(), "seconds": self.seconds}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.spent = state_dict["used"]

    def on_train_start(self, trainer: pl.Trainer, pl_module: Objective) -> None:
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

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: Objective, *_: Any, **__: Any) -> None:
        if self.samples is not None and trainer.global_step == self.samples.early:
            self._paused += self.samples.early_seconds
        done = trainer.global_step - self._start
        if done == _WARM:  # the first steps also allocate memory
            self._begin_window(trainer.global_step)
        alone = trainer.world_size == 1
        if done < _FIRST or trainer.global_step >= pl_module.total_steps or not (alone or done % _RANKS_ASK == 0):
            return
        steps = self._look(trainer.global_step, first=done == _FIRST)
        steps = steps if alone else trainer.strategy.broadcast(steps)  # rank 0's clock decides
        if steps is not None:
            self.set_length(trainer, pl_module, steps)

    def _look(self, step: int, first: bool) -> int | None:
        """Returns the number of steps that fits the budget, or None if it is too early for another adjustment."""
        seconds = time.perf_counter() - self._since
        if not first and seconds < self._pause:
            return None
        rows, size = self.sizes.before(step), self.sizes.last
        took = size * (seconds - self._paused) / (rows - self.sizes.before(self._from))  # for a step of full size
        validation = self.validation if self.validation is not None else self.validation_steps * took
        left = self.seconds - self.used() - ENDING_S - validation
        more = size * left / (took + (validation / self.validate_every if self.validate_every else 0.0))
        steps = min(max(step + 1, self.sizes.step_of(rows + max(0, int(more)))), self.at_most)
        self._begin_window(step)
        if abs(steps / self._said - 1) > _WORTH_SAYING:
            said = f"a step takes {took:.2f} s: to end in time, the run has {steps:,} steps, not {self._said:,}"
            self.console.print(said, highlight=False)
            self._said = steps
        return steps

    def set_length(self, trainer: pl.Trainer, module: Objective, steps: int) -> None:
        """Sets the number of steps in all objects that depend on it."""
        for part in self.parts:
            part.total_steps = steps
        module.total_steps = steps
        module.set_schedule(trainer.global_step, steps)
        trainer.fit_loop.epoch_loop.max_steps = steps


class Forecast(pl.Callback):
    """A callback that predicts the final loss of a run of model=dial, from the fit in models/dial.py."""

    def __init__(
        self, metrics: Metrics, schedule: WarmupStableDecayConfig, minutes: float, console: Console, *, decayed: bool
    ) -> None:
        """
        Args:
            minutes: the time budget.
            decayed: whether the optimizer has a weight decay.
        """
        self.metrics, self.schedule, self.minutes, self.console = metrics, schedule, minutes, console
        self.decayed = decayed
        self.scores: list[tuple[int, float]] = []  # (step, bits per byte)
        self.made: dict[str, Any] | None = None  # the forecast, as in summary.json; empty if the text is unlike others

    def state_dict(self) -> dict[str, Any]:
        return {"minutes": self.minutes, "scores": [list(score) for score in self.scores], "made": self.made}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.scores = [(step, bits) for step, bits in state_dict["scores"]]
        if state_dict["minutes"] == self.minutes:  # with another budget the run has another length
            self.made = state_dict["made"]

    def on_validation_end(self, trainer: pl.Trainer, pl_module: Objective) -> None:
        step, bits, steps = trainer.global_step, self.metrics.last_val.get(SCORE), pl_module.total_steps
        if bits is None or step <= warmup_steps(self.schedule, steps):
            return
        self.scores.append((step, bits))
        # The clock may have changed the number of steps since validations were scheduled.
        due = self.made is None and dial.SECOND * steps <= step <= dial.LATEST * steps
        if due and len(self.scores) >= _FEWEST:
            self._say(step, steps)

    def _say(self, step: int, steps: int) -> None:
        fell, (least, most) = dial.fall(self.scores, steps), dial.FALLS
        if not least <= fell <= most:
            self.made = {}
            found = f"in a fifth of the steps {SCORE} fell by {fell:.1%}"
            usual = f"in the runs that forecasts were fitted to by {least:.0%} to {most:.0%}"
            self.console.print(f"no forecast: {found}; {usual}", highlight=False)
            return
        bits = dial.forecast(self.scores, steps, decayed=self.decayed)
        low, high = bits * (1 - dial.SPREAD), bits * (1 + dial.SPREAD)
        self.made = {SCORE: bits, "low": low, "high": high, "step": step}
        expected = f"{SCORE} will be about {bits:.3f} at the end ({low:.2f} to {high:.2f})"
        self.console.print(f"forecast from validations so far: {expected}", highlight=False)


def build_forecast(config: Config, metrics: Metrics, length: Length, console: Console) -> Forecast | None:
    """Builds the callback that forecasts the final loss, for a run that is like those it was fitted to."""
    schedule, minutes, epochs = config.schedule, config.budget.minutes, config.trainer.max_epochs
    if minutes is None or not dial.is_measured(config) or not isinstance(schedule, WarmupStableDecayConfig):
        return None
    if (schedule.decay_ratio, schedule.decay_shape) != dial.LR_DECAY or schedule.decay_from is not None:
        return None
    epoch_steps = length.at_most / epochs if epochs is not None else math.inf
    # The fit has no runs with more weight decay, with another dropout, or with a model too large for a repeated text.
    decay, repeats = config.optimizer.weight_decay, length.steps / epoch_steps
    too_much = decay > 1.1 * dial.weight_decay(config.optimizer.lr, epoch_steps)
    if too_much or config.model.dropout != dial.dropout(repeats):
        return None
    tokens = epoch_steps * config.data.global_batch_size * config.data.seq_len
    if repeats > 1 and config.model.num_hidden_layers > dial.fed_by(tokens)[-1]:  # type: ignore[attr-defined]
        return None
    return Forecast(metrics, schedule, minutes, console, decayed=decay > 0)


def for_budget(c: Config, steps: int, ended_by: str | None) -> list[str]:
    """Returns notes on the number of steps that a budget chose, and on epochs that end the run before its minutes."""
    chosen = c.budget.chosen
    if chosen is None:
        return []
    budget = f"budget.{chosen}={getattr(c.budget, chosen):g}"
    chose = f"{budget} chose {counted(steps, 'step')}"
    if c.budget.minutes is None:
        return [chose]
    notes = [f"{chose} from the measured time of a few; in training the number follows the time that is left"]
    if ended_by == "data.mixture":
        notes.append("the run ends before that, where every source of data.mixture was seen its max_epochs times")
    elif ended_by is not None:
        ends = f"the run ends after {c.trainer.max_epochs} passes over it, as further ones rarely help"
        notes.append(f"the data is small for {budget}: {ends} (a typed trainer.max_epochs decides instead)")
    return notes


class Budgeted(Feature):
    """A run whose number of steps a budget chose: minutes, in which it ends with the clock, tokens or FLOPs."""

    def is_on(self, config: Config) -> bool:
        return config.budget.chosen is not None

    def callbacks(self, parts: Parts) -> list[Placed]:
        config, length, console = parts.config, parts.length, parts.console
        if config.budget.minutes is None:
            return []
        budget = TimeBudget(config, length, console, parts.depend_on_length, parts.samples)
        forecast = build_forecast(config, parts.metrics, length, console)
        return [(Phase.MAY_STOP, budget), *([(Phase.READS_SCORES, forecast)] if forecast is not None else [])]

    def advice(self, run: Any) -> list[str]:
        return for_budget(run.config, run.total_steps, run.ended_by)
