"""The one way numbers leave a run: a record per logged step and per validation, to metrics.jsonl and every logger.

`Records` is a Lightning logger. What the run itself measures, what a module or a callback logs with Lightning's
`self.log`, and what is handed to any logger's `log_metrics` goes into the record of the step that is being made. A
record is written whole, before that step's checkpoint, so a resumed run neither repeats nor loses one.
"""

import contextlib
import json
import math
import time
from collections.abc import Callable, Iterator, Mapping
from numbers import Real
from pathlib import Path
from types import MappingProxyType
from typing import Any, TextIO

import torch
from lightning.pytorch.loggers.logger import Logger

from lmtrain import terminal
from lmtrain.errors import RunError, first_line

Row = dict[str, Any]


class Joined:
    """Mixin for a Lightning logger of a run: it gets whole records, and what is logged to it joins the record."""

    records: "Records"
    sent: Mapping[str, set[int]] = MappingProxyType({})  # steps by name that are there already and can't be taken back
    _last: tuple[int, frozenset[str]] = (-1, frozenset())  # the step written last and its names

    def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        self.records.log_metrics(metrics, step)

    def write_record(self, row: Row, validation: bool) -> None:
        """Hands a record's numbers to the logger's own log_metrics; called on rank 0 only."""
        (last, names), step = self._last, row["step"]
        known = names if step == last else frozenset()  # tokens_seen: no curve has a step twice
        numbers = {k: v for k, v in row.items() if k not in ("step", *known) and isinstance(v, int | float)}
        numbers = {k: v for k, v in numbers.items() if step not in self.sent.get(k, ())}
        self._last = (step, known | numbers.keys())
        if numbers:
            super().log_metrics(numbers, step=step)  # type: ignore[misc]

    def log_texts(self, columns: list[str], rows: list[list[str]]) -> None:
        """Adds rows to the table of samples, where the logger has tables."""

    def open_run(self, after: int, tell: Callable[[str], None]) -> None:
        """Opens files and connections; the run goes on after the step `after`."""
        _ = self.experiment  # type: ignore[attr-defined]

    def note_sent(self, rows: list[Row]) -> None:
        """Sets `sent`, where the tracker can't take back what earlier processes sent; `rows`: what they logged."""

    def finalize(self, status: str = "success") -> None:
        """What a tracker can't do at the end is said, and no more: the run is trained."""
        if self in self.records.joined:
            with self.records.outliving(self):
                super().finalize(status)  # type: ignore[misc]


class Records(Logger):
    """Writes metrics.jsonl. Every rank collects, rank 0 writes."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.path = path
        self.joined: list[Joined] = []  # the loggers that get each record
        self.rows = 0  # in the file; of a resumed run, what it was cut back to
        self.step: int | None = None  # whose record is open; None: training has not started
        self.validating = False  # what is logged now belongs to the record of a validation
        self._own: dict[bool, Row] = {}  # the run's own numbers, of training (False) and of a validation (True)
        self._logged: dict[bool, Row] = {False: {}, True: {}}  # what was logged besides
        self._written: set[str] | None = None  # names in the step's record, once it is written
        self._before_end: set[str] = set()  # names in the last step's record
        self._repeats = False  # between the start of a resumed training and its first step
        self._told: set[str] = set()
        self._file: TextIO | None = None

    def start(self, step: int) -> None:
        """Training starts after `step` steps. What a resumed one logs before its first step was logged by the first."""
        self.step, self._written, self._repeats = step, None, step > 0

    def begin(self, step: int, write: bool) -> None:
        """Opens the record of a step, the first being 1."""
        self.write(write)
        self.step, self._written, self._repeats = step, None, False

    def put(self, row: Row, validation: bool) -> None:
        """The run's own numbers of the step, or of its validation."""
        self._own[validation] = row

    def add(self, row: Row) -> None:
        """More of the run's own values of a logged step; lists of numbers stay in metrics.jsonl alone."""
        self._own[False] |= row

    def holds(self, validation: bool) -> bool:
        """Whether the run's own numbers of the step, or of its validation, wait to be written."""
        return validation in self._own

    def logged_in_validation(self) -> Row:
        """What was logged in this step's validation besides the run's own numbers."""
        return dict(self._logged[True])

    def forget_validation(self) -> None:
        """An interrupted validation is made again; one outside of training has no record."""
        self.validating = False
        self._own.pop(True, None)
        self._logged[True] = {}

    def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        """Adds to the open record, whatever `step` says: Lightning counts from 0, records count steps that are done.

        Raises:
            RunError: a value is not a single number; training has not started.
        """
        values = {name: number(name, value) for name, value in metrics.items() if name != "epoch"}
        if self.validating:
            self._logged[True] |= values
        elif self.step is None:
            raise RunError(
                f"{', '.join(values)} was logged before training: a record belongs to a step. "
                f"Log it in on_train_start or later"
            )
        elif self._written is None and not self._repeats:
            self._logged[False] |= values
        elif self._written is not None:
            late = [name for name in values if name not in self._written]
            self._tell(late, "was logged after its step's record: log it in training_step or in a callback")

    def write(self, rank_zero: bool) -> None:
        """Writes what has gathered: the step's record, then its validation's."""
        for validation in (False, True):
            own, logged = self._own.pop(validation, {}), self._logged[validation]
            self._logged[validation] = {}
            row = {"step": self.step} | own | {k: v for k, v in logged.items() if k not in own}
            self._tell(
                [k for k in logged if k in own], "is a name of lmtrain's own numbers, which stay: log yours as another"
            )
            if len(row) > 1 and rank_zero:
                self._append(row, validation)

    def close_step(self, rank_zero: bool) -> None:
        """Writes the step's record; what is logged to it from here on comes too late."""
        names = {*self._own.get(False, {}), *self._logged[False]}
        self.write(rank_zero)
        self._written = names

    def abandon(self, rank_zero: bool) -> None:
        """Training failed: writes what is of a step or a validation that was finished."""
        for validation in (False, True):
            if validation not in self._own:
                self._logged[validation] = {}
        self.write(rank_zero)
        self.close()

    def reopen(self) -> None:
        """The last step's record is written; Lightning is about to log what it gathered over the epoch."""
        self._before_end, self._written = self._written or set(), None

    def end(self, rank_zero: bool, whole: bool) -> None:
        """Writes what is known since `reopen`, where the `whole` epoch was trained and not a part of it."""
        if not whole:
            self._logged[False] = {}
        self._logged[False] = {k: v for k, v in self._logged[False].items() if k not in self._before_end}
        self.write(rank_zero)

    def _append(self, row: Row, validation: bool) -> None:
        if self._file is None:
            self._file = self.path.open("a", encoding="utf-8")
        strict = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in row.items()}
        self._file.write(json.dumps({**strict, "time": round(time.time(), 3)}, allow_nan=False) + "\n")
        self._file.flush()
        self.rows += 1
        for logger in [*self.joined]:
            with self.outliving(logger):
                logger.write_record(row, validation)

    @contextlib.contextmanager
    def outliving(self, logger: Joined) -> Iterator[None]:
        """Within it a failure of a tracker (its server, its disk) is said once, and the run goes on without it."""
        try:
            yield
        except Exception as error:  # trackers' errors share no base class
            self.joined.remove(logger)
            name = type(logger).__name__.lower()
            terminal.console().print(
                f"note: logger.{name} failed ({first_line(error)}): the run continues without it; {self.path} has all"
            )

    def _tell(self, names: list[str], what: str) -> None:
        new = [name for name in names if name not in self._told]
        if new:
            self._told |= set(new)
            terminal.console().print(f"note: {', '.join(new)} {what}")

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    # What Lightning asks of a logger besides.
    def log_hyperparams(self, *_: Any, **__: Any) -> None:
        """config.yaml holds them."""

    @property
    def experiment(self) -> "Records":
        return self

    @property
    def name(self) -> str:
        return ""

    @property
    def version(self) -> str:
        return ""

    @property
    def save_dir(self) -> str:
        return str(self.path.parent)


def number(name: str, value: Any) -> int | float:
    """The value as a Python number; RunError where it is not a single one."""
    if isinstance(value, torch.Tensor):
        if value.numel() == 1 and not value.is_complex():
            return value.item()
        raise RunError(
            f"{name} was logged with a tensor of shape {tuple(value.shape)}: log a single number, its mean say"
        )
    if isinstance(value, Real):
        return int(value) if isinstance(value, int) else float(value)
    raise RunError(f"{name} was logged with a {type(value).__name__}: log a single number")
