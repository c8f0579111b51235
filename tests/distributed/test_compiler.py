"""Inductor probes the CPU beside the start of a run: once, at a lower priority, and only if blocks will be compiled."""

import os
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from torch._inductor import cpu_vec_isa

from lmtrain.distributed import compiler


@pytest.fixture
def probes(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Yields the priorities of the threads that probed, with a compiler that fails after each."""
    found: list[int] = []

    def pick() -> None:
        found.append(os.getpriority(os.PRIO_PROCESS, threading.get_native_id()))
        raise RuntimeError("no compiler")

    monkeypatch.setattr(cpu_vec_isa, "pick_vec_isa", pick)
    compiler._start.cache_clear()
    yield found
    compiler._start.cache_clear()


def start(compiles: bool, accelerator: str) -> None:
    config: Any = SimpleNamespace(trainer=SimpleNamespace(compile=compiles, accelerator=accelerator))
    compiler.probe_early(config)
    for thread in threading.enumerate():
        if thread.name == "inductor's probes":
            thread.join()


@pytest.mark.filterwarnings("error::pytest.PytestUnhandledThreadExceptionWarning")
def test_once_and_behind_the_run(probes: list[int]) -> None:
    here = os.getpriority(os.PRIO_PROCESS, 0)
    start(True, "cpu")
    start(True, "cpu")
    assert probes == [min(here + 10, 19)]
    assert os.getpriority(os.PRIO_PROCESS, 0) == here


@pytest.mark.parametrize(("compiles", "accelerator"), [(False, "cpu"), (True, "cuda"), (False, "cuda")])
def test_only_where_blocks_are_compiled_for_a_cpu(compiles: bool, accelerator: str, probes: list[int]) -> None:
    start(compiles, accelerator)
    assert probes == []
