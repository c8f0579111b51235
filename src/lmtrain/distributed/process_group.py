"""The process group, created before Lightning would: rendezvous, broadcasts from rank 0, errors raised on all ranks."""

import datetime
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.distributed.constants import default_pg_timeout

from lmtrain.errors import RunError, UserError

S = TypeVar("S")
T = TypeVar("T")
# Environment variable with the folder of the rendezvous file; unlike a port, no other process can occupy a file.
MEETING = "LMTRAIN_MEETING"
_TRACES = "TORCH_FR_DUMP_TEMP_FILE"
# A buffer of 2,000 calls, as PyTorch's tutorial recommends.
_FLIGHT_RECORDER = {"TORCH_NCCL_DUMP_ON_TIMEOUT": "1", "TORCH_FR_BUFFER_SIZE": "2000"}


_patience: datetime.timedelta | None = None  # the timeout of the group that `connect` made


def connect(accelerator: str, patience: float) -> None:
    """Creates the process group if this process is one rank of several; Lightning then uses the existing group.

    Args:
        accelerator: resolved, cpu or cuda.
        patience: seconds that a rank waits for the others before it gives up (trainer.rank_timeout).
    """
    global _patience
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    if ranks == 1 or dist.is_initialized():
        return
    for name, value in _FLIGHT_RECORDER.items():
        os.environ.setdefault(name, value)
    backend = "cpu:gloo,cuda:nccl" if accelerator == "cuda" else "gloo"
    timeout = _patience = datetime.timedelta(seconds=patience)
    meeting = os.environ.get(MEETING)
    if meeting is None:  # started by torchrun or SLURM
        dist.init_process_group(backend, timeout=timeout)
        return
    # One file per start: restarted ranks must not find the addresses of those that failed.
    store = dist.FileStore(f"{meeting}/{os.environ['TORCHELASTIC_RESTART_COUNT']}", ranks)
    store.set_timeout(timeout)
    dist.init_process_group(backend, timeout=timeout, store=store, rank=int(os.environ["RANK"]), world_size=ranks)


def equal_patience() -> None:
    """Sets the timeout of all process groups of this rank to that of the first; torch gives each new one its own."""
    if _patience is not None:
        for group in list(distributed_c10d._world.pg_map):
            distributed_c10d._set_pg_timeout(_patience, group)


def patience() -> float:
    """Returns the seconds that this rank waits for others before it gives up."""
    return (_patience or default_pg_timeout).total_seconds()


def write_traces_to(folder: Path) -> None:
    """Sets where NCCL dumps traces of a hanging run for `torchfrtrace`; NCCL reads the setting when it writes them."""
    os.environ.setdefault(_TRACES, f"{folder}/nccl_trace_rank_")


def traces() -> str:
    """Returns a glob pattern of the trace files that NCCL writes."""
    return f"{os.environ.get(_TRACES, 'nccl_trace_rank_')}*"


def size() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def together(make: Callable[[], T]) -> T:
    """Returns what `make` returns on this rank, once all ranks have called it.

    Raises:
        UserError, RunError, OSError: the error of the first rank that raised one, on all ranks, so that none waits for
            a rank that has failed.
    """
    made: T | None = None
    mistake: Exception | None = None
    try:
        made = make()
    except (UserError, RunError, OSError) as error:
        if getattr(error, "shared", False):
            raise
        mistake = error
    gathered(None, mistake)
    return made  # type: ignore[return-value]


def from_first(make: Callable[[], T]) -> T:
    """Calls `make` on rank 0 only and returns its result on every rank. Rank 0's errors are raised on all ranks."""
    box = [together(lambda: make() if rank() == 0 else None)]
    if size() > 1:
        dist.broadcast_object_list(box, src=0)
    return box[0]  # type: ignore[return-value]


def gathered(mine: T, mistake: Exception | None = None) -> list[T]:
    """Returns the values of all ranks, in the order of the ranks, on every rank; all ranks must call it.

    All gathers of this module exchange the same kind of pair, so that ranks at an earlier gather also understand the
    error of a rank that is ahead of them.

    Args:
        mistake: an error of this rank's, given by `together`.

    Raises:
        UserError, RunError, OSError: the first rank's error, on all ranks, marked as shared.
    """
    found: list[Any] = [(mine, mistake)] * size()
    if size() > 1:
        dist.all_gather_object(found, (mine, mistake))
    error = next((error for _, error in found if error is not None), None)
    if error is not None:
        error.shared = size() > 1
        raise error
    return [value for value, _ in found]


def shared_out(items: Sequence[S], do: Callable[[S], T]) -> list[T]:
    """Returns the result of `do` for each item, in order, on every rank; each rank computes every n-th item.

    Raises:
        UserError, RunError, OSError: the error of the first rank that raised one, on all ranks.
    """
    parts = gathered(together(lambda: [do(item) for item in items[rank() :: size()]]))
    return [parts[i % size()][i // size()] for i in range(len(items))]
