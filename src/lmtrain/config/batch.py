"""How the rows of a step are laid out over devices and micro-batches. Imports no torch."""

import math
from dataclasses import dataclass

from lmtrain.config.schema import Config
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
