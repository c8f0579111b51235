"""Two ranks that find damaged checkpoints end with one message, or continue from the same checkpoint."""

import shutil
from pathlib import Path

import pytest
from runs import assert_equal_runs, train
from test_preemption import start

import processes
from inprocess import snapshot
from lmtrain.checkpoints import manifest, store

RANKS = ["trainer.devices=2", "data.micro_batch_size=3"]


@pytest.fixture(scope="module")
def whole(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run_dir = tmp_path_factory.mktemp("whole") / "run"
    done = train(corpus, run_dir, *RANKS)
    assert done.returncode == 0, done.stdout + done.stderr
    return run_dir


@pytest.fixture
def kept(whole: Path, tmp_path: Path) -> Path:
    """Returns a copy of the run without its summary, as if it was killed before it ended."""
    run_dir = Path(shutil.copytree(whole, tmp_path / "run", symlinks=True))
    (run_dir / "summary.json").unlink()
    return run_dir


def harm(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-1] + b"?")


def ends_with(corpus: Path, kept: Path, code: int, words: str) -> None:
    process = start(corpus, kept, *RANKS)
    output, _ = process.communicate(timeout=300)
    processes.wait_until_gone(processes.below(process.pid), 60)
    assert process.returncode == code, output
    assert output.count("error: ") == 1 + (code == 1), output  # the launcher says which rank failed first
    assert output.count(words) == 1, output
    assert "Traceback" not in output, output


@pytest.mark.slow
def test_all_damaged_is_said_once_and_ends_all_ranks(kept: Path, corpus: Path) -> None:
    for checkpoint in store.scan(kept / "checkpoints"):
        harm(checkpoint / "model.pt")
    before = snapshot(kept / "checkpoints")
    logged = (kept / "metrics.jsonl").read_bytes()
    ends_with(
        corpus, kept, 2, "can be continued, all are damaged: step_00000012 (model.pt does not match its checksum)"
    )
    assert snapshot(kept / "checkpoints") == before
    assert (kept / "metrics.jsonl").read_bytes() == logged


@pytest.mark.slow
def test_an_io_error_of_the_first_rank_is_said_once_and_ends_all_ranks(kept: Path, corpus: Path) -> None:
    broken = store.scan(kept / "checkpoints")[-1] / manifest.NAME
    broken.unlink()
    broken.symlink_to(broken)  # opening it fails, although it exists
    ends_with(corpus, kept, 1, f"cannot read {broken}")
    assert broken.is_symlink()


@pytest.mark.slow
def test_ranks_go_on_from_the_one_before_and_end_equal(whole: Path, kept: Path, corpus: Path) -> None:
    newest = store.scan(kept / "checkpoints")[-1]
    harm(newest / "trainer.pt")
    done = train(corpus, kept, *RANKS)
    assert done.returncode == 0, done.stdout + done.stderr
    assert newest.with_name(f"{newest.name}.damaged").is_dir()
    assert_equal_runs(whole, kept)
