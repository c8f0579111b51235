"""Numbers in a step's record besides losses: tokens per source, growing sizes, memory and GPU load."""

import functools
import importlib.util
import math
import os
import resource
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from transformers import PreTrainedModel

from lmtrain import terminal
from lmtrain.config.batch import Stages, row_lengths, step_sizes
from lmtrain.config.schema import Config, DataConfig
from lmtrain.data.order import Rows
from lmtrain.errors import first_line
from lmtrain.models.feature import Feature


class StepNumbers:
    """A callable that maps a number of steps taken to {"tokens_seen/<source>", "row_length", "step_rows"}.

    These are the tokens from each source of a mixture so far and, if they grow, the tokens of a row and the rows of
    data.seq_len in the last of these steps.
    """

    def __init__(self, data: DataConfig, rows: Rows, max_epochs: int | None) -> None:
        self.seq_len, self.mixture = data.seq_len, getattr(rows, "mixture", None)
        self.sizes = step_sizes(data)
        self.lengths = row_lengths(data) or Stages.constant(self.seq_len)
        self.all_rows = len(rows) * max_epochs if max_epochs is not None else math.inf

    def __call__(self, steps: int) -> dict[str, int]:
        found = {}
        if self.mixture is not None:
            given = self.mixture.rows_given(self.rows_before(steps))
            for source, rows in zip(self.mixture.sources, given, strict=True):
                found[f"tokens_seen/{source.name}"] = int(rows) * self.seq_len
        if len(self.lengths.values) > 1:
            found["row_length"] = self.row_length(steps)
        if len(self.sizes.values) > 1:
            found["step_rows"] = self.sizes.at(steps - 1)
        return found

    def row_length(self, steps: int) -> int:
        """Returns the tokens of a row in the last of `steps` steps."""
        return self.lengths.at(steps - 1)

    def rows_of_last(self, last: int, steps: int) -> int:
        """Returns the number of rows of data.seq_len in the last `last` of `steps` steps."""
        return self.rows_before(steps) - self.rows_before(steps - last)

    def rows_before(self, steps: int) -> int:
        """Returns the rows before a step; the last step of a run limited by epochs may be short."""
        return int(min(self.sizes.before(steps), self.all_rows))


MACHINE = ("host_memory_gib", "gpu_utilization", "gpu_watts")  # the fields of `machine_numbers`

_PAGES = Path("/proc/self/statm")


def machine_numbers(device: torch.device) -> dict[str, float]:
    """Returns host_memory_gib (resident); on CUDA with nvidia-ml-py also gpu_utilization (0 to 1) and gpu_watts.

    Those two are read at most once in NVML_SECONDS. Values that NVML can't read on this device (MIG partitions, virtual
    GPUs) are left out, which is reported once.
    """
    numbers = {"host_memory_gib": round(resident_bytes() / 2**30, 3)}
    if device.type == "cuda" and has_nvml():
        numbers |= _nvml_numbers(device, int(time.monotonic() / NVML_SECONDS))
    return numbers


NVML_SECONDS = 30  # a reading takes the driver up to tens of milliseconds, in which nothing is launched


@functools.lru_cache(maxsize=1)
def _nvml_numbers(device: torch.device, period: int) -> dict[str, float]:
    numbers = {}
    for name in [name for name in _NVML if name not in _unread]:
        try:
            numbers[name] = _NVML[name](device)
        except Exception as error:  # NVML's errors share no base class with torch's
            _unread.add(name)
            terminal.note(f"{name} is left out of the records: {first_line(error)}")
    return numbers


_NVML: dict[str, Callable[[torch.device], float]] = {
    "gpu_utilization": lambda device: torch.cuda.utilization(device) / 100,
    "gpu_watts": lambda device: torch.cuda.power_draw(device) / 1000,
}
_unread: set[str] = set()  # names that this process failed to read


@functools.cache
def has_nvml() -> bool:
    """Returns whether the package that reads NVML is installed."""
    return importlib.util.find_spec("pynvml") is not None


def resident_bytes() -> int:
    """Returns this process's resident memory: the current value on Linux, elsewhere the peak."""
    if _PAGES.exists():
        return int(_PAGES.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return peak_resident_bytes()


def peak_resident_bytes() -> int:
    """Returns this process's peak resident memory in bytes; the system reports KiB, macOS bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


class Growing(Feature):
    """Rows or steps that are shorter early in the run: data.curriculum, data.batch_warmup."""

    def is_on(self, config: Config) -> bool:
        return row_lengths(config.data) is not None or len(step_sizes(config.data).values) > 1

    def plan_rows(self, model: PreTrainedModel, config: Config) -> list[tuple[str, str]]:
        lengths, sizes = row_lengths(config.data), step_sizes(config.data)
        found = []
        if lengths is not None:
            found.append(("row length", f"{lengths.in_words()}: tokens; the tokens per step stay the same"))
        if len(sizes.values) > 1:
            found.append(("rows a step", sizes.in_words()))
        return found
