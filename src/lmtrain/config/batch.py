"""The rows of a step: how they are laid out over devices and micro-batches, and how they grow. Imports no torch.

The length of rows and the rows of a step grow in steps of a line from the first value to the last (Li et al. 2022, "The
Stability-Efficiency Dilemma"), rounded down to a few values that divide the last one: compiled code sees few shapes.
"""

import bisect
import math
from dataclasses import dataclass

from lmtrain.config.schema import Config
from lmtrain.config.schema_data import DataConfig
from lmtrain.config.strategies import check_devices, ranks_per_part
from lmtrain.errors import UserError


@dataclass(frozen=True)
class BatchSplit:
    """How a global batch is laid out: rows = parts x accumulation x micro_batch_size."""

    global_batch_size: int
    micro_batch_size: int
    parts: int  # devices, or groups of devices that read the same rows
    devices_per_part: int = 1

    @property
    def accumulation(self) -> int:
        return self.global_batch_size // (self.micro_batch_size * self.parts)

    def __str__(self) -> str:
        word = "device" if self.devices_per_part == 1 else "group"
        readers = f"{self.parts} {word}{'s' if self.parts > 1 else ''}"
        if self.devices_per_part > 1:
            readers += f" of {self.devices_per_part} devices"
        return (
            f"{self.global_batch_size} rows = {readers} x {self.accumulation} micro-batch"
            f"{'es' if self.accumulation > 1 else ''} x {self.micro_batch_size} rows"
        )


def split_over(config: Config, processes: int) -> BatchSplit:
    """How a global batch is laid out over so many processes, whose number is known by now.

    Raises:
        UserError: see `batch_split`; devices that don't form whole tensor-parallel groups.
    """
    check_devices(config.trainer)
    together = ranks_per_part(config.trainer)
    return batch_split(config.data.global_batch_size, config.data.micro_batch_size, processes // together, together)


def batch_split(global_batch_size: int, micro_batch_size: int, parts: int, devices_per_part: int = 1) -> BatchSplit:
    """The split of a global batch; UserError with the nearest one that works where it doesn't divide."""
    unit = micro_batch_size * parts
    if global_batch_size % unit == 0:
        return BatchSplit(global_batch_size, micro_batch_size, parts, devices_per_part)
    nearest = max(1, round(global_batch_size / unit)) * unit
    fixes = [f"data.global_batch_size={nearest}"]
    if global_batch_size % parts == 0:
        per_part = global_batch_size // parts
        small = [d for d in range(1, math.isqrt(per_part) + 1) if per_part % d == 0]
        divisors = [*small, *(per_part // d for d in small)]
        fixes.insert(0, f"data.micro_batch_size={min(divisors, key=lambda d: (abs(d - micro_batch_size), d))}")
    raise UserError(
        f"data.global_batch_size={global_batch_size} does not split into {parts} "
        f"{'device(s)' if devices_per_part == 1 else f'group(s) of {devices_per_part} devices'} x "
        f"data.micro_batch_size={micro_batch_size}: set {' or '.join(fixes)}"
    )


@dataclass(frozen=True)
class Stages:
    """A number above 0 for each step: values[i] from step starts[i] on; the first starts at step 0."""

    starts: tuple[int, ...]
    values: tuple[int, ...]

    @classmethod
    def constant(cls, value: int) -> "Stages":
        return cls((0,), (value,))

    @classmethod
    def growing(cls, first: int, last: int, steps: int) -> "Stages":
        """Stages that grow from `first` at step 0 to `last` at step `steps`; `first` divides `last`.

        Between them stand multiples of `first` that divide `last`, each at least twice the one before.
        """
        values = [first]
        for value in range(2 * first, last, first):
            if last % value == 0 and value >= 2 * values[-1]:
                values.append(value)
        values.append(last)
        # The line reaches a value at this share of the steps; the first step at or after that has it.
        return cls(tuple(-(-steps * (v - first) // (last - first)) for v in values), tuple(values))

    @property
    def last(self) -> int:
        return self.values[-1]

    def at(self, step: int) -> int:
        """The number of a step."""
        return self.values[bisect.bisect_right(self.starts, step) - 1]

    def before(self, step: int) -> int:
        """The sum of the numbers of the steps 0 .. step - 1."""
        ends = [*self.starts[1:], step]
        return sum(v * max(0, min(e, step) - s) for s, e, v in zip(self.starts, ends, self.values, strict=True))

    def step_of(self, item: int) -> int:
        """The step that item `item` falls in, where each step takes as many items as its number says."""
        firsts = [self.before(start) for start in self.starts]
        stage = bisect.bisect_right(firsts, item) - 1
        return self.starts[stage] + (item - firsts[stage]) // self.values[stage]

    def steps_for(self, items: int) -> int:
        """The fewest steps that take so many items."""
        return self.step_of(items - 1) + 1 if items > 0 else 0

    def in_words(self) -> str:
        """'64, 128 from step 100 on, 256 from step 300 on'."""
        first, *later = zip(self.starts, self.values, strict=True)
        return ", ".join([f"{first[1]:,}", *(f"{value:,} from step {start:,} on" for start, value in later)])


def step_sizes(data: DataConfig) -> Stages:
    """The rows of each optimizer step."""
    start, steps = data.batch_warmup.start_size, data.batch_warmup.steps
    if start is None or steps is None:
        return Stages.constant(data.global_batch_size)
    return Stages.growing(start, data.global_batch_size, steps)


def row_lengths(data: DataConfig) -> Stages | None:
    """The tokens of a row in each optimizer step; None where it is always data.seq_len."""
    c = data.curriculum
    if c.by != "length" or c.start_length is None or c.steps is None:
        return None
    return Stages.growing(c.start_length, data.seq_len, c.steps)


def check_growth(c: Config) -> None:
    """Raises UserError for values that no row or step can grow by."""
    d = c.data
    if d.curriculum.by == "length":
        _check_lengths(d)
    w = d.batch_warmup
    if w.start_size is None:
        return
    if w.steps is None:
        raise UserError(
            f"data.batch_warmup.start_size={w.start_size} needs data.batch_warmup.steps: the step at which a step has "
            f"data.global_batch_size={d.global_batch_size} rows"
        )
    _check_divides("data.batch_warmup.start_size", w.start_size, "data.global_batch_size", d.global_batch_size)


def _check_lengths(d: DataConfig) -> None:
    c = d.curriculum
    if d.rows != "text" or d.packing not in (None, "concat"):
        found = f"data.packing={d.packing}" if d.rows == "text" else f"this data holds {d.rows}"
        raise UserError(
            f"data.curriculum.by=length cuts rows of concatenated text into shorter ones, and {found}: set "
            f"data.{'packing' if d.rows == 'text' else 'curriculum.by'}=null"
        )
    missing = [name for name in ("start_length", "steps") if getattr(c, name) is None]
    if missing:
        raise UserError(
            f"data.curriculum.by=length needs data.curriculum.{missing[0]}: start_length is how many tokens the first "
            f"rows have, steps after how many steps they have data.seq_len={d.seq_len}"
        )
    assert c.start_length is not None
    if c.end_length not in (None, d.seq_len):
        raise UserError(
            f"data.curriculum.end_length={c.end_length}: rows grow up to data.seq_len={d.seq_len}; leave it out, or "
            f"set data.seq_len={c.end_length}"
        )
    _check_divides("data.curriculum.start_length", c.start_length, "data.seq_len", d.seq_len)


def _check_divides(key: str, first: int, of: str, last: int) -> None:
    """Raises UserError where `first` is not a smaller divisor of `last`."""
    if first < last and last % first == 0:
        return
    if last == 1:
        raise UserError(f"{key}={first}: {of}=1 leaves nothing to grow; set {key}=null")
    divisors = (n for n in range(1, last // 2 + 1) if last % n == 0)
    nearest = min(divisors, key=lambda n: (abs(n - first), n))
    raise UserError(f"{key}={first} has to be smaller than {of}={last} and to divide it: set {key}={nearest}")


def check_reached(c: Config, total_steps: int) -> None:
    """Raises UserError where the run ends before its rows or steps have grown up; a fast_dev_run may."""
    if c.trainer.fast_dev_run:
        return
    found = {"data.curriculum.steps": row_lengths(c.data), "data.batch_warmup.steps": step_sizes(c.data)}
    for key, stages in found.items():
        if stages is not None and stages.starts[-1] >= total_steps:
            raise UserError(
                f"{key}={stages.starts[-1]}: the run ends after {total_steps:,} steps, before that: set {key}="
                f"{max(1, total_steps // 2)} or less, or train longer (trainer.max_steps)"
            )


def rate_factor(sizes: Stages, scaling: str, step: int) -> float:
    """What a data.batch_warmup.lr_scaling multiplies the learning rate of a step by."""
    power = {"none": 0.0, "sqrt": 0.5, "linear": 1.0}[scaling]
    return float((sizes.at(step) / sizes.last) ** power)


def horizon(max_steps: int | None, max_epochs: int | None, rows: int, sizes: Stages) -> int:
    """Optimizer steps of the whole run: the first reached of max_steps and max_epochs; the last may be shorter."""
    by_epochs = None if max_epochs is None else sizes.steps_for(rows * max_epochs)
    steps = min(s for s in (max_steps, by_epochs) if s is not None)
    if steps < 1:
        raise UserError("the run has no steps: the training data has no rows")
    return steps
