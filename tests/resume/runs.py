"""Runs to be killed: how they are started, and what must be equal when they end."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

import forked
from inprocess import Ended, run
from lmtrain.callbacks.metrics import without_times
from lmtrain.checkpoints import manifest, store
from lmtrain.files import read_jsonl

HERE = Path(__file__).parent
STEPS = 12
# With dropout, validation in between, early stopping that counts, and saves at other steps than validations.
SETTINGS = [
    "data=text",
    "tokenizer=bytes",
    "model.num_hidden_layers=2",
    "model.num_attention_heads=2",
    "model.hidden_size=32",
    "model.max_position_embeddings=64",
    "model.dropout=0.1",
    "data.seq_len=32",
    "data.global_batch_size=6",
    "trainer.precision=32-true",
    f"trainer.max_steps={STEPS}",
    "trainer.val_check_interval=3",
    "trainer.limit_val_batches=3",
    "trainer.save_every_n_steps=2",
    "trainer.log_every_n_steps=1",
    "callbacks.early_stopping.enabled=true",
    "callbacks.early_stopping.patience=50",
    "callbacks.samples.max_new_tokens=4",
    "export.enabled=false",
    "logger=none",
]


def command(corpus: Path | None, run_dir: Path, *extra: str) -> list[str]:
    """Returns a run's command; corpus is text to train on, or None if `extra` names other data."""
    fixed = [*([f"data.path={corpus}"] if corpus else []), f"run.dir={run_dir}", "run.resume=auto"]
    return [sys.executable, "-m", "lmtrain.train", *SETTINGS, *fixed, *extra]


def environment() -> dict[str, str]:
    path = os.pathsep.join(p for p in (str(HERE), os.environ.get("PYTHONPATH")) if p)
    return {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}


def train(corpus: Path | None, run_dir: Path, *extra: str, timeout: float = 600) -> subprocess.CompletedProcess[str]:
    """Trains in a process of its own."""
    return forked.run("train", *command(corpus, run_dir, *extra)[3:], env=environment(), timeout=timeout)


def train_here(corpus: Path | None, run_dir: Path, *extra: str) -> Ended:
    """Trains in this process, which is faster; the numbers equal those of a separate process."""
    return run("train", *command(corpus, run_dir, *extra)[3:])


def kill_at(place: str, step: int) -> list[str]:
    """Returns overrides that make the run kill itself with SIGKILL at a place and step."""
    return [
        f"callbacks.extra=[{{_target_: killer.KillAt, place: {place}, step: {step}}}]",
        "run.allow_target=[killer,odd_environments]",
    ]


def stable_rows(run_dir: Path) -> list[dict[str, Any]]:
    """Returns the rows of metrics.jsonl without the fields that depend on the machine's speed."""
    return [without_times(row) for row in read_jsonl(run_dir / "metrics.jsonl")]


def assert_equal_runs(a: Path, b: Path) -> None:
    """Asserts that logged numbers, samples, weights, optimizer states and kept checkpoints are equal bit for bit."""
    assert stable_rows(a) == stable_rows(b)
    assert (a / "samples.jsonl").read_text() == (b / "samples.jsonl").read_text()
    kept_a, kept_b = store.scan(a / "checkpoints"), store.scan(b / "checkpoints")
    assert [p.name for p in kept_a] == [p.name for p in kept_b]
    for x, y in zip(kept_a, kept_b, strict=True):
        assert manifest.read(x)["metrics"] == manifest.read(y)["metrics"]
        assert_equal(*without_validation(store.load(x), store.load(y)), x.name)
    for name in ("last", "best"):
        assert os.readlink(a / "checkpoints" / name) == os.readlink(b / "checkpoints" / name)


def without_validation(a: dict[str, Any], b: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns both without what a validation changes, if `b` was saved on a stop requested during its validation.

    Such a checkpoint is correct: a run that resumes from it begins with that validation.
    """
    if a["callbacks"]["Validation"]["last_step"] == b["callbacks"]["Validation"]["last_step"]:
        return a, b
    assert b["callbacks"]["Validation"]["last_step"] < a["callbacks"]["Validation"]["last_step"] == a["global_step"]
    changed = {"callbacks", "loops", "metrics", "interim"}
    first, second = ({key: value for key, value in c.items() if key not in changed} for c in (a, b))
    return first, second


def assert_equal(a: Any, b: Any, where: str) -> None:
    assert type(a) is type(b), where
    if isinstance(a, torch.Tensor):
        assert torch.equal(a, b) or ((a.isnan() == b.isnan()).all() and torch.equal(a.nan_to_num(), b.nan_to_num())), (
            where
        )
    elif isinstance(a, dict):
        assert a.keys() == b.keys(), where
        for key in a:
            assert_equal(a[key], b[key], f"{where}.{key}")
    elif isinstance(a, list | tuple):
        assert len(a) == len(b), where
        for i, (x, y) in enumerate(zip(a, b, strict=True)):
            assert_equal(x, y, f"{where}[{i}]")
    elif isinstance(a, float) and a != a:
        assert b != b, where
    else:
        assert a == b, where
