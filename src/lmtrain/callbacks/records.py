"""Records of metrics: one per logged step and one per validation, written to metrics.jsonl and every logger.

All metrics of a run go through `Records`, a Lightning logger. What the run itself measures, what a module or callback
logs with Lightning's `self.log`, and what is passed to any logger's `log_metrics` goes into the record of the current
step. A record is written as a whole, before that step's checkpoint, so a resumed run neither repeats nor loses one.
"""

import contextlib
import json
import math
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from numbers import Real
from pathlib import Path
from types import MappingProxyType
from typing import Any, TextIO

import torch
from lightning.pytorch.loggers.logger import Logger

from lmtrain import terminal
from lmtrain.config.override_text import shell_word
from lmtrain.errors import RunError, first_line

Row = dict[str, Any]


class Joined:
    """Mixin for a run's Lightning loggers: they get whole records, and values logged to them join the record."""

    records: "Records"
    sent: Mapping[str, set[int]] = MappingProxyType({})  # steps already sent, by metric; they can't be withdrawn
    _last: tuple[int, frozenset[str]] = (-1, frozenset())  # the last step written and its names

    def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        self.records.log_metrics(metrics, step)

    def write_record(self, row: Row, validation: bool) -> None:
        """Hands a record's numbers to the logger's own log_metrics; called on rank 0 only."""
        (last, names), step = self._last, row["step"]
        known = names if step == last else frozenset()  # such as tokens_seen: one value per step and curve
        numbers = {k: v for k, v in row.items() if k not in ("step", *known) and isinstance(v, int | float)}
        numbers = {k: v for k, v in numbers.items() if step not in self.sent.get(k, ())}
        self._last = (step, known | numbers.keys())
        if numbers:
            self.send(numbers, step)

    def send(self, row: Mapping[str, Any], step: int) -> None:
        """Hands a row of numbers to the tracker."""
        super().log_metrics(row, step=step)  # type: ignore[misc]

    def log_texts(self, columns: list[str], rows: list[list[str]]) -> None:
        """Adds rows to the table of samples, if the logger supports tables."""

    def open_run(self, after: int, tell: Callable[[str], None]) -> None:
        """Opens files and connections; the run continues after step `after`."""
        _ = self.experiment  # type: ignore[attr-defined]

    def note_sent(self, rows: Iterable[Row]) -> None:
        """Sets `sent` if the tracker can't withdraw what earlier processes sent; `rows` are those logged again."""

    def finalize(self, status: str = "success") -> None:
        """Finalizes the tracker; a failure is only reported, since the run is already trained."""
        if self in self.records.joined:
            with self.records.outliving(self):
                super().finalize(status)  # type: ignore[misc]


class Records(Logger):
    """The logger that writes metrics.jsonl. Every rank collects values, rank 0 writes them."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.path = path
        self.joined: list[Joined] = []  # the loggers that get each record
        self.rows = 0  # rows in the file; of a resumed run, after truncation
        self.step: int | None = None  # the step whose record is open; None before training
        self.validating = False  # whether logged values belong to the record of a validation
        self._own: dict[bool, Row] = {}  # the run's own numbers, of training (False) and of a validation (True)
        self._logged: dict[bool, Row] = {False: {}, True: {}}  # other logged values, likewise
        self._written: set[str] | None = None  # names in the step's record, once it is written
        self._before_end: set[str] = set()  # names in the last step's record
        self._repeats = False  # true from the start of a resumed training to its first step
        self._told: set[str] = set()
        self._file: TextIO | None = None

    def start(self, step: int) -> None:
        """Starts after `step` steps; on resume, values logged before the first step are dropped as repetitions."""
        self.step, self._written, self._repeats = step, None, step > 0

    def begin(self, step: int, write: bool) -> None:
        """Writes pending values and opens the record of a step, counted from 1."""
        self.write(write)
        self.step, self._written, self._repeats = step, None, False

    def put(self, row: Row, validation: bool) -> None:
        """Sets the run's own numbers of the step, or of its validation."""
        self._own[validation] = row

    def add(self, row: Row) -> None:
        """Adds to the run's own values of a logged step; lists of numbers are written to metrics.jsonl only."""
        self._own[False] |= row

    def holds_step(self) -> bool:
        """Returns whether the run's own numbers of the step are waiting to be written: it is a logged step."""
        return False in self._own

    def logged_in_validation(self) -> Row:
        """Returns what was logged in this step's validation besides the run's own numbers."""
        return dict(self._logged[True])

    def forget_validation(self) -> None:
        """Discards the record of a validation that was interrupted (it is repeated) or ran outside of training."""
        self.validating = False
        self._own.pop(True, None)
        self._logged[True] = {}

    def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        """Adds to the open record; ignores `step`, since Lightning counts from 0 and records count completed steps.

        Raises:
            RunError: a value is not a single number, or training has not started.
        """
        values = {name: number(name, value) for name, value in metrics.items() if name != "epoch"}
        if self.validating:
            self._logged[True] |= values
        elif self.step is None:
            raise RunError(f"{', '.join(values)} was logged before training: log it in on_train_start or later")
        elif self._written is None and not self._repeats:
            self._logged[False] |= values
        elif self._written is not None:
            late = [name for name in values if name not in self._written]
            self._tell(late, "was logged after its step's record: log it in training_step or in a callback")

    def write(self, rank_zero: bool) -> None:
        """Writes the collected values: the step's record, then that of its validation."""
        for validation in (False, True):
            own, logged = self._own.pop(validation, {}), self._logged[validation]
            self._logged[validation] = {}
            row = {"step": self.step} | own | {k: v for k, v in logged.items() if k not in own}
            ours = [name for name in logged if name in own]
            self._tell(ours, "is lmtrain's own name, whose value is kept: log yours under another name")
            if len(row) > 1 and rank_zero:
                self._append(row, validation)

    def close_step(self, rank_zero: bool) -> None:
        """Writes the step's record; values logged for the step after this are only reported as too late."""
        names = {*self._own.get(False, {}), *self._logged[False]}
        self.write(rank_zero)
        self._written = names

    def abandon(self, rank_zero: bool) -> None:
        """Writes, after training has failed, the record of a step or validation that was completed; closes the file."""
        for validation in (False, True):
            if validation not in self._own:
                self._logged[validation] = {}
        self.write(rank_zero)
        self.close()

    def reopen(self) -> None:
        """Reopens the last step's record, already written, for the values that Lightning logs over the epoch."""
        self._before_end, self._written = self._written or set(), None

    def end(self, rank_zero: bool, whole: bool) -> None:
        """Writes pending values; those logged since `reopen` only if the `whole` epoch was trained, not just a part."""
        if not whole:
            self._logged[False] = {}
        self._logged[False] = {k: v for k, v in self._logged[False].items() if k not in self._before_end}
        self.write(rank_zero)

    def refuse_moved(self) -> None:
        """Raises RunError if the run's folder was moved or removed: what is written by its name would be elsewhere.

        If only the file was removed, it is closed and a note says so: the next record begins it anew.
        """
        if self._file is None or _is_at(self._file, self.path):
            return
        now, folder = _place_of(self._file), self.path.parent
        if folder.is_dir() and (now is None or (folder / "config.yaml").exists()):
            terminal.note(f"{self.path} was removed: its records are lost, those after step {self.step} begin it anew")
            self.close()
            return
        there = "removed"
        if now is not None:
            how = f"{shell_word('run.dir', str(now.parent))} run.resume=auto"
            there = f"moved to {now.parent}: continue it there, {how}"
        raise RunError(f"{folder}, the run's folder, was {there} (training ended after step {self.step})")

    def _append(self, row: Row, validation: bool) -> None:
        self.refuse_moved()
        if self._file is None:
            try:
                self._file = self.path.open("a", encoding="utf-8")
            except FileNotFoundError:
                raise RunError(f"{self.path.parent}, the run's folder, was moved or removed while it trained") from None
        strict = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in row.items()}
        self._file.write(json.dumps({**strict, "time": round(time.time(), 3)}, allow_nan=False) + "\n")
        self._file.flush()
        self.rows += 1
        for logger in [*self.joined]:
            with self.outliving(logger):
                logger.write_record(row, validation)

    @contextlib.contextmanager
    def outliving(self, logger: Joined) -> Iterator[None]:
        """Reports a failure of the tracker (its server, its disk) in the context; the run continues without it."""
        try:
            yield
        except Exception as error:  # trackers' errors share no base class
            self.joined.remove(logger)
            failed = f"logger.{type(logger).__name__.lower()} failed ({first_line(error)})"
            terminal.note(f"{failed}: the run continues without this logger; {self.path} has every record")

    def _tell(self, names: list[str], what: str) -> None:
        new = [name for name in names if name not in self._told]
        if new:
            self._told |= set(new)
            terminal.note(f"{', '.join(new)} {what}")

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    # The rest of Lightning's logger interface.
    name = version = ""

    def log_hyperparams(self, *_: Any, **__: Any) -> None:
        """Does nothing: config.yaml holds the hyperparameters."""

    @property
    def experiment(self) -> "Records":
        return self

    @property
    def save_dir(self) -> str:
        return str(self.path.parent)


def _is_at(file: TextIO, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(file.fileno()), os.stat(path))
    except OSError:
        return False


def _place_of(file: TextIO) -> Path | None:
    """Returns the path that an open file has now, or None if it was removed or the system doesn't tell."""
    try:
        path = Path(os.readlink(f"/proc/self/fd/{file.fileno()}"))
    except OSError:
        return None
    return path if path.exists() else None


def number(name: str, value: Any) -> int | float:
    """Returns the value as a Python number; raises RunError if it is not a single number."""
    if isinstance(value, torch.Tensor):
        if value.numel() == 1 and not value.is_complex():
            return value.item()
        raise RunError(f"{name} was logged with a tensor of shape {tuple(value.shape)}: log one number, say its mean")
    if isinstance(value, Real):
        return int(value) if isinstance(value, int) else float(value)
    raise RunError(f"{name} was logged with a {type(value).__name__}: log a single number")
