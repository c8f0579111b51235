"""Setup shared by all tests: one OpenMP thread, no network, a cache of the session, a corpus, and CLI runs."""

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
from typing import Any

import pytest

import composed_once
import forked
from lmtrain.distributed.ranks import TORCH
from support import Run, environment_kept

# Helper modules whose assert statements pytest rewrites, so that failures show the compared values.
pytest.register_assert_rewrite("runs", "strategy_runs", "ranks", "processes")
composed_once.install()


def pytest_collection_finish() -> None:
    """Excludes objects created by collection from garbage collection and makes it rarer, to speed up the tests."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)


LEFT_OUT = "no time was left for it"
# Folders whose tests run first when time is limited: kills, ranks and numerics before options.
FIRST = ("resume", "distributed", "parity", "golden", "objectives", "stages", "checkpoints", "data")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if "LMTRAIN_TESTS_END" in os.environ:
        folders = {name: number for number, name in enumerate(FIRST)}
        items.sort(key=lambda item: folders.get(item.path.parent.name, len(FIRST)))


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skips tests that have not begun by LMTRAIN_TESTS_END (seconds since 1970), since .ci/run has to end in time."""
    if time.time() > float(os.environ.get("LMTRAIN_TESTS_END", "inf")):
        pytest.skip(LEFT_OUT)


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """Says how many of the chosen tests ran, and names those that LMTRAIN_TESTS_END or an interruption left out."""
    if hasattr(config, "workerinput") or config.option.collectonly:
        return
    scheduler = getattr(config.pluginmanager.get_plugin("dsession"), "sched", None)  # with -n, which collects elsewhere
    session = terminalreporter._session
    chosen = set(scheduler.collection or ()) if scheduler else {item.nodeid for item in getattr(session, "items", ())}
    reports = {
        kind: terminalreporter.stats.get(kind, []) for kind in ("passed", "failed", "error", "skipped", "xfailed")
    }
    skipped = {report.nodeid for report in reports["skipped"] if LEFT_OUT not in str(report.longrepr)}
    ran = {report.nodeid for kind, found in reports.items() if kind != "skipped" for report in found}
    asked = config.option.markexpr or "all"
    lines = [f"{len(ran)} of {len(chosen)} tests ran ({asked}), {len(skipped)} need what is not there"]
    missing = sorted(chosen - ran - skipped)
    if missing:
        lines += [f"{len(missing)} TESTS WERE LEFT OUT, as no time was left for them:", *missing]
    for line in lines:
        terminalreporter.write_line(line)
    if counted := os.environ.get("LMTRAIN_TESTS_COUNTED"):
        with open(counted, "a") as file:
            print(*lines, sep="\n", file=file)


@pytest.fixture(autouse=True, scope="session")
def _cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Directs prepared data to a folder of the test session, never to the user's cache."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LMTRAIN_CACHE", str(tmp_path_factory.getbasetemp() / "cache"))
        yield


@pytest.fixture(autouse=True)
def _environment() -> Iterator[None]:
    """Gives each test the environment of the session; Lightning leaves a launcher's variables there.

    They would reach the processes that later tests start: two tasks of SLURM, for example, would meet at a used port.
    """
    with environment_kept(without=TORCH):
        yield


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns a folder of twenty small text files with repeated words, so that a tiny model can learn something."""
    folder = tmp_path_factory.mktemp("corpus")
    for i in range(20):
        lines = [
            f"line {j} of file {i}: the number {j * i} is {'even' if j * i % 2 == 0 else 'odd'}" for j in range(40)
        ]
        (folder / f"file_{i:02d}.txt").write_text("\n".join(lines) + "\n")
    return folder


@pytest.fixture
def lmtrain(tmp_path: Path) -> Run:
    """Returns a function that runs `python -m lmtrain.VERB ARGS` in an empty folder, returning the finished process."""

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


@pytest.fixture
def forked_lmtrain(tmp_path: Path) -> Run:
    """Does the same with forked processes, ranks included, which saves imports: for tests of several ranks' numbers."""

    def run(
        verb: str, *args: str, env: dict[str, str] | None = None, timeout: float = 600
    ) -> subprocess.CompletedProcess[str]:
        return forked.run(verb, *args, env={**os.environ, **(env or {})}, here=tmp_path, timeout=timeout)

    return run
