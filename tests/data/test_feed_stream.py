"""The start and the end of a run that is fed by a stream from which no rows arrive."""

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lmtrain.callbacks.stopping import Preemption
from lmtrain.callbacks.stream import FeedStream, check_patience
from lmtrain.data.stream.ring import Ring, StreamRows
from lmtrain.data.stream.source import Place
from lmtrain.distributed import process_group as world
from lmtrain.distributed.stop_signals import StopRequest
from lmtrain.errors import ReadError, RunError, UserError

RING = Ring(
    bytes=20_000, shard_rows=24, window_shards=4, seq_len=32, global_batch_size=10, dtype="uint16",
    isolate_documents=False,
)  # fmt: skip


class Panic(BaseException):
    """Stands for the PanicException that pyo3 raises for a library in Rust."""


class SilentHead:
    """A stream head that gives no row; `fails` is called where reading begins."""

    source, begin = None, Place()

    def __init__(self, fails: Callable[[], None]) -> None:
        self.fails = fails

    @property
    def encoder(self) -> None:
        self.fails()


@pytest.fixture
def feed(tmp_path: Path) -> Iterator[Callable[[Callable[[], None]], FeedStream]]:
    rows = StreamRows(RING)
    rows.folder = tmp_path / "ring"
    rows.folder.mkdir()
    made: list[FeedStream] = []

    def make(fails: Callable[[], None]) -> FeedStream:
        made.append(FeedStream(SilentHead(fails), rows, StopRequest(), 100, 0.0))  # type: ignore[arg-type]
        return made[-1]

    yield make
    for one in made:
        one.on_train_end(trainer(), None)  # type: ignore[arg-type]
        assert not rows.folder.exists()


def trainer(step: int = 0) -> Any:
    return SimpleNamespace(is_global_zero=True, global_step=step, should_stop=False)


def raising(error: BaseException) -> Callable[[], None]:
    def fails() -> None:
        raise error

    return fails


def test_asked_to_stop_before_the_first_rows_the_run_ends(feed: Any) -> None:
    never = threading.Event()
    started = feed(never.wait)
    started.stop.ask("SIGTERM")
    run = trainer()
    started.on_train_start(run, None)
    Preemption(started.stop).on_train_start(run, None)
    assert run.should_stop
    never.set()


@pytest.mark.parametrize(
    ("error", "kind", "said"),
    [
        (ReadError("the line is dead"), ReadError, "the line is dead"),
        (Panic("out of range"), RunError, "the stream can't be tokenized: Panic: out of range"),
    ],
)
def test_what_ends_the_stream_before_its_first_rows_is_raised(
    feed: Any, error: BaseException, kind: type[Exception], said: str
) -> None:
    with pytest.raises(kind, match=said):
        feed(raising(error)).on_train_start(trainer(), None)


def test_an_error_before_anything_is_read_ends_the_wait_of_loader_workers(feed: Any) -> None:
    silent = feed(raising(AssertionError()))
    silent.on_exception(trainer(), None, ZeroDivisionError())
    assert not silent.rows.folder.exists()
    with pytest.raises(RunError, match="is gone"):
        silent.rows._open(0)


def test_ranks_wait_no_longer_than_their_process_group(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(world, "size", lambda: 2)
    config = SimpleNamespace(data=SimpleNamespace(ring_patience=240.0), trainer=SimpleNamespace(rank_timeout=300))
    check_patience(config)  # type: ignore[arg-type]
    config.data.ring_patience += 1
    with pytest.raises(UserError, match=r"set data.ring_patience=240 or less, or trainer.rank_timeout=301"):
        check_patience(config)  # type: ignore[arg-type]


def test_a_checkpoint_without_a_place_is_not_gone_on_from_in_a_stream(feed: Any) -> None:
    with pytest.raises(UserError, match=r"checkpoint of step 10 is of a run without a stream.*data\.ring_bytes=null"):
        feed(raising(AssertionError())).on_train_start(trainer(step=10), None)
