"""Shared by all tests: one thread each, no network, folders of their own, and the main job as a subprocess."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("WANDB_MODE", "offline")
os.environ.setdefault("COLUMNS", "160")

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

REPO = Path(__file__).resolve().parents[1]
# A model and data small enough that a run is dominated by imports.
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
    "callbacks.samples.max_new_tokens=4",
]


@pytest.fixture(autouse=True)
def _caches(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LMTRAIN_CACHE", str(tmp_path_factory.getbasetemp() / "cache"))


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Twenty small text files with words that repeat, so that a tiny model learns something."""
    folder = tmp_path_factory.mktemp("corpus")
    for i in range(20):
        lines = [
            f"line {j} of file {i}: the number {j * i} is {'even' if j * i % 2 == 0 else 'odd'}" for j in range(40)
        ]
        (folder / f"file_{i:02d}.txt").write_text("\n".join(lines) + "\n")
    return folder


Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def lmtrain(tmp_path: Path) -> Run:
    """Runs `python -m lmtrain.VERB ARGS` in an empty folder and returns the finished process."""

    def run(
        verb: str, *args: str, env: dict[str, str] | None = None, timeout: float = 120
    ) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", f"lmtrain.{verb}", *args],
            cwd=tmp_path,
            env={**os.environ, **(env or {})},
            capture_output=True,
            text=True,
            timeout=timeout,
        )

    return run


def rows(path: Path) -> list[dict[str, Any]]:
    """Rows of a metrics.jsonl."""
    return [json.loads(line) for line in path.read_text().splitlines()]
