"""A full disk ends a run with exit code 1 and one message, and everything complete before stays complete.

Each test fills a real, small file system at a different moment of the run.
"""

import resource
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from inprocess import TWO_STEPS, Ended, message, run, snapshot, train_tiny
from lmtrain.checkpoints import store
from support import EXPORT, TINY

EVERY_STEP = ["trainer.save_every_n_steps=1", "trainer.max_steps=4", "checkpoint.keep_last=1"]
Disk = Callable[[int], Path]


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Disk]:
    """Yields disk(kib), a function that mounts an empty file system of that size and returns its folder."""
    folder = tmp_path / "disk"
    folder.mkdir()

    def mount(kib: int) -> Path:
        done = subprocess.run(
            ["mount", "-t", "tmpfs", "-o", f"size={kib}k", "tmpfs", str(folder)],
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode != 0:
            pytest.skip(f"a small file system can't be mounted here: {done.stderr.strip()}")
        return folder

    yield mount
    subprocess.run(["umount", "--lazy", str(folder)], capture_output=True, check=False)


def resize(disk: Path, kib: int) -> None:
    subprocess.run(["mount", "-o", f"remount,size={kib}k", str(disk)], check=True)


def used_kib(disk: Path) -> int:
    done = subprocess.run(["df", "-k", "--output=used", str(disk)], capture_output=True, text=True, check=True)
    return int(done.stdout.split()[1])


def assert_full(ended: Ended, *said: str) -> None:
    assert ended.code == 1, ended.err
    text = message(ended.err)
    for words in ("the disk is full", *said):
        assert words in text


def test_before_training_begins(disk: Disk, corpus: Path) -> None:
    """If not even the run's config and tokenizer fit, nothing is left behind."""
    folder = disk(8)
    assert_full(train_tiny(corpus, f"run.dir={folder}/run"), f"{folder}/run", "run.dir")
    assert list(folder.iterdir()) == []


def test_in_the_first_row_of_metrics(disk: Disk, corpus: Path) -> None:
    folder = disk(24)
    assert_full(train_tiny(corpus, f"run.dir={folder}/run"), "no checkpoint had been written yet")


@pytest.mark.parametrize(("extra_kib", "save"), [(8, "sync"), (150, "sync"), (400, "sync"), (150, "async")])
def test_in_a_checkpoint(extra_kib: int, save: str, disk: Disk, corpus: Path) -> None:
    """The previous checkpoint stays whole, no partial one remains, and the run resumes once there is room."""
    folder = disk(4096)
    settings = [f"run.dir={folder}/run", "run.resume=auto", "export.enabled=false", *EVERY_STEP]
    settings.append(f"checkpoint.async_save={save == 'async'}")
    assert train_tiny(corpus, *settings, "trainer.max_steps=2").code == 0
    resize(folder, used_kib(folder) + extra_kib)
    good = store.scan(folder / "run" / "checkpoints")
    before = {path: snapshot(path) for path in good}

    assert_full(train_tiny(corpus, *settings), str(folder))
    left = store.scan(folder / "run" / "checkpoints")
    assert left == good
    assert {path: snapshot(path) for path in left} == before
    assert not list((folder / "run" / "checkpoints").glob("*.tmp*"))

    resize(folder, 8192)
    ended = train_tiny(corpus, *settings)
    assert ended.code == 0, ended.err
    assert [store.step_of(p) for p in store.scan(folder / "run" / "checkpoints")][-1] == 4


def test_in_the_export(disk: Disk, corpus: Path) -> None:
    """The trained checkpoint stays, and the command in the message writes the export once there is room."""
    folder = disk(4096)
    settings = [f"run.dir={folder}/run", "run.resume=auto"]
    assert train_tiny(corpus, *settings).code == 0
    (folder / "run" / "summary.json").unlink()
    resize(folder, used_kib(folder) + 40)
    assert_full(
        train_tiny(corpus, EXPORT, *settings), f"python -m lmtrain.export run_dir={folder}/run export.checkpoint=step_0"
    )
    assert [store.damage(p) for p in store.scan(folder / "run" / "checkpoints")] == [None, None]
    assert not list((folder / "run").glob("export*"))

    resize(folder, 8192)
    ended = run("export", f"run_dir={folder}/run")
    assert ended.code == 0, ended.err
    assert (folder / "run" / "export" / "model.safetensors").exists()


@pytest.mark.parametrize("kib", [4, 40])
def test_while_preparing(kib: int, disk: Disk, corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If the disk fills while the tokenizer or the bins are written, no partial file and no run folder is left."""
    folder = disk(kib)
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    assert_full(train_tiny(corpus, f"data.cache_dir={folder}"), str(folder), "data.cache_dir")
    assert [p.name for p in folder.iterdir()] == [".locks"]
    assert not list((tmp_path / "here").iterdir())


def limit_files_to_100_kb() -> None:
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # so that a write fails instead of ending the process
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))


@pytest.mark.slow
def test_a_process_whose_files_may_not_grow(corpus: Path, tmp_path: Path) -> None:
    """A file size limit (`ulimit -f`, as clusters set it; EFBIG) gives the same message; this needs no mount."""
    assert run("prepare", *TINY, "data=text", f"data.path={corpus}").code == 0  # before the limit is set
    argv = [*TINY, *TWO_STEPS, "data=text", f"data.path={corpus}", "run.dir=run"]
    done = subprocess.run(
        [sys.executable, "-m", "lmtrain.train", *argv],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        preexec_fn=limit_files_to_100_kb,
        check=False,
    )
    assert_full(Ended(done.returncode, done.stdout, done.stderr, 0), "step_00000001", "run.resume=auto")
    assert list((tmp_path / "run" / "checkpoints").iterdir()) == []
