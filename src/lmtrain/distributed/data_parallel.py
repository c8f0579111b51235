"""The data-parallel layout: which rank reads which rows, and how sums are reduced over ranks.

Without tensor parallelism each rank reads rows of its own. The ranks of a tensor-parallel group read the same rows and
have the same losses: what they count must count once.
"""

from typing import NamedTuple

import lightning.pytorch as pl
import torch.distributed
from torch import Tensor


class DataParallel(NamedTuple):
    """Where a rank stands among those that read different rows."""

    size: int  # parts that the rows of a step are split into
    rank: int  # the part this rank reads
    copies: int  # ranks that read one part


def data_parallel(trainer: pl.Trainer) -> DataParallel:
    """Neighbouring ranks form a group, as in the mesh of the strategy."""
    copies = getattr(trainer.strategy, "tensor_parallel_size", 1)
    return DataParallel(trainer.world_size // copies, trainer.global_rank // copies, copies)


def total(trainer: pl.Trainer, sums: Tensor) -> Tensor:
    """Sums (floating point) over all rows from sums over each rank's; every rank must call it."""
    if trainer.world_size == 1:
        return sums
    summed = sums.clone()
    torch.distributed.all_reduce(summed)  # Lightning's reduce would pay a barrier before it
    return summed / data_parallel(trainer).copies


def agreed(trainer: pl.Trainer, counts: Tensor, asked: bool) -> tuple[Tensor, bool]:
    """Counts of all rows of a step, from this rank's, and whether any rank was asked to stop; every rank must call it.

    Hosts wait for each other, not for their devices.

    Args:
        counts: int64 [n] in host memory, as are those returned.
    """
    if trainer.world_size == 1:
        return counts, asked
    # The group that Lightning makes of GPUs, under a Trainer of one's own, knows no tensors in host memory.
    has_hosts = "cpu:" in torch.distributed.get_backend_config()
    summed = torch.cat([counts, torch.tensor([int(asked)])]).to("cpu" if has_hosts else trainer.strategy.root_device)
    torch.distributed.all_reduce(summed)
    *total, stops = summed.tolist()
    return torch.tensor(total) // data_parallel(trainer).copies, stops > 0
