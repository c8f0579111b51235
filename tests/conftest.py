"""Shared by all tests: one thread each, no network, folders of their own, and the main job as a subprocess."""

import os

os.environ["OMP_NUM_THREADS"] = "1"
os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("WANDB_MODE", "offline")
os.environ["COLUMNS"] = "160"

import gc
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import composed_once
from support import Run

# Helpers whose assertions should say what they found.
pytest.register_assert_rewrite("runs", "strategy_runs", "ranks", "processes")
composed_once.install()


def pytest_collection_finish() -> None:
    """What collecting has imported stays: the garbage collector need not walk it again and again."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)


# The folders whose slow tests are begun first where time is bounded: kills, ranks and numbers before options.
FIRST = ("resume", "distributed", "parity", "golden", "objectives", "stages", "checkpoints", "data")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if "LMTRAIN_TESTS_END" in os.environ:
        folders = {name: number for number, name in enumerate(FIRST)}
        items.sort(key=lambda item: folders.get(item.path.parent.name, len(FIRST)))


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Leaves out what has not begun by LMTRAIN_TESTS_END, in seconds since 1970: .ci/run has to end in time."""
    if time.time() > float(os.environ.get("LMTRAIN_TESTS_END", "inf")):
        pytest.skip("no time was left for it")


@pytest.fixture(autouse=True, scope="session")
def _cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Prepared data goes to a folder of the session, never to the user's cache."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LMTRAIN_CACHE", str(tmp_path_factory.getbasetemp() / "cache"))
        yield


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


@pytest.fixture
def lmtrain(tmp_path: Path) -> Run:
    """Runs `python -m lmtrain.VERB ARGS` in an empty folder and returns the finished process."""

    def run(
        verb: str, *args: str, env: dict[str, str] | None = None, timeout: float = 600
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
