"""Fills the ring: a thread reads a stream ahead of training, tokenizes it and writes shards where there is room."""

import os
import threading
import time
from pathlib import Path

import numpy as np

from lmtrain.data.stream.head import Head
from lmtrain.data.stream.rows import Ring, shard_file
from lmtrain.data.stream.tokens import Place, Shard, endless, shards
from lmtrain.data.text.shards import END_BYTES
from lmtrain.errors import ReadError, RunError, first_line

_FIRST_PAUSE, _LONGEST_PAUSE = 0.5, 30.0  # seconds between attempts to read; doubled each time


class Producer:
    """Shards of a stream in `folder`, from the first of `window`, which begins at `place`, on.

    `error` is what ended it: ReadError where reading failed for `patience` seconds however often it was tried.
    """

    def __init__(self, head: Head, ring: Ring, folder: Path, window: int, place: Place, patience: float) -> None:
        self.head, self.ring, self.folder, self.patience = head, ring, folder, patience
        self.begins = {window: place}  # where windows begin
        self.error: Exception | None = None
        self._oldest = window  # the first that is needed
        self._next = window * ring.window_shards  # the shard to write
        self._place = place  # where it begins
        self._bytes: dict[int, int] = {}  # of each shard on disk
        self._stopped = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="stream", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Ends the thread, if need be later: in the middle of a download it may take a while."""
        with self._changed:
            self._stopped = True
            self._changed.notify_all()
        self._thread.join(timeout=10)

    def wait_for(self, window: int, seconds: float) -> bool:
        """Whether all of a window is on disk; waits so long for it, or for an error."""
        with self._changed:
            self._changed.wait_for(lambda: self._has(window) or self.error is not None, seconds)
            return self._has(window)

    def _has(self, window: int) -> bool:
        return self._next >= (window + 1) * self.ring.window_shards

    def discard_before(self, window: int) -> None:
        """Removes the shards of earlier windows: all ranks have read them."""
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
            except BaseException as error:  # what panics in the Rust of tokenizers is no Exception
                if not isinstance(error, Exception):
                    error = RunError(f"the stream can't be tokenized: {type(error).__name__}: {first_line(error)}")
                return self._fail(error)

    def _fail(self, error: Exception) -> None:
        with self._changed:
            self.error = error
            self._changed.notify_all()

    def _produce(self) -> None:
        """Writes shards from `_place` on until it is stopped or can't read."""
        stream = endless(self.head.source, self.head.encoder, self.head.begin, self._place)
        for shard in shards(stream, self.ring.shard_tokens):
            files = self._files(shard)
            size = sum(len(content) for content in files.values())
            if not self._wait_for_room(size):
                return
            for file, content in files.items():  # the tokens last: then the shard is there
                temporary = file.with_suffix(".tmp")
                temporary.write_bytes(content)
                os.replace(temporary, file)
            self._written(size, shard.end)

    def _files(self, shard: Shard) -> dict[Path, bytes]:
        file = shard_file(self.folder, self._next)
        tokens = {file: shard.ids.astype(np.dtype(self.ring.dtype).newbyteorder("<")).tobytes()}
        if not self.ring.isolate_documents:
            return tokens
        return {file.with_suffix(".docs"): shard.document_ends.astype(f"<u{END_BYTES}").tobytes(), **tokens}

    def _wait_for_room(self, size: int) -> bool:
        """False where it is stopped meanwhile."""
        with self._changed:
            while sum(self._bytes.values()) + size > self.ring.bytes and not self._stopped:
                if self._next < (self._oldest + 2) * self.ring.window_shards:
                    raise RunError(
                        f"data.ring_bytes={self.ring.bytes} holds less than two windows with the borders of their "
                        f"documents (data.isolate_documents=true): raise it, or lower data.ring_window"
                    )
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
