"""The process group before Lightning connects it: rendezvous, broadcasts from rank 0, errors raised on all ranks."""

import datetime
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch.distributed as dist
from torch.distributed import distributed_c10d

from lmtrain.errors import RunError, UserError

S = TypeVar("S")
T = TypeVar("T")
# Tells ranks of one launcher the folder of the file in which they find each other; unlike a port, nobody takes it.
MEETING = "LMTRAIN_MEETING"
_TRACES = "TORCH_FR_DUMP_TEMP_FILE"
# 2,000 calls is what PyTorch's tutorial recommends.
_FLIGHT_RECORDER = {"TORCH_NCCL_DUMP_ON_TIMEOUT": "1", "TORCH_FR_BUFFER_SIZE": "2000"}


_patience: datetime.timedelta | None = None  # of the group that `connect` made


def connect(accelerator: str, patience: float) -> None:
    """Makes the process group where this process is one rank of many; Lightning takes the one that is there.

    Args:
        accelerator: resolved, cpu or cuda.
        patience: seconds after which a rank gives up on the others (trainer.rank_timeout).
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
    if meeting is None:  # torchrun's or SLURM's
        dist.init_process_group(backend, timeout=timeout)
        return
    # A file for each start: ranks that start again must not find the addresses of those that failed.
    store = dist.FileStore(f"{meeting}/{os.environ['TORCHELASTIC_RESTART_COUNT']}", ranks)
    store.set_timeout(timeout)
    dist.init_process_group(backend, timeout=timeout, store=store, rank=int(os.environ["RANK"]), world_size=ranks)


def equal_patience() -> None:
    """Gives all groups of this rank the time-out of the first one; torch makes each with one of its own."""
    if _patience is not None:
        for group in list(distributed_c10d._world.pg_map):
            distributed_c10d._set_pg_timeout(_patience, group)


def write_traces_to(folder: Path) -> None:
    """Where NCCL writes what each rank waited for if a run hangs; `torchfrtrace` reads it. It asks when it writes."""
    os.environ.setdefault(_TRACES, f"{folder}/nccl_trace_rank_")


def traces() -> str:
    """The files that NCCL writes then, as a pattern."""
    return f"{os.environ.get(_TRACES, 'nccl_trace_rank_')}*"


def size() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def together(make: Callable[[], T]) -> T:
    """What `make` gives on this rank, when all ranks have called it.

    Raises:
        UserError, RunError, OSError: of the first rank that met one, on all of them: none waits for one that
            has given up.
    """
    made: T | None = None
    mistake: Exception | None = None
    try:
        made = make()
    except (UserError, RunError, OSError) as error:
        if getattr(error, "shared", False):
            raise
        mistake = error
    _exchanged(None, mistake)
    return made  # type: ignore[return-value]


def from_first(make: Callable[[], T]) -> T:
    """What `make` gives on rank 0, on every rank; only rank 0 calls it. Rank 0's errors are raised everywhere."""
    made = together(lambda: make() if rank() == 0 else None)
    box = [made]
    if size() > 1:
        dist.broadcast_object_list(box, src=0)
    return box[0]  # type: ignore[return-value]


def gathered(mine: T) -> list[T]:
    """What each rank calls with, in the order of the ranks, on every one; all must call it.

    Raises:
        UserError, RunError, OSError: of a rank that met one meanwhile inside `together`, on all of them.
    """
    return _exchanged(mine, None)


def _exchanged(mine: T, mistake: Exception | None) -> list[T]:
    """The ranks' values, or the first one's mistake, raised on all, which is then marked as shared.

    All that is gathered here has this form, so that a rank that met an error is understood by those that have not
    come as far.
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
    """What `do` gives for each item, in their order, on every rank, each of which does every n-th of them.

    Raises:
        UserError, RunError, OSError: of the first rank that met one, on all of them.
    """
    parts = gathered(together(lambda: [do(item) for item in items[rank() :: size()]]))
    return [parts[i % size()][i // size()] for i in range(len(items))]
