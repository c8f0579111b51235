"""Batch layout: the split of a global batch over devices and micro-batches, and its growth. Imports no torch.

The row length and the number of rows per step grow linearly with the step from a first to a last value (Li et al. 2022,
"The Stability-Efficiency Dilemma"), rounded down to a few divisors of the last value, so compiled code sees few shapes.
"""

import bisect
import math
from dataclasses import dataclass

from lmtrain.config.schema import Config, TrainerConfig
from lmtrain.config.schema_data import DataConfig
from lmtrain.config.strategies import check_devices, ranks_per_part
from lmtrain.errors import UserError
from lmtrain.terminal import counted


@dataclass(frozen=True)
class BatchSplit:
    """The split of a global batch: rows = parts x accumulation x micro_batch_size."""

    global_batch_size: int
    micro_batch_size: int
    parts: int  # devices, or groups of devices that read the same rows
    devices_per_part: int = 1

    @property
    def accumulation(self) -> int:
        return self.global_batch_size // (self.micro_batch_size * self.parts)

    def __str__(self) -> str:
        readers = counted(self.parts, "device")
        if self.devices_per_part > 1:
            readers = f"{counted(self.parts, 'group')} of {self.devices_per_part} devices"
        micro_batches = f"{self.accumulation} micro-batch{'es' if self.accumulation > 1 else ''}"
        return f"{self.global_batch_size} rows = {readers} x {micro_batches} x {self.micro_batch_size} rows"


def split_over(config: Config, processes: int) -> BatchSplit:
    """Returns the split of a global batch over `processes` ranks; trainer.devices must be a number, not auto.

    Raises:
        UserError: see `batch_split`; or the devices don't form whole tensor-parallel or context-parallel groups.
    """
    check_devices(config.trainer)
    together = ranks_per_part(config.trainer)
    return batch_split(config.data.global_batch_size, config.data.micro_batch_size, processes // together, together)


def batch_split(global_batch_size: int, micro_batch_size: int, parts: int, devices_per_part: int = 1) -> BatchSplit:
    """Returns the split of a global batch; raises UserError, suggesting the nearest valid sizes, if there is none."""
    unit = micro_batch_size * parts
    if global_batch_size % unit == 0:
        return BatchSplit(global_batch_size, micro_batch_size, parts, devices_per_part)
    nearest = max(1, round(global_batch_size / unit)) * unit
    fixes = [f"data.global_batch_size={nearest}"]
    if global_batch_size % parts == 0:
        fixes.insert(0, f"data.micro_batch_size={nearest_divisor(global_batch_size // parts, micro_batch_size)}")
    readers = "device(s)" if devices_per_part == 1 else f"group(s) of {devices_per_part} devices"
    found = f"data.global_batch_size={global_batch_size} does not split into {parts} {readers}"
    raise UserError(f"{found} x data.micro_batch_size={micro_batch_size}: set {' or '.join(fixes)}")


def nearest_divisor(number: int, to: int) -> int:
    """Returns the divisor of a number that is nearest to `to`; of two, the smaller."""
    small = [d for d in range(1, math.isqrt(number) + 1) if number % d == 0]
    return min([*small, *(number // d for d in small)], key=lambda d: (abs(d - to), d))


@dataclass(frozen=True)
class Stages:
    """A positive integer per step: values[i] from step starts[i] on, where starts[0] is 0."""

    starts: tuple[int, ...]
    values: tuple[int, ...]

    @classmethod
    def constant(cls, value: int) -> "Stages":
        return cls((0,), (value,))

    @classmethod
    def growing(cls, first: int, last: int, steps: int) -> "Stages":
        """Returns stages that grow from `first` at step 0 to `last` at step `steps`; `first` must divide `last`.

        The values between them are multiples of `first` that divide `last`, each at least twice the one before.
        """
        values = [first]
        for value in range(2 * first, last, first):
            if last % value == 0 and value >= 2 * values[-1]:
                values.append(value)
        values.append(last)
        # A value is used from the first step at or after the point where the linear growth reaches it.
        return cls(tuple(-(-steps * (v - first) // (last - first)) for v in values), tuple(values))

    @property
    def last(self) -> int:
        return self.values[-1]

    def at(self, step: int) -> int:
        """Returns the value at a step."""
        return self.values[bisect.bisect_right(self.starts, step) - 1]

    def before(self, step: int) -> int:
        """Returns the sum of the values of the steps 0 to step - 1."""
        ends = [*self.starts[1:], step]
        return sum(v * max(0, min(e, step) - s) for s, e, v in zip(self.starts, ends, self.values, strict=True))

    def step_of(self, item: int) -> int:
        """Returns the step that consumes item `item` (from 0), if each step consumes as many items as its value."""
        firsts = [self.before(start) for start in self.starts]
        stage = bisect.bisect_right(firsts, item) - 1
        return self.starts[stage] + (item - firsts[stage]) // self.values[stage]

    def steps_for(self, items: int) -> int:
        """Returns the smallest number of steps that consume `items` items."""
        return self.step_of(items - 1) + 1 if items > 0 else 0

    def in_words(self) -> str:
        """Describes the stages, as in '64, 128 from step 100 on, 256 from step 300 on'."""
        first, *later = zip(self.starts, self.values, strict=True)
        return ", ".join([f"{first[1]:,}", *(f"{value:,} from step {start:,} on" for start, value in later)])


def step_sizes(data: DataConfig) -> Stages:
    """Returns the number of rows in each optimizer step."""
    start, steps = data.batch_warmup.start_size, data.batch_warmup.steps
    if start is None or steps is None:
        return Stages.constant(data.global_batch_size)
    return Stages.growing(start, data.global_batch_size, steps)


def row_lengths(data: DataConfig) -> Stages | None:
    """Returns the row length in tokens for each optimizer step; None if it is always data.seq_len."""
    c = data.curriculum
    if c.by != "length" or c.start_length is None or c.steps is None:
        return None
    return Stages.growing(c.start_length, data.seq_len, c.steps)


def check_growth(c: Config) -> None:
    """Raises UserError for invalid settings of data.curriculum (row length) or data.batch_warmup (rows per step)."""
    d, end = c.data, c.data.curriculum.end_length
    if d.curriculum.by == "length":
        assert d.curriculum.start_length is not None  # see clashes.yaml
        if end not in (None, d.seq_len):
            raise UserError(f"data.curriculum.end_length={end}: rows grow up to data.seq_len={d.seq_len}; leave it out")
        _check_divides("data.curriculum.start_length", d.curriculum.start_length, "data.seq_len", d.seq_len)
    start = d.batch_warmup.start_size
    if start is not None:
        _check_divides("data.batch_warmup.start_size", start, "data.global_batch_size", d.global_batch_size)


def _check_divides(key: str, first: int, of: str, last: int) -> None:
    """Raises UserError unless `first` is a divisor of `last` and smaller than it."""
    if first < last and last % first == 0:
        return
    if last == 1:
        raise UserError(f"{key}={first}: {of}=1 leaves nothing to grow; set {key}=null")
    nearest = nearest_divisor(last, min(first, last // 2))
    raise UserError(f"{key}={first} has to be smaller than {of}={last} and to divide it: set {key}={nearest}")


def check_reached(c: Config, total_steps: int) -> None:
    """Raises UserError if the run ends before rows or steps reach their final size; a fast_dev_run is exempt."""
    if c.trainer.fast_dev_run:
        return
    found = {"data.curriculum.steps": row_lengths(c.data), "data.batch_warmup.steps": step_sizes(c.data)}
    for key, stages in found.items():
        if stages is not None and stages.starts[-1] >= total_steps:
            late = f"{key}={stages.starts[-1]}: the run ends after {total_steps:,} steps, before that"
            raise UserError(f"{late}: set {key}={max(1, total_steps // 2)} or less, or raise trainer.max_steps")


def horizon(max_steps: int | None, max_epochs: int | None, rows: int, sizes: Stages) -> int:
    """Returns the optimizer steps of the run, limited by max_steps and max_epochs; the last may have fewer rows."""
    by_epochs = None if max_epochs is None else sizes.steps_for(rows * max_epochs)
    steps = min(s for s in (max_steps, by_epochs) if s is not None)
    if steps < 1:
        raise UserError("the run has no steps: the training data has no rows")
    return steps


_SHORT, _LOGGED = 100, 10  # steps of a run that logs each of them, and after how many a longer one logs


def logged_every(trainer: TrainerConfig, total_steps: int) -> int:
    """Returns after how many steps a run of `total_steps` logs, where trainer.log_every_n_steps leaves it open too."""
    return trainer.log_every_n_steps or (1 if total_steps <= _SHORT else _LOGGED)
