"""The parts of chats and examples, each by hand: time limits, large operations, cuts, and what becomes of rows."""

import signal
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from lmtrain.data.chat import template_sandbox, time_limits
from lmtrain.data.chat.templates import fit
from lmtrain.data.chat.turns import BadRow, Remark
from lmtrain.data.examples import prepare, rows
from lmtrain.data.examples.row_counts import Counts
from lmtrain.data.examples.row_format import Encoded
from lmtrain.errors import UserError

# Time limits


@pytest.mark.parametrize(("outer", "took", "set_to"), [
    (0.0, 1.0, [2.0, 0.0]), (5.0, 1.5, [2.0, 3.5]), (1.0, 0.25, [2.0, 1.0, 0.75]), (2.0, 0.5, [2.0, 1.5]),
    (1.0, 1.0, [2.0, 1.0, 1e-3]), (1.0, 3.0, [2.0, 1.0, 1e-3]),
])  # fmt: skip
def test_a_limit_inside_another(
    outer: float, took: float, set_to: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The shorter one holds, and the outer one goes on with what is left of it, or ends at once."""
    now, calls, handlers = [100.0], list[float](), list[Any]()

    def set_timer(which: int, seconds: float) -> tuple[float, float]:
        assert which == signal.ITIMER_REAL
        calls.append(seconds)
        return outer, 0.0

    def handle(number: int, handler: Any) -> str:
        handlers.append((number, handler))
        return "before"

    fake = SimpleNamespace(setitimer=set_timer, signal=handle, ITIMER_REAL=signal.ITIMER_REAL, SIGALRM=signal.SIGALRM)
    monkeypatch.setattr(time_limits, "signal", fake)
    monkeypatch.setattr(time_limits, "time", SimpleNamespace(monotonic=lambda: now[0]))
    with time_limits.time_limit(2.0):
        now[0] += took
    assert calls == pytest.approx(set_to)
    assert handlers == [(signal.SIGALRM, time_limits._too_long), (signal.SIGALRM, "before")]
    with time_limits.time_limit(None):
        assert len(calls) == len(set_to)


def test_a_limit_in_a_thread_leaves_no_timer() -> None:
    timers = lambda: [t for t in threading.enumerate() if isinstance(t, threading.Timer)]  # noqa: E731
    found: list[Any] = []

    def work() -> None:
        with time_limits.time_limit(60.0):
            found.extend(timers())
        for timer in found:
            timer.join(5)
        found.append(timers())
        try:
            with time_limits.time_limit(0.01):
                while True:
                    time.sleep(0.001)
        except time_limits.TookTooLong:
            found.append("too long")

    thread = threading.Thread(target=work)
    thread.start()
    thread.join(20)
    timer, after, ended = found
    assert (timer.daemon, after, ended) == (True, [], "too long")


# Templates


@pytest.mark.parametrize(("operator", "most", "more"), [
    ("*", ("a", 10_000_000), ("a", 10_000_001)), ("*", (10_000_000, [1]), (10_000_001, [1])),
    ("*", (1 << 4999, 1 << 4999), (1 << 4999, 1 << 5000)), ("**", (3, 5000), (3, 5001)), ("**", (3, -5000), (3, -5001)),
    ("%", ("%9999d", 1), ("%10000d", 1)), ("%", (10**6, 7), ("%*d", 1)), ("*", (1.5, 10**9), ("ab", 5_000_001)),
])  # fmt: skip
def test_what_is_too_large_for_a_template(operator: str, most: tuple[Any, Any], more: tuple[Any, Any]) -> None:
    assert not template_sandbox.too_large(operator, *most)
    assert template_sandbox.too_large(operator, *more)


# Examples


@pytest.mark.parametrize(("most", "kept", "ids", "trained"), [
    (6, 1, [1, 2, 3, 4, 5, 6], [False, False, True, True, True, True]),
    (4, 0, [3, 4, 5, 6], [False, True, True, True]), (4, 1, [1, 4, 5, 6], [False, False, True, True]),
    (2, 1, [1, 6], [False, False]), (1, 1, [6], [False]), (2, 2, [5, 6], [False, True]),
])  # fmt: skip
def test_what_stays_of_an_example_cut_at_its_left(
    most: int, kept: int, ids: list[int], trained: list[bool], data_config: Any
) -> None:
    """The first `kept` tokens stay unless they would be all there is; what follows a cut isn't predicted."""
    cfg = data_config("chat", max_length=most, on_too_long="truncate_left")
    (found,) = fit([1, 2, 3, 4, 5, 6], [False, False, True, True, True, True], [], cfg, "x", kept)
    assert (found.input_ids, found.trained, found.cut) == (ids, trained, 6 - len(ids))


def test_padded_rows_are_of_multiples_of_eight_tokens() -> None:
    some = [(np.arange(1, n + 1), np.ones(n, dtype=bool)) for n in (8, 9, 16)]
    held: Any = SimpleNamespace(lengths=np.array([8, 9, 16]), read=lambda i: some[i])
    made = rows.PaddedRows(held, by_length=True)
    shapes = [made.read(np.array([[0, row]]))["input_ids"].shape for row in range(3)]
    assert [*shapes, made.empty()["input_ids"].shape] == [(1, 8), (1, 16), (1, 16), (1, 8)]
    for method in ("concat", "greedy", "first_fit", "best_fit_decreasing"):
        nothing = rows.pack(np.array([], dtype=np.int64), 8, method, None)
        assert (len(nothing), nothing.utilisation) == (0, 0.0), method


class Written:
    """A writer that keeps what it is given."""

    dtypes = {"bin": "uint16"}  # noqa: RUF012

    def __init__(self) -> None:
        self.rows: list[Any] = []

    def append(self, ids: Any, trained: Any, **more: Any) -> None:
        assert more.pop("ends_document")
        self.rows.append((ids.tolist(), trained.tolist(), more))


def test_what_becomes_of_rows(data_config: Any) -> None:
    cfg, writer, counts = data_config("chat", on_bad_row="skip"), Written(), Counts()
    shown = list[tuple[int, int]]()
    show: Any = SimpleNamespace(advance=lambda *counted: shown.append(counted))
    encoder: Any = SimpleNamespace(group=2, decode=str, unread_as="not read")
    made = prepare._RowWriter(Path(), cfg, [], encoder, {}, show)

    def write(encoded: Any, where: str, cfg: Any = cfg) -> None:
        made.write_row(where, encoded, cfg, writer, counts, asked=True)  # type: ignore[arg-type]

    good: Any = [([1, 2, 3], [False, True, True]), ([1, 2], [False, True], 7)]
    none: Any = [([4, 5], [False, True]), ([4, 6], [False, False])]
    write(Encoded([*none, *good], 3, {"prompt": "p"}, 1, [Remark("odd")], ["id"], 2, "kept"), "line 1")
    write(Encoded([*none], question={"prompt": "q"}), "line 2")
    write(Encoded([*good], cut=0, question={"prompt": "r"}), "line 3")
    write(Encoded([]), "line 4")
    write(BadRow("line 5", "why"), "line 5")
    assert [row[:2] for row in writer.rows] == [([1, 2, 3], [False, True, True]), ([1, 2], [False, True])] * 2
    assert [row[2] for row in writer.rows] == [
        {"label": label, "text": text} for text in ("kept", None) for label in (None, 7)
    ]
    assert shown == [(0, 5), (0, 5)]
    assert made.questions == [{"prompt": "p", "example": 0}, {"prompt": "r", "example": 2}]
    assert counts == Counts(
        rows=5, examples=4, tokens=10, trained=6, shortened=1, dropped=1, untrained=2, untrained_at="line 1",
        untrained_text=repr("[4, 6]"), assistant_first=1, bad={"why": 1}, bad_at={"why": "line 5"},
        bad_first={"why": "why"}, longest=3, split=1, split_into=2, remarks={"odd": 1}, remarks_at={"odd": "line 1"},
        unread={"id": 1}, unread_as="not read",
    )  # fmt: skip
    raising = data_config("chat", on_bad_row="raise")
    with pytest.raises(UserError, match="line 6: why; fix the row"):
        write(BadRow("line 6", "why"), "line 6", raising)
    write(BadRow("line 7", "why", skip=True), "line 7", raising)
    assert (counts.rows, counts.bad) == (7, {"why": 2})
    encoder.learns = False
    write(Encoded([*good]), "line 8")
    assert (counts.tokens, counts.trained) == (15, 6), "a prompt's tokens are given"


def test_a_process_that_encodes_ends_with_its_parent_and_not_by_an_interrupt(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[Any, Any] = {}
    monkeypatch.setattr(prepare.signal, "signal", lambda number, what: seen.update({number: what}))
    monkeypatch.setattr(prepare, "end_with_parent", lambda parent, number: seen.update({parent: number}))
    monkeypatch.setattr(prepare.os, "environ", seen)
    monkeypatch.setattr(prepare, "_theirs", None, raising=False)
    prepare._begin("encoder", ["cfg"], 77)  # type: ignore[arg-type, list-item]
    assert seen == {signal.SIGINT: signal.SIG_IGN, signal.SIGTERM: signal.SIG_DFL, 77: signal.SIGKILL,
                    "RAYON_NUM_THREADS": "1"}  # fmt: skip
    assert prepare._theirs == ("encoder", ["cfg"])
