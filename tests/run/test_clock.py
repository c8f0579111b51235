"""The clock of a step leaves out what is no training: validations, saves and samples."""

import contextlib
import time

import pytest

from lmtrain.callbacks.metrics import Clock
from lmtrain.errors import RunError


def test_pauses_are_no_part_of_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    clock = Clock()
    now[0] += 3
    with clock.pause():
        now[0] += 40
    now[0] += 2
    with contextlib.suppress(RunError), clock.pause():
        now[0] += 7
        raise RunError("a save that fails")
    assert clock.elapsed() == 5
    clock.restart()
    now[0] += 1
    assert clock.elapsed() == 1
