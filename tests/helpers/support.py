"""What tests share besides fixtures: settings of a tiny run, and reading its rows."""

import contextlib
import json
import os
import signal
import subprocess
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
from _pytest.mark import ParameterSet

REPO = Path(__file__).resolve().parents[2]
# A model and data so small that imports dominate the time of a run, which ends without an export and writes no samples.
TINY = [
    "tokenizer=bytes",
    "model.num_hidden_layers=2",
    "model.num_attention_heads=2",
    "model.hidden_size=32",
    "model.max_position_embeddings=64",
    "data.seq_len=32",
    "data.global_batch_size=6",
    "data.micro_batch_size=2",
    "trainer.precision=32-true",
    "trainer.log_every_n_steps=1",
    "logger=none",
    "callbacks.samples.every_n_validations=0",
    "callbacks.samples.max_new_tokens=4",
    "export.enabled=false",
    "report.enabled=false",
]
# For tests that read an export, or samples.
EXPORT = "export.enabled=true"
SAMPLES = "callbacks.samples.every_n_validations=1"

Run = Callable[..., subprocess.CompletedProcess[str]]  # the type of the fixture `lmtrain`


def rows(path: Path) -> list[dict[str, Any]]:
    """Returns the rows of a JSON Lines file such as metrics.jsonl."""
    return [json.loads(line) for line in path.read_text().splitlines()]


@contextlib.contextmanager
def environment_kept(without: Iterable[str] = ()) -> Iterator[None]:
    """Restores the environment variables at the end of the block, in which those of `without` are absent at first."""
    before = dict(os.environ)
    for name in without:
        os.environ.pop(name, None)
        before.pop(name, None)
    yield
    for name in {*before, *os.environ} - {"PYTEST_CURRENT_TEST"}:
        if name not in before:
            del os.environ[name]
        elif os.environ.get(name) != before[name]:
            os.environ[name] = before[name]


@contextlib.contextmanager
def ends_within(seconds: int) -> Iterator[None]:
    """Ends the process, and with it all tests, if the block takes longer: what waits for ever can't be told to stop."""
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)


def lingers(step: int) -> list[str]:
    """Returns settings with which steps from `step` on take longer, so that a run can be interrupted there."""
    return [f"callbacks.extra=[{{_target_: slow.Lingers, step: {step}}}]", "run.allow_target=[slow]"]


def thinned(cases: Iterable[Any], every: int) -> list[ParameterSet]:
    """Returns parameters of cases that run the same code: each `every`-th is quick, the others are marked slow."""
    marks: list[list[Any]] = [[], [pytest.mark.slow]]
    values = (case if isinstance(case, tuple) else (case,) for case in cases)
    return [pytest.param(*case, marks=marks[number % every > 0]) for number, case in enumerate(values)]
