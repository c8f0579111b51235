"""What moves on the screen while training: one rich bar on a terminal, plain lines elsewhere."""

import time
from typing import Any

import lightning.pytorch as pl
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from lmtrain.callbacks.metrics import Row

_SHOWN = (  # (key of a row, label, format)
    ("train/loss", "loss", "{:.4f}"),
    ("val/loss", "val", "{:.4f}"),
    ("train/rewards/accuracy", "accuracy", "{:.2f}"),
    ("train/rewards/margin", "margin", "{:.3f}"),
    ("val/rewards/accuracy", "val accuracy", "{:.3f}"),
    ("lr", "lr", "{:.2e}"),
    ("tokens_per_s", "tok/s", "{:,.0f}"),
    ("mfu", "mfu", "{:.1%}"),
)
_SECONDS_BETWEEN_UPDATES = 0.2  # of the bar's position; the eye sees no more and the step pays less


def describe(row: Row) -> str:
    """The row's main numbers on one line."""
    return "  ".join(f"{label} {form.format(row[key])}" for key, label, form in _SHOWN if key in row)


class RichBar(pl.Callback):
    """A single bar: step, loss, validation loss, learning rate, tokens/s, MFU, time left."""

    def __init__(self, console: Console, total_steps: int) -> None:
        self.console, self.total_steps = console, total_steps
        self.latest: Row = {}
        self.progress: Progress | None = None
        self.train: TaskID | None = None
        self.val: TaskID | None = None
        self._updated = 0.0

    def listen(self, row: Row) -> None:
        self.latest |= row
        if self.progress is not None and self.train is not None:
            self.progress.update(self.train, numbers=describe(self.latest), completed=row["step"])

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=None),
            MofNCompleteColumn(),
            TextColumn("{task.fields[numbers]}"),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            console=self.console,
            refresh_per_second=4,
            expand=True,
        )
        done = trainer.global_step
        self.train = self.progress.add_task("train", total=self.total_steps, completed=done, numbers="")
        self.progress.start()

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        now = time.perf_counter()
        if self.progress is not None and self.train is not None and now - self._updated > _SECONDS_BETWEEN_UPDATES:
            self.progress.update(self.train, completed=trainer.global_step)
            self._updated = now

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self.progress is not None:
            total = sum(int(n) for n in trainer.fit_loop.epoch_loop.val_loop.max_batches)
            self.val = self.progress.add_task("validate", total=total, numbers="")

    def on_validation_batch_end(self, *_: Any, **__: Any) -> None:
        if self.progress is not None and self.val is not None:
            self.progress.advance(self.val)

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self.progress is not None and self.val is not None:
            self.progress.remove_task(self.val)
            self.val = None

    def _stop(self) -> None:
        if self.progress is not None:
            self.progress.stop()
            self.progress = None

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self.progress is not None and self.train is not None:
            self.progress.update(self.train, completed=trainer.global_step)
        self._stop()

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        self._stop()


class PlainLines(pl.Callback):
    """A line now and then, and one per validation: for logs, pipes and notebooks."""

    def __init__(self, console: Console, total_steps: int, every_seconds: float) -> None:
        self.console, self.total_steps, self.every_seconds = console, total_steps, every_seconds
        self._printed = 0.0

    def listen(self, row: Row) -> None:
        now = time.perf_counter()
        last = row["step"] == self.total_steps
        if "val/loss" in row or last or now - self._printed >= self.every_seconds:
            self._printed = now
            self.console.print(f"step {row['step']:>{len(str(self.total_steps))}}/{self.total_steps}  {describe(row)}")
