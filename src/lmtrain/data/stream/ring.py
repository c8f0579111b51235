"""Rows of a stream: windows of shards that lie in a folder, the ring, for as long as they are needed.

In the order of rows, a window takes the place of an epoch (order.py): step s takes the rows s * G .. s * G + G - 1,
window after window, with each window's rows permuted by a key of (seed, window). So the order is a pure function of
seed and step, and no row is in two windows. A thread (`Producer`) reads the stream ahead of training and writes shards
when there is room.
"""

import os
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from lmtrain.config.schema import Config
from lmtrain.data.store.shards import END_BYTES, Shard, close_files
from lmtrain.data.stream.head import Head
from lmtrain.data.stream.source import Place, StreamShard, cut_shards, endless
from lmtrain.data.text.windows import empty_window, make_batch, read_places
from lmtrain.errors import ReadError, RunError, UserError, first_line

_POLL_SECONDS = 0.01


@dataclass(frozen=True)
class Ring:
    """How a stream is cut: rows into shards, and shards into windows; at most `bytes` of them are on disk."""

    bytes: int
    shard_rows: int
    window_shards: int
    seq_len: int
    global_batch_size: int
    dtype: str
    isolate_documents: bool

    @property
    def shard_tokens(self) -> int:
        return self.shard_rows * self.seq_len + 1  # plus the label of the last token

    @property
    def window_rows(self) -> int:
        return self.shard_rows * self.window_shards

    def window_of(self, step: int) -> int:
        """Returns the window that contains a step's first row."""
        return step * self.global_batch_size // self.window_rows

    def window_after(self, step: int) -> int:
        """Returns the window that contains a step's last row."""
        return ((step + 1) * self.global_batch_size - 1) // self.window_rows


def make_ring(config: Config, dtype: str) -> Ring:
    """Builds the ring; raises UserError if a shard, a window or the ring is too small for what must be read at once."""
    d = config.data
    assert d.ring_bytes is not None
    assert d.ring_shard_tokens is not None
    assert d.ring_window is not None
    shard_rows = (d.ring_shard_tokens - 1) // d.seq_len
    if shard_rows == 0:
        found = f"data.ring_shard_tokens={d.ring_shard_tokens} has no room for a row of data.seq_len={d.seq_len} tokens"
        raise UserError(f"{found} and a label: set data.ring_shard_tokens={d.seq_len + 1} or more")
    ring = Ring(d.ring_bytes, shard_rows, d.ring_window, d.seq_len, d.global_batch_size, dtype, d.isolate_documents)
    needed = 2 * ring.window_shards * ring.shard_tokens * np.dtype(dtype).itemsize
    if needed > ring.bytes:
        take = f"2 x data.ring_window={d.ring_window} x data.ring_shard_tokens={d.ring_shard_tokens}, {dtype}"
        found = f"data.ring_bytes={ring.bytes} holds less than two windows, which take {needed:,} bytes ({take})"
        raise UserError(f"{found}. Set data.ring_bytes={needed}, or lower data.ring_window")
    # The rows of a step and those read ahead must lie in two windows; each loader worker reads two steps ahead.
    ahead = max(2, 1 + 2 * d.num_workers) * d.global_batch_size
    if ahead > ring.window_rows:
        keys = f"data.global_batch_size={d.global_batch_size} and data.num_workers={d.num_workers}"
        found = f"a window of the stream has {ring.window_rows} rows, and {keys} may need {ahead} at once"
        raise UserError(f"{found}: raise data.ring_window or data.ring_shard_tokens")
    return ring


def shard_file(folder: Path, number: int) -> Path:
    return folder / f"{number:09d}.bin"


class StreamRows:
    """The rows of one window after the other, read by (window, row) pairs as their shards appear in `folder`.

    `read` waits for a shard that isn't there yet. Windows must be read in order: files of earlier ones are closed.
    """

    def __init__(self, ring: Ring) -> None:
        self.ring = ring
        self.folder: Path | None = None  # set and filled by a run
        self._window = -1
        self._shards: dict[int, Shard] = {}

    def __len__(self) -> int:
        return self.ring.window_rows

    def read(self, rows: np.ndarray) -> dict[str, torch.Tensor]:
        """Reads a micro-batch from (window, row) pairs [B, 2]; see `make_batch`."""
        places = []
        for window, row in rows.tolist():
            shard, start = divmod(row, self.ring.shard_rows)
            places.append((self._shard(window, shard), start * self.ring.seq_len))
        block, ends = read_places(places, self.ring.seq_len, with_ends=self.ring.isolate_documents)
        return make_batch(block, ends if self.ring.isolate_documents else None)

    def empty(self) -> dict[str, torch.Tensor]:
        return empty_window(self.ring.seq_len, self.ring.isolate_documents)

    def _shard(self, window: int, number: int) -> Shard:
        if window > self._window:
            self._window = window
            self._shards.clear()
            close_files()
        number += window * self.ring.window_shards
        if number not in self._shards:
            self._shards[number] = self._open(number, passed=window < self._window)
        return self._shards[number]

    def _open(self, number: int, passed: bool = False) -> Shard:
        """Waits for a shard and opens it; RunError for one that was removed, of a window that training has `passed`."""
        if self.folder is None:
            why = "only training reads a stream (data.ring_bytes)"
            raise UserError(f"{why}: set data.ring_bytes=null, and for data of the hub data.num_samples=1000 too")
        file = shard_file(self.folder, number)
        while not file.exists():
            if not self.folder.exists():
                raise RunError(f"the stream has ended before shard {number}: {self.folder} is gone")
            if passed:
                raise RunError(f"shard {number} of the stream was removed after training on it")
            time.sleep(_POLL_SECONDS)
        sides = {"docs": file.with_suffix(".docs")} if self.ring.isolate_documents else {}
        return Shard(file, self.ring.dtype, self.ring.shard_tokens, sides)


_FIRST_PAUSE, _LONGEST_PAUSE = 0.5, 30.0  # seconds between attempts to read; the pause doubles each time


class Producer:
    """A background thread that writes a stream's shards to `folder`, from window `window` on, which begins at `place`.

    `error` is the exception that ended it, such as a ReadError when reading kept failing for `patience` seconds.
    """

    def __init__(self, head: Head, ring: Ring, folder: Path, window: int, place: Place, patience: float) -> None:
        self.head, self.ring, self.folder, self.patience = head, ring, folder, patience
        self.begins = {window: place}  # the place at which each window begins
        self.error: Exception | None = None
        self._oldest = window  # the first window that is still needed
        self._next = window * ring.window_shards  # number of the next shard to write
        self._place = place  # where that shard begins
        self._bytes: dict[int, int] = {}  # size of each shard on disk
        self._stopped = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="stream", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Tells the thread to end and waits up to 10 seconds; in the middle of a download it may take longer."""
        with self._changed:
            self._stopped = True
            self._changed.notify_all()
        self._thread.join(timeout=10)

    def wait_for(self, window: int, seconds: float) -> bool:
        """Waits up to `seconds` for a window or an error, and returns whether the whole window is on disk."""
        with self._changed:
            self._changed.wait_for(lambda: self._has(window) or self.error is not None, seconds)
            return self._has(window)

    def _has(self, window: int) -> bool:
        return self._next >= (window + 1) * self.ring.window_shards

    def discard_before(self, window: int) -> None:
        """Removes the shards of windows before `window`, which all ranks have read."""
        if window == self._oldest:
            return
        with self._changed:
            for number in [n for n in self._bytes if n < window * self.ring.window_shards]:
                file = shard_file(self.folder, number)
                file.unlink()
                file.with_suffix(".docs").unlink(missing_ok=True)
                del self._bytes[number]
            self.begins = {w: place for w, place in self.begins.items() if w >= window}
            self._oldest = window
            self._changed.notify_all()

    def _run(self) -> None:
        failing_since, pause = None, _FIRST_PAUSE
        while not self._stopped:
            before = self._next
            try:
                self._produce()
            except ReadError as error:
                now = time.monotonic()
                if failing_since is None or self._next > before:
                    failing_since, pause = now, _FIRST_PAUSE
                if now - failing_since >= self.patience:
                    return self._fail(error)
                with self._changed:
                    self._changed.wait_for(lambda: self._stopped, pause)
                pause = min(2 * pause, _LONGEST_PAUSE)
            except BaseException as error:  # a panic in tokenizers' Rust code is not an Exception
                if not isinstance(error, Exception):
                    error = RunError(f"the stream can't be tokenized: {type(error).__name__}: {first_line(error)}")
                return self._fail(error)

    def _fail(self, error: Exception) -> None:
        with self._changed:
            self.error = error
            self._changed.notify_all()

    def _produce(self) -> None:
        """Writes shards from `_place` on until the producer is stopped or reading fails."""
        stream = endless(self.head.source, self.head.encoder, self.head.begin, self._place)
        for shard in cut_shards(stream, self.ring.shard_tokens):
            files = self._files(shard)
            size = sum(len(content) for content in files.values())
            if not self._wait_for_room(size):
                return
            for file, content in files.items():  # the token file last: its presence means that the shard is complete
                temporary = file.with_suffix(".tmp")
                temporary.write_bytes(content)
                os.replace(temporary, file)
            self._written(size, shard.end)

    def _files(self, shard: StreamShard) -> dict[Path, bytes]:
        file = shard_file(self.folder, self._next)
        tokens = {file: shard.ids.astype(np.dtype(self.ring.dtype).newbyteorder("<")).tobytes()}
        if not self.ring.isolate_documents:
            return tokens
        return {file.with_suffix(".docs"): shard.document_ends.astype(f"<u{END_BYTES}").tobytes(), **tokens}

    def _wait_for_room(self, size: int) -> bool:
        """Waits until `size` more bytes fit into the ring; returns False if the producer is stopped meanwhile."""
        with self._changed:
            while sum(self._bytes.values()) + size > self.ring.bytes and not self._stopped:
                if self._next < (self._oldest + 2) * self.ring.window_shards:
                    found = f"data.ring_bytes={self.ring.bytes} holds less than two windows with document ends"
                    raise RunError(f"{found}: raise it, or lower data.ring_window")
                self._changed.wait()
            return not self._stopped

    def _written(self, size: int, end: Place) -> None:
        with self._changed:
            self._bytes[self._next] = size
            self._next, self._place = self._next + 1, end
            window, first = divmod(self._next, self.ring.window_shards)
            if first == 0:
                self.begins[window] = end
            self._changed.notify_all()
