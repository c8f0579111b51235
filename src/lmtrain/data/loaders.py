"""Datasets whose items are whole optimizer steps (training) or micro-batches (validation), and their loader workers."""

import contextlib
import itertools
import multiprocessing
import resource
import signal
import sys
import threading
import zlib
from collections.abc import Callable, Iterator
from dataclasses import KW_ONLY, dataclass
from typing import Any

import numpy as np
from torch.utils.data import Dataset, DistributedSampler, SequentialSampler

from lmtrain.config.batch import Stages
from lmtrain.config.schema import Config
from lmtrain.data import order
from lmtrain.data.mixing import Mixture
from lmtrain.data.order import MicroBatch, Rows
from lmtrain.data.text.windows import cut_rows
from lmtrain.distributed.ranks import end_with_parent
from lmtrain.distributed.stop_signals import SIGNALS
from lmtrain.errors import UserError


def rows_of_step(rows: Rows, step: int, *, sizes: Stages, seed: int, max_epochs: int | None = None) -> np.ndarray:
    """Returns a step's (epoch, row) pairs, int64 [n, 2] (see `order.stream_rows`); `sizes` has the rows per step."""
    first = sizes.before(step)
    stop = first + sizes.at(step)
    mixture: Mixture | None = getattr(rows, "mixture", None)
    if mixture is not None:
        return mixture.stream_rows(first, stop, seed=seed, max_epochs=max_epochs)
    return order.stream_rows(first, stop, rows=len(rows), seed=seed, max_epochs=max_epochs)


class ChosenRows:
    """A fixed subset of rows, with indices `chosen`, int64 [n], the same in every epoch."""

    def __init__(self, rows: Rows, chosen: np.ndarray) -> None:
        self.rows, self.chosen = rows, chosen
        self.coupled = getattr(rows, "coupled", False)
        if hasattr(rows, "lengths"):
            self.lengths = rows.lengths[chosen]

    def __len__(self) -> int:
        return len(self.chosen)

    def read(self, rows: np.ndarray) -> MicroBatch:
        return self.rows.read(np.concatenate([np.zeros_like(rows[:, :1]), self.chosen[rows[:, 1:]]], axis=1))

    def empty(self) -> MicroBatch:
        return self.rows.empty()


def rows_used(config: Config, rows: int) -> int:
    """Returns how many of that many rows, from the first on, are trained on: all without trainer.overfit_batches."""
    steps = config.trainer.overfit_batches
    return min(rows, steps * config.data.global_batch_size) if steps else rows


def first_rows(rows: Rows, count: int) -> ChosenRows:
    """Returns the first `count` rows, for overfitting: few enough for a model to memorize."""
    return ChosenRows(rows, np.arange(min(count, len(rows))))


def spread_rows(rows: Rows, count: int) -> ChosenRows:
    """Returns `count` rows, evenly spaced over all rows."""
    count = min(count, len(rows))
    return ChosenRows(rows, np.arange(count) * len(rows) // max(1, count))


@dataclass(eq=False)
class StepDataset(Dataset):
    """A dataset whose item s is this rank's share of step s: {"step": s, "rows": hash, "micro_batches": [...]}.

    `rows` is a checksum of the (epoch, row) pairs of the whole step over all ranks: equal checksums mean equal data.
    """

    rows: Rows
    _: KW_ONLY
    seed: int
    sizes: Stages  # number of rows in each step
    micro_batch_size: int
    max_epochs: int | None
    rank: int
    world_size: int
    lengths: Stages | None = None  # row length in tokens at each step, to which rows of text are cut; None: not cut
    joined_tokens: int | None = None  # up to how many, micro-batches of short padded rows are joined; None: never

    def row_ids(self, step: int) -> np.ndarray:
        """Returns the (epoch, row) pairs of the whole step over all ranks, int64 [n, 2]."""
        return rows_of_step(self.rows, step, sizes=self.sizes, seed=self.seed, max_epochs=self.max_epochs)

    def by_length(self, chosen: np.ndarray) -> np.ndarray:
        """Sorts a step's rows by length, longest first: its gradient is the same sum, and less padding is needed."""
        lengths = getattr(self.rows, "lengths", None)
        return chosen if lengths is None else chosen[np.argsort(-lengths[chosen[:, 1]], kind="stable")]

    def shares(self, step: int, chosen: np.ndarray) -> list[np.ndarray]:
        """Returns this rank's micro-batches of a step's `row_ids`, as arguments of `Rows.read`; some may be empty."""
        if getattr(self.rows, "coupled", False):
            # If a last step has a single row, its other row is the last row of the previous step.
            alone = len(chosen) == 1 and step > 0
            others = self.row_ids(step - 1)[-1:, 1] if alone else np.roll(chosen[:, 1], 1)
            chosen = np.column_stack([chosen, others])
        chosen, size = self.by_length(chosen), self.micro_batch_size
        shares = order.rank_share(chosen, self.rank, self.world_size, size)
        lengths = getattr(self.rows, "lengths", None)
        if lengths is None or self.joined_tokens is None:
            return shares
        longest = lengths[chosen[:: size * self.world_size, 1]].tolist()  # over all ranks, which have to join alike
        starts = order.joins(longest, size, self.joined_tokens)
        return [np.concatenate(shares[i:j]) for i, j in itertools.pairwise([*starts, len(shares)])]

    def __getitem__(self, step: int) -> dict[str, Any]:
        chosen = self.row_ids(step)
        shares = self.shares(step, chosen)
        micro_batches = [self.rows.read(share) if len(share) else self.rows.empty() for share in shares]
        if self.lengths is not None:
            micro_batches = [cut_rows(micro_batch, self.lengths.at(step)) for micro_batch in micro_batches]
        return {"step": step, "rows": f"{zlib.crc32(chosen.tobytes()):08x}", "micro_batches": micro_batches}


class StepSampler(DistributedSampler[int], SequentialSampler):
    """A sampler of consecutive items, each of which is already a rank's own, in their order.

    Its length is that of a whole epoch even if an iterator begins in the middle: Lightning counts a resumed epoch's
    batches from zero. Its base classes keep Lightning from replacing it: that would divide the items among the ranks
    once more (DistributedSampler), or undo a shuffle that it isn't (SequentialSampler, for overfit_batches).
    """

    def __init__(self, items: int, begin: Callable[[], int] = lambda: 0, stop: int = sys.maxsize) -> None:
        """begin: returns the first item; asked again by each iterator. No item is `stop` or later."""
        self.items, self.begin, self.stop = items, begin, stop

    def __iter__(self) -> Iterator[int]:
        first = self.begin()
        return iter(range(first, min(first + self.items, self.stop)))

    def __len__(self) -> int:
        return self.items


def seen_rows(rows: Rows, micro_batch_size: int, limit: int | None) -> int:
    """Returns how many of the validation rows are evaluated."""
    return len(rows) if limit is None else min(len(rows), limit * micro_batch_size)


@dataclass(eq=False)
class ValidationDataset(Dataset):
    """A dataset whose item i is this rank's i-th micro-batch of the validation rows; ranks share no rows.

    `limit` counts the micro-batches of all ranks together, so the number of rows evaluated does not depend on theirs.
    These rows are spaced evenly over the split and are the same in every validation. Those of short padded rows are
    joined up to `joined_tokens`, as in training.
    """

    rows: Rows
    _: KW_ONLY
    micro_batch_size: int
    limit: int | None
    rank: int
    world_size: int
    joined_tokens: int | None = None

    def __post_init__(self) -> None:
        self.total = seen_rows(self.rows, self.micro_batch_size, self.limit)
        span = self.micro_batch_size * self.world_size
        lengths = getattr(self.rows, "lengths", None)
        self.batches = list(range(-(-self.total // span)))  # the micro-batches that items begin with
        if lengths is not None and self.joined_tokens is not None and self.total:
            seen = lengths[np.arange(self.total) * len(self.rows) // self.total]
            longest = np.maximum.reduceat(seen, np.arange(0, self.total, span)).tolist()
            self.batches = order.joins(longest, self.micro_batch_size, self.joined_tokens)

    def __len__(self) -> int:
        return len(self.batches)

    def places(self, index: int) -> np.ndarray:
        """Returns the rows of this rank's `index`-th micro-batch by their places among all validated rows, int64 [n].

        They depend neither on the number of ranks nor on the size of a micro-batch.
        """
        span = self.micro_batch_size * self.world_size
        stop = self.batches[index + 1] * span if index + 1 < len(self) else self.total
        return np.arange(self.batches[index] * span, stop)[self.rank :: self.world_size]

    def share(self, index: int) -> np.ndarray:
        """Returns this rank's `index`-th micro-batch, as an argument of `Rows.read`; the last ones may be empty."""
        places = self.places(index)
        rows, others = (at % self.total * len(self.rows) // self.total for at in (places, places - 1))
        chosen = [np.zeros_like(rows), rows, *([others] if getattr(self.rows, "coupled", False) else [])]
        return np.stack(chosen, axis=1)

    def __getitem__(self, index: int) -> MicroBatch:
        share = self.share(index)
        return self.rows.read(share) if len(share) else self.rows.empty()


def check_descriptors(workers: int) -> None:
    """Raises UserError for a wrong number of workers, or a limit of open files too low for them: they would hang.

    If the system allows it, the limit is raised instead.
    """
    if not isinstance(workers, int) or workers < 0:
        raise UserError(f"num_workers={workers!r}: a whole number from 0 is needed")
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = 64 + 16 * workers  # pipes and locks of each worker, and tensors in transit
    if not workers or soft == resource.RLIM_INFINITY or soft >= needed:
        return
    if hard == resource.RLIM_INFINITY or hard >= needed:
        resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))
        return
    found = f"data.num_workers={workers} needs about {needed} open files, and this shell allows {hard} (ulimit -n)"
    raise UserError(f"{found}: raise that limit, or set data.num_workers={max(0, (hard - 64) // 16)}")


def start_worker(trains: int, _worker: int) -> None:
    """Makes a loader worker ignore stop signals and end with the process `trains`, which handles them by saving first.

    Torch's own watchdog misses a parent that died before the worker had started: such workers would never exit.
    """
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    end_with_parent(trains, signal.SIGKILL)


@contextlib.contextmanager
def no_workers_left() -> Iterator[None]:
    """Kills, when it is left, the loader workers that were started in it and are still alive.

    The death of one loader's worker may raise while another loader is just starting, whose workers nobody ends then.
    They ignore the signal with which multiprocessing ends children at exit, and it would wait for them for ever.
    """
    before = multiprocessing.active_children()
    try:
        yield
    finally:
        left = [child for child in multiprocessing.active_children() if child.daemon and child not in before]
        with _quiet_deaths() if left else contextlib.nullcontext():
            for child in left:
                child.kill()
                child.join()


@contextlib.contextmanager
def _quiet_deaths() -> Iterator[None]:
    """Keeps torch from raising for a worker that is killed on purpose; it does so in the main thread, by SIGCHLD."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handler = signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(signal.SIGCHLD, handler)
