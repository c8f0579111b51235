"""SIGKILL anywhere, then resume: the run equals one that was never interrupted, bit for bit.

Each chain kills one run repeatedly, at every place in turn, with different numbers of loader workers and ways of
saving; all must equal the same uninterrupted run.
"""

import functools
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from runs import STEPS, assert_equal_runs, kill_at, train, train_here

from lmtrain.checkpoints import store

SIGKILLED = -9
PLACES = [
    ("mid_step", 1),  # before the first checkpoint: starts over
    ("mid_save", 2),
    ("before_publish", 4),
    ("mid_validation", 6),
    ("before_prune", 8),
    ("mid_prune", 10),
    ("mid_step", 11),
    ("before_prune", 12),  # nothing is left to train
]


@pytest.fixture(scope="module")
def uninterrupted(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], Path]:
    """Returns a function that gives an uninterrupted run for a number of micro-batches per step, made on first use."""

    @functools.cache
    def made(accumulation: int) -> Path:
        run_dir = tmp_path_factory.mktemp("whole") / "run"
        done = train_here(corpus, run_dir, micro(accumulation), "data.num_workers=0")
        assert done.code == 0, done.err
        return run_dir

    return made


def micro(accumulation: int) -> str:
    return f"data.micro_batch_size={6 // accumulation}"


def chain(corpus: Path | None, run_dir: Path, places: list[tuple[str, int]], *settings: str) -> None:
    """Kills the run at each place, then lets it finish; moves its folder halfway through, as users do."""
    for number, (place, step) in enumerate(places):
        died = train(corpus, run_dir, *settings, *kill_at(place, step))
        assert died.returncode == SIGKILLED, f"{place} at {step}: {died.returncode}\n{died.stdout}\n{died.stderr}"
        for path in store.scan(run_dir / "checkpoints"):
            assert store.damage(path) is None, f"{path} after {place}"
        if number == len(places) // 2:
            run_dir.rename(run_dir.with_name("moved"))
            run_dir = run_dir.with_name("moved")
    done = train_here(corpus, run_dir, *settings)
    assert done.code == 0, done.err
    assert not list((run_dir / "checkpoints").glob("*.tmp*")), "leftovers must be swept"
    if run_dir.name == "moved":
        run_dir.rename(run_dir.with_name("run"))


def test_killed_in_a_save_and_a_validation(uninterrupted: Callable[[int], Path], corpus: Path, tmp_path: Path) -> None:
    """The short chain, part of every test run; the long ones also have steps of one micro-batch."""
    chain(corpus, tmp_path / "run", [("mid_save", 4), ("mid_validation", 9)], micro(3))
    assert_equal_runs(uninterrupted(3), tmp_path / "run")


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.parametrize(
    ("accumulation", "save", "workers"), [(1, "sync", 0), (1, "async", 2), (3, "sync", 2), (3, "async", 0)]
)
def test_kill_matrix(
    uninterrupted: Callable[[int], Path], corpus: Path, tmp_path: Path, accumulation: int, save: str, workers: int
) -> None:
    """Covers each value of one setting with each value of every other."""
    settings = [micro(accumulation), f"data.num_workers={workers}", f"checkpoint.async_save={save == 'async'}"]
    chain(corpus, tmp_path / "run", PLACES, *settings)
    assert_equal_runs(uninterrupted(accumulation), tmp_path / "run")


@pytest.mark.slow
def test_a_mixture_of_text_whose_weights_change(corpus: Path, tmp_path: Path) -> None:
    """Between the kills, the second source is used up and the weights change."""
    other = tmp_path / "other.txt"
    other.write_text("".join(f"line {i} of {i % 7} others\n" for i in range(20)))
    mixed = f"data.mixture=[{{path: {corpus}, weight: {{0: 1, 7: 3}}}}, {{path: {other}, weight: 2, max_epochs: 2}}]"
    settings = ["data=mixture", mixed, f"data.cache_dir={tmp_path}/cache", "data.micro_batch_size=2"]
    done = train_here(None, tmp_path / "whole", *settings, "data.num_workers=0")
    assert done.code == 0, done.err
    places = [("mid_save", 4), ("mid_step", 7), ("mid_validation", 9)]
    chain(None, tmp_path / "run", places, *settings, "data.num_workers=1")
    assert_equal_runs(tmp_path / "whole", tmp_path / "run")


@pytest.mark.slow
def test_rows_and_steps_that_grow(corpus: Path, tmp_path: Path) -> None:
    """Kills come in steps of each size and in rows of each length."""
    rows = ["data.curriculum={by: length, start_length: 8, steps: 9}", "data.micro_batch_size=2"]
    settings = [*rows, "data.batch_warmup.start_size=2", "data.batch_warmup.steps=5"]
    done = train_here(corpus, tmp_path / "whole", *settings, "data.num_workers=0")
    assert done.code == 0, done.err
    chain(corpus, tmp_path / "run", [("mid_save", 4), ("mid_validation", 9)], *settings, "data.num_workers=1")
    assert_equal_runs(tmp_path / "whole", tmp_path / "run")


@pytest.mark.slow
def test_a_damaged_newest_checkpoint_costs_its_steps_only(
    uninterrupted: Callable[[int], Path], corpus: Path, tmp_path: Path
) -> None:
    run_dir = tmp_path / "run"
    died = train(corpus, run_dir, micro(3), *kill_at("mid_step", STEPS - 1))
    assert died.returncode == SIGKILLED
    newest = store.scan(run_dir / "checkpoints")[-1]
    with (newest / "model.pt").open("r+b") as file:
        file.truncate(100)
    done = train_here(corpus, run_dir, micro(3))
    assert done.code == 0
    assert f"{newest.name} is damaged" in " ".join(done.out.split())
    assert_equal_runs(uninterrupted(3), run_dir)


@pytest.mark.slow
def test_tmpdir_on_another_file_system(uninterrupted: Callable[[int], Path], corpus: Path, tmp_path: Path) -> None:
    """Nothing of a checkpoint is written outside the run's folder, so an unusable TMPDIR changes nothing."""
    shm = Path("/dev/shm")
    if not shm.is_dir():
        pytest.skip("no /dev/shm to be the other file system")
    import os

    other = shm / f"lmtrain_test_{os.getpid()}"
    other.mkdir()
    try:
        os.environ["TMPDIR"] = str(other)
        chain(corpus, tmp_path / "run", [("mid_save", 4)], micro(3))
    finally:
        del os.environ["TMPDIR"]
        shutil.rmtree(other)
    assert_equal_runs(uninterrupted(3), tmp_path / "run")


def test_killed_before_training_began(uninterrupted: Callable[[int], Path], corpus: Path, tmp_path: Path) -> None:
    """An early kill leaves a folder without config.yaml, in which the same command starts from scratch."""
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    (tmp_path / "run" / "config.yaml.tmp123").write_text("seed:")
    done = train_here(corpus, tmp_path / "run", micro(3))
    assert done.code == 0, done.err
    assert_equal_runs(uninterrupted(3), tmp_path / "run")
