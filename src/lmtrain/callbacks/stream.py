"""Feeds a run from a stream: starts its reader, removes consumed rows, and saves the position in checkpoints."""

import math
import shutil
from pathlib import Path
from typing import Any

import lightning.pytorch as pl

from lmtrain.callbacks.length import DependsOnLength
from lmtrain.callbacks.parts import Parts, Phase, Placed
from lmtrain.config.schema import Config
from lmtrain.data.corpus import Corpus
from lmtrain.data.stream.head import Head
from lmtrain.data.stream.ring import Producer, StreamRows
from lmtrain.data.stream.source import Place
from lmtrain.distributed import process_group as world
from lmtrain.distributed.stop_signals import StopRequest
from lmtrain.errors import ReadError, UserError
from lmtrain.models.feature import Feature
from lmtrain.run_folder.folder import RunDir

_LOOK_SECONDS = 0.2  # how often a wait for data checks for a stop request
_PAUSES = 60  # seconds: ranks also wait for the pauses between read attempts


class FeedStream(DependsOnLength, pl.Callback):
    """A callback in which rank 0 reads the stream for all; checkpoints hold where the window of the next step begins.

    Before each step, the rows of that step and of the next are on disk: if the stream breaks off, the ranks still have
    rows for the step in which they agree to stop.
    """

    def __init__(self, head: Head, rows: StreamRows, stop: StopRequest, total_steps: int, patience: float) -> None:
        """`patience` is the number of seconds for which a failing read is retried."""
        self.head, self.rows, self.stop, self.total_steps = head, rows, stop, total_steps
        self.patience = patience
        self.step = 0  # the next step
        self.place: dict[str, Any] | None = None  # from a checkpoint, with the keys window and place
        self.producer: Producer | None = None

    def state_dict(self) -> dict[str, Any]:
        if self.producer is None:
            return {}
        window = self.rows.ring.window_of(self.step)
        return {"window": window, "place": self.producer.begins[window]._asdict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.place = dict(state_dict)

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Waits on all ranks for the first rows; an error of rank 0 in reading them is raised on all ranks."""
        self.step = trainer.global_step
        if not world.from_first(self._begin):
            self.stop.agreed = True  # before the first step: Preemption ends the run

    def _begin(self) -> bool:
        """Starts reading; returns whether the first rows are there, or False if a stop was requested before."""
        assert self.rows.folder is not None
        window, place = self._where_to_begin()
        self.producer = Producer(self.head, self.rows.ring, self.rows.folder, window, place, self.patience)
        self.producer.start()
        return self._wait()

    def _where_to_begin(self) -> tuple[int, Place]:
        window = self.rows.ring.window_of(self.step)
        if self.place is None and window == 0:
            return 0, self.head.begin
        if self.place is None:
            found = f"the checkpoint of step {self.step} is of a run without a stream, and has no position in one"
            raise UserError(f"{found}: set data.ring_bytes=null as in that run, or another run.name")
        held = self.place["window"]
        if held != window:
            found = f"the checkpoint holds window {held} of the stream, and step {self.step} is in window {window}"
            sizes = "data.ring_window, data.ring_shard_tokens, data.seq_len and data.global_batch_size"
            raise UserError(f"{found}: set {sizes} back to their earlier values")
        return window, Place(**self.place["place"])

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any, **__: Any) -> None:
        self.step = trainer.global_step
        if self.producer is None or self.step == self.total_steps:
            return
        self.producer.discard_before(self.rows.ring.window_of(self.step))
        try:
            self._wait()
        except Exception as error:
            self.stop.ask(f"the stream, which broke off ({error}),", None if isinstance(error, ReadError) else error)

    def _wait(self) -> bool:
        """Waits for the rows of the next two steps; returns False if a stop was requested before they were there.

        Raises the error that ended the stream, if it ended before them.
        """
        assert self.producer is not None
        window = self.rows.ring.window_after(min(self.step + 1, self.total_steps - 1))
        while not self.producer.wait_for(window, _LOOK_SECONDS):
            if self.producer.error is not None:
                raise self.producer.error
            if self.stop.asked():
                return False
        return True

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        self.on_train_end(trainer, pl_module)

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Stops reading and removes the ring, even an empty one: loader workers wait for rows as long as it exists."""
        if self.producer is not None:
            self.producer.stop()
        if trainer.is_global_zero:
            assert self.rows.folder is not None
            shutil.rmtree(self.rows.folder, ignore_errors=True)


class Streaming(Feature):
    """Training on a stream, text larger than the disk."""

    def is_on(self, config: Config) -> bool:
        return config.data.ring_bytes is not None

    def callbacks(self, parts: Parts) -> list[Placed]:
        feed = build_feed(parts.config, parts.run_dir, parts.corpus, parts.objective.stop, parts.length.steps)
        return [(Phase.MAY_STOP, feed)] if feed is not None else []


def build_feed(
    config: Config, run_dir: RunDir, corpus: Corpus, stop: StopRequest, total_steps: int
) -> FeedStream | None:
    """Builds the callback that feeds a stream, and an empty ring for it in the run's folder; None without a stream."""
    if corpus.stream is None:
        return None
    assert isinstance(corpus.train, StreamRows)
    check_patience(config)
    corpus.train.folder = run_dir.ring
    world.from_first(lambda: _make_empty(run_dir.ring))
    return FeedStream(corpus.stream, corpus.train, stop, total_steps, config.data.ring_patience or 0.0)


def check_patience(config: Config) -> None:
    """Raises UserError if the other ranks would time out while rank 0 still retries reading."""
    patience = config.data.ring_patience or 0.0
    longest = config.trainer.rank_timeout - _PAUSES
    if world.size() > 1 and patience > longest:
        waits = f"data.ring_patience={patience:g}, for which other ranks wait, and trainer.rank_timeout is shorter"
        fits = f"data.ring_patience={max(0, longest)} or less, or trainer.rank_timeout={math.ceil(patience) + _PAUSES}"
        raise UserError(f"{waits}: set {fits}")


def _make_empty(folder: Path) -> None:
    """Empties the folder: what a killed run left in it is produced again from its checkpoint."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
