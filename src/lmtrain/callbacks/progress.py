"""Progress of training on the screen: a rich bar on a terminal, plain lines elsewhere."""

import math
import os
import time
from collections.abc import Callable, Sequence
from typing import Any

import lightning.pytorch as pl
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    Task,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
)
from rich.table import Column
from rich.text import Text

from lmtrain.callbacks.length import DependsOnLength
from lmtrain.callbacks.metrics import Row
from lmtrain.config.effect import TRIAL
from lmtrain.config.schema import Config

_SHOWN = (  # (key of a row, label, format) of what follows the headline
    ("train/loss", "loss", "{:.4f}"),
    ("train/rewards/margin", "margin", "{:.3f}"),
    ("lr", "lr", "{:.2e}"),
    ("tokens_per_s", "tok/s", "{:,.0f}"),
    ("mfu", "mfu", "{:.1%}"),
)
_LABELS = {"val/loss": "val", "rewards/accuracy": "accuracy", "rewards/margin": "margin", "bits_per_byte": "bits/byte"}
LINES, EVERY_SECONDS = 7, 10  # of a run in a log: most lines, not counting validations, and least time between them
_SECONDS_BETWEEN_UPDATES = 0.2  # of the bar's position; more would not be visible, but slow down steps


def parts(row: Row, headline: Sequence[str]) -> list[str]:
    """Returns the row's main numbers as text, those of `headline` (Config.headline) first."""
    shown = [(f"train/{name}", _LABELS.get(name, name), "{:.4f}") for name in headline]
    shown += [(f"val/{name}", f"val {_LABELS.get(name, name)}", "{:.4f}") for name in headline]
    shown = [(key, _LABELS.get(key, label), form) for key, label, form in (*shown, *_SHOWN)]
    known = {key: (label, form) for key, label, form in reversed(shown) if row.get(key) is not None}
    keys = dict.fromkeys(key for key, _, _ in shown if key in known)
    return [f"{known[key][0]} {known[key][1].format(row[key])}" for key in keys]


def joined(latest: Row, row: Row) -> Row:
    """Returns the numbers of the row's step: with those of `latest` if it is of the same step, which is validated."""
    return {**latest, **row} if latest.get("step") == row["step"] else dict(row)


def duration(seconds: float) -> str:
    """Formats a duration: 3725 -> '1:02:05'."""
    minutes, rest = divmod(int(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{rest:02}"


class Numbers(ProgressColumn):
    """A column with as many of the latest numbers, then the elapsed time, as fit beside the fixed columns."""

    def __init__(self, console: Console, latest: Row, total_steps: int, headline: Sequence[str]) -> None:
        super().__init__(Column(no_wrap=True))
        self.console, self.latest, self.headline = console, latest, headline
        # Width of the fixed columns: a word, the smallest bar, step/total, percentage, "left", its time, and spaces.
        self.always = len("validate") + 8 + 2 * len(str(total_steps)) + 1 + len("100%") + len("left 0:00:00") + 6

    def render(self, task: Task) -> Text:
        left, shown = self.console.width - self.always, list[str]()
        for part in [*parts(self.latest, self.headline), f"after {duration(task.elapsed or 0)}"]:
            left -= len(part) + 2
            if left < 0:
                break
            shown.append(part)
        return Text("  ".join(shown))


class RichBar(DependsOnLength, pl.Callback):
    """A single bar with step, percentage and time left; if there is room, loss, validation loss, learning rate, ..."""

    def __init__(
        self,
        console: Console,
        total_steps: int,
        headline: Sequence[str] = ("loss",),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.console, self.total_steps, self.headline = console, total_steps, headline
        self.latest: Row = {}  # the latest of each number, whatever its step
        self.of_step: Row = {}  # those of the latest step
        self.progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=None, table_column=Column(ratio=1)),
            MofNCompleteColumn(table_column=Column(no_wrap=True)),
            TextColumn("{task.percentage:>3.0f}%"),
            Numbers(console, self.latest, total_steps, headline),
            TextColumn("left"),
            TimeRemainingColumn(table_column=Column(no_wrap=True)),
            console=console,
            get_time=clock,
            refresh_per_second=4,
            expand=True,
        )
        self.train = self.progress.add_task("train", total=total_steps, start=False)
        self.val: TaskID | None = None
        self._updated = 0.0

    def listen(self, row: Row) -> None:
        self.latest.update(row)
        self.of_step = joined(self.of_step, row)
        if "val/loss" in row and self.progress.live.is_started:  # this line remains above the bar
            step = f"step {row['step']:>{len(str(self.total_steps))}}"
            numbers = parts({**self.of_step, "lr": None, "tokens_per_s": None, "mfu": None}, self.headline)
            self.console.print("  ".join([step, *numbers]), soft_wrap=True, highlight=False)
        self.progress.update(self.train, completed=row["step"])

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.progress.start_task(self.train)
        self._update(trainer.global_step)
        self.progress.start()

    def _update(self, step: int) -> None:
        self.progress.update(self.train, completed=step, total=self.total_steps)

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any, **__: Any) -> None:
        now = time.perf_counter()
        if now - self._updated > _SECONDS_BETWEEN_UPDATES:
            self._update(trainer.global_step)
            self._updated = now

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        total = sum(int(n) for n in trainer.fit_loop.epoch_loop.val_loop.max_batches)
        self.val = self.progress.add_task("validate", total=total)

    def on_validation_batch_end(self, *_: Any, **__: Any) -> None:
        if self.val is not None:
            self.progress.advance(self.val)

    def on_validation_end(self, *_: Any) -> None:
        if self.val is not None:
            self.progress.remove_task(self.val)
            self.val = None

    def _stop(self) -> None:
        self.on_validation_end()  # so that a run interrupted in a validation leaves one bar
        if self.progress.live.is_started:
            self.progress.stop()

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._update(trainer.global_step)
        self._stop()

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        self._stop()


class PlainLines(DependsOnLength, pl.Callback):
    """Progress lines at intervals, after each validation and at the end: for logs, pipes and notebooks."""

    def __init__(
        self, console: Console, total_steps: int, every_seconds: float, headline: Sequence[str] = ("loss",)
    ) -> None:
        self.console, self.total_steps, self.headline = console, total_steps, headline
        self.every_seconds = every_seconds
        self.latest: Row = {}  # the numbers of the latest step
        self._printed, self._began = -math.inf, time.perf_counter()
        self._first = self._last = 0
        self._timed: tuple[int, float] | None = None  # step and time of the first row, after compilation

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._began, self._first = time.perf_counter(), trainer.global_step

    def listen(self, row: Row) -> None:
        self.latest = joined(self.latest, row)
        elapsed = time.perf_counter() - self._began
        self._timed = self._timed or (row["step"], elapsed)
        if "val/loss" in row or elapsed - self._printed >= self._pause(row["step"], elapsed):
            self._print(row["step"], elapsed)

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        step = self.latest.get("step", self._last)
        if step > self._last and self.every_seconds < math.inf:
            self._print(step, time.perf_counter() - self._began)

    def _print(self, step: int, elapsed: float) -> None:
        """Prints the numbers of the latest step."""
        self._printed, self._last = elapsed, step
        named = f"step {step:>{len(str(self.total_steps))}}/{self.total_steps}"
        words = "  ".join([named, *parts(self.latest, self.headline), self._times(step, elapsed)])
        self.console.print(words, soft_wrap=True, highlight=False)

    def _pause(self, step: int, seconds: float) -> float:
        """Returns the seconds between lines: `every_seconds`, or more so that the run prints at most LINES lines."""
        return max(self.every_seconds, self._step_seconds(step, seconds) * (self.total_steps - self._first) / LINES)

    def _step_seconds(self, step: int, seconds: float) -> float:
        """Returns the mean time of a step since the first row, or 0.0 at that row."""
        first, then = self._timed or (step, seconds)
        return (seconds - then) / (step - first) if step > first else 0.0

    def _times(self, step: int, seconds: float) -> str:
        """Describes the elapsed time and, at the current rate, the time left."""
        each = self._step_seconds(step, seconds)
        left = f", {duration(each * (self.total_steps - step))} left" if each > 0 or step == self.total_steps else ""
        return f"{duration(seconds)} elapsed{left}"


def progress_bar(config: Config, console: Console, total_steps: int) -> RichBar | PlainLines | None:
    style = config.callbacks.progress.style
    if style == "auto":
        style = "rich" if console.is_terminal else "plain"
    if style == "rich":
        return RichBar(console, total_steps, config.headline())
    if style == "plain":
        # A trial of a sweep prints only its validations.
        every = math.inf if os.environ.get(TRIAL) == "1" else EVERY_SECONDS
        return PlainLines(console, total_steps, every, config.headline())
    return None
