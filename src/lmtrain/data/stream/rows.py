"""Rows of a stream: windows of shards that lie in a folder for as long as they are needed, the ring.

A window is to the order of rows what an epoch is to a corpus (order.py): step s takes the rows s * G .. s * G + G - 1,
window after window, each window's rows permuted by a key of (seed, window). So the order is a pure function of the two,
and no row is in two windows.
"""

import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from lmtrain.config.schema import Config
from lmtrain.data.text import shards
from lmtrain.data.text.windows import empty_window, make_batch, read_places
from lmtrain.errors import RunError, UserError

_POLL_SECONDS = 0.01


@dataclass(frozen=True)
class Ring:
    """How a stream is cut: shards of so many tokens, windows of so many shards; at most `bytes` of them on disk."""

    bytes: int
    shard_rows: int
    window_shards: int
    seq_len: int
    global_batch_size: int
    dtype: str
    isolate_documents: bool

    @property
    def shard_tokens(self) -> int:
        return self.shard_rows * self.seq_len + 1  # and the label of the last

    @property
    def window_rows(self) -> int:
        return self.shard_rows * self.window_shards

    def window_of(self, step: int) -> int:
        """The window in which a step's first row lies."""
        return step * self.global_batch_size // self.window_rows

    def window_after(self, step: int) -> int:
        """The window in which a step's last row lies."""
        return ((step + 1) * self.global_batch_size - 1) // self.window_rows


def make_ring(config: Config, dtype: str) -> Ring:
    """UserError where the ring can't hold the two windows that are read from while one gives way to the next."""
    d = config.data
    assert d.ring_bytes is not None
    assert d.ring_shard_tokens is not None
    assert d.ring_window is not None
    shard_rows = (d.ring_shard_tokens - 1) // d.seq_len
    if shard_rows == 0:
        raise UserError(
            f"data.ring_shard_tokens={d.ring_shard_tokens} has no room for one row of data.seq_len={d.seq_len} tokens "
            f"and the label of its last: set data.ring_shard_tokens={d.seq_len + 1} or more"
        )
    ring = Ring(
        d.ring_bytes, shard_rows, d.ring_window, d.seq_len, d.global_batch_size, dtype, d.isolate_documents
    )  # fmt: skip
    needed = 2 * ring.window_shards * ring.shard_tokens * np.dtype(dtype).itemsize
    if needed > ring.bytes:
        raise UserError(
            f"data.ring_bytes={ring.bytes} holds less than two windows, that which is read and the next: they take "
            f"{needed:,} bytes (2 x data.ring_window={d.ring_window} x data.ring_shard_tokens={d.ring_shard_tokens}, "
            f"{dtype}). Set data.ring_bytes={needed}, or lower data.ring_window"
        )
    # A step and the next lie in two windows; loader workers read two steps ahead each.
    ahead = max(2, 1 + 2 * d.num_workers) * d.global_batch_size
    if ahead > ring.window_rows:
        workers = f" and data.num_workers={d.num_workers}" if d.num_workers else ""
        raise UserError(
            f"a window of the ring has {ring.window_rows} rows, and data.global_batch_size={d.global_batch_size}"
            f"{workers} may need {ahead} at once: raise data.ring_window or data.ring_shard_tokens"
        )
    return ring


def shard_file(folder: Path, number: int) -> Path:
    return folder / f"{number:09d}.bin"


class StreamRows:
    """The rows of one window after the other, read by (window, row) pairs as they come to lie in `folder`.

    Reading waits for a shard that isn't there yet. Windows are asked for in order: files of an earlier one are closed.
    """

    def __init__(self, ring: Ring) -> None:
        self.ring = ring
        self.folder: Path | None = None  # of a run that fills it
        self._window = -1
        self._shards: dict[int, shards.Shard] = {}

    def __len__(self) -> int:
        return self.ring.window_rows

    def read(self, rows: np.ndarray) -> dict[str, torch.Tensor]:
        """A micro-batch from (window, row) pairs [B, 2]: see `make_batch`."""
        places = []
        for window, row in rows.tolist():
            shard, start = divmod(row, self.ring.shard_rows)
            places.append((self._shard(window, shard), start * self.ring.seq_len))
        block, ends = read_places(places, self.ring.seq_len, with_ends=self.ring.isolate_documents)
        return make_batch(block, ends if self.ring.isolate_documents else None)

    def empty(self) -> dict[str, torch.Tensor]:
        return empty_window(self.ring.seq_len, self.ring.isolate_documents)

    def _shard(self, window: int, number: int) -> shards.Shard:
        if window > self._window:
            self._window = window
            self._shards.clear()
            shards.close_files()
        number += window * self.ring.window_shards
        if number not in self._shards:
            self._shards[number] = self._open(number)
        return self._shards[number]

    def _open(self, number: int) -> shards.Shard:
        if self.folder is None:
            raise UserError(
                "only training reads on in a stream (data.ring_bytes): to try its rows set data.ring_bytes=null, "
                "and of data of the hub data.num_samples=1000"
            )
        file = shard_file(self.folder, number)
        while not file.exists():
            if not self.folder.exists():
                raise RunError(f"the stream has ended before shard {number}: {self.folder} is gone")
            time.sleep(_POLL_SECONDS)
        docs = file.with_suffix(".docs") if self.ring.isolate_documents else None
        return shards.Shard(file, self.ring.dtype, self.ring.shard_tokens, docs)
