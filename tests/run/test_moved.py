"""A run's folder, its records or a checkpoint are moved or removed by others while they are used."""

import json
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import pytest

from inprocess import run, train_tiny
from lmtrain import errors, files
from lmtrain.checkpoints import store
from lmtrain.errors import RunError, UserError
from lmtrain.run import failures
from lmtrain.run_folder import trained
from lmtrain.run_folder.folder import RunDir
from support import rows


class Does(pl.Callback):
    """Renames the run's folder, removes it, or removes its metrics.jsonl, after a step."""

    def __init__(self, what: str, folder: str, at: int) -> None:
        self.what, self.folder, self.at = what, Path(folder), at

    def on_train_batch_end(self, trainer: pl.Trainer, *_: object) -> None:
        if trainer.global_step == self.at:
            if self.what == "rename":
                self.folder.rename(self.folder.with_name("elsewhere"))
            elif self.what == "remove":
                shutil.rmtree(self.folder)
            else:
                (self.folder / "metrics.jsonl").unlink()


def does(what: str, folder: Path, at: int) -> list[str]:
    mine = f"{{_target_: {__name__}.Does, what: {what}, folder: {folder}, at: {at}}}"
    return [f"run.dir={folder}", f"callbacks.extra=[{mine}]", f"run.allow_target=[{__name__}]"]


LONG = ["trainer.max_steps=6", "trainer.save_every_n_steps=2", "trainer.val_check_interval=2"]


@pytest.mark.parametrize("log", ["trainer.log_every_n_steps=1", "trainer.log_every_n_steps=2"])
def test_a_renamed_run_ends_and_goes_on_where_it_is(log: str, corpus: Path, tmp_path: Path) -> None:
    ended = train_tiny(corpus, *LONG, log, *does("rename", tmp_path / "run", 3))
    assert ended.code == errors.FAILED
    advice = f"moved to {tmp_path}/elsewhere: continue it there, run.dir={tmp_path}/elsewhere run.resume=auto"
    assert advice in ended.err
    assert not (tmp_path / "run").exists(), "nothing goes on under the old name"
    again = train_tiny(corpus, *LONG, log, f"run.dir={tmp_path}/elsewhere", "run.resume=auto")
    assert again.code == 0, again.err
    logged = [row["step"] for row in rows(tmp_path / "elsewhere/metrics.jsonl") if "train/loss" in row]
    assert logged == ([*range(1, 7)] if log.endswith("1") else [1, 2, 4, 6])


def test_a_removed_run_ends(corpus: Path, tmp_path: Path) -> None:
    ended = train_tiny(corpus, *LONG, *does("remove", tmp_path / "run", 3))
    assert (ended.code, f"{tmp_path}/run, the run's folder, was removed" in ended.err) == (errors.FAILED, True)
    assert not (tmp_path / "run").exists()


def test_removed_records_are_said_and_begin_anew(corpus: Path, tmp_path: Path) -> None:
    ended = train_tiny(corpus, *LONG, *does("records", tmp_path / "run", 3))
    assert ended.code == 0, ended.err
    assert f"note: {tmp_path}/run/metrics.jsonl was removed: its records are lost" in " ".join(ended.out.split())
    assert [row["step"] for row in rows(tmp_path / "run/metrics.jsonl") if "train/loss" in row][-2:] == [5, 6]


@pytest.fixture(scope="module")
def two(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns a run with checkpoints of steps 1 and 2."""
    folder = tmp_path_factory.mktemp("moved") / "run"
    assert train_tiny(corpus, "trainer.save_every_n_steps=1", "checkpoint.keep_last=2", f"run.dir={folder}").code == 0
    return folder


@pytest.mark.parametrize("when", ["damage", "load_trainer_state", "load_weights"])
@pytest.mark.parametrize("which", ["last", "step_00000002"])
def test_a_checkpoint_that_its_run_removes_meanwhile(
    when: str, which: str, two: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run's own retention has `last` name another; one that was named is missing, in one message."""
    folder = tmp_path / "run"
    shutil.copytree(two, folder, symlinks=True)
    real: Callable[..., Any] = getattr(store, when)

    def after_removal(path: Path, *more: Any) -> Any:
        if path.name == "step_00000002" and path.exists():
            (folder / "checkpoints" / "last").unlink()
            (folder / "checkpoints" / "last").symlink_to("step_00000001")
            shutil.rmtree(path)
        return real(path, *more)

    monkeypatch.setattr(store, when, after_removal)
    if which == "last":
        _, _, checkpoint = trained.from_run(RunDir(folder), which, {})
        assert checkpoint.name == "step_00000001"
    else:
        with pytest.raises(UserError, match=r"has no checkpoint 'step_00000002' \(there are: step_00000001\)"):
            trained.from_run(RunDir(folder), which, {})


def test_no_right_to_a_file_is_one_message(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests may run as root, who has every right."""
    is_file = Path.is_file

    def refuse(path: Path) -> bool:
        if path.name == "config.yaml" and path.parent == tmp_path:
            raise PermissionError(13, "Permission denied", str(path))
        return is_file(path)

    monkeypatch.setattr(Path, "is_file", refuse)
    monkeypatch.setattr(Path, "exists", lambda path: refuse(path) or path.is_dir())
    ended = run("generate", str(tmp_path), "--prompt", "a")
    assert (ended.code, ended.out) == (errors.FAILED, "")
    assert (
        ended.err
        == f"error: {tmp_path}/config.yaml: Permission denied: give this user the right to it, or name another place\n"
    )


def test_a_read_only_disk_refuses_an_export_in_one_message(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def read_only(path: Path) -> Path:
        raise OSError(30, "Read-only file system", str(path))

    monkeypatch.setattr(files, "temporary_beside", read_only)
    with pytest.raises(RunError, match="cannot write the export: Read-only file system; free some"):  # noqa: SIM117
        with files.replacing(tmp_path / "export", "the export", "free some"):
            raise AssertionError("nothing can be written")


@pytest.mark.parametrize(
    "said", ["Connection closed by peer [127.0.1.1]:3", "Read error [::1]: Connection reset by peer"]
)
def test_a_rank_whose_peer_is_gone_has_no_traceback(said: str, tmp_path: Path) -> None:
    """gloo's error stands for another rank's, which has said why it ended; rank 0 alone repeats it."""
    quiet = SimpleNamespace(data=SimpleNamespace(num_workers=0))
    ranks = SimpleNamespace(world_size=2, global_rank=1)
    of = SimpleNamespace(trainer=ranks, dir=RunDir(tmp_path), config=quiet, metrics=SimpleNamespace(last_val={}))
    explained = failures.explain(RuntimeError(f"[../gloo/transport/tcp/pair.cc:5] {said}"), of)  # type: ignore[arg-type]
    assert str(explained) == "another rank has ended, so this one can't go on; no checkpoint had been written yet"
    assert explained.shared
    ranks.world_size = 1
    assert failures.explain(RuntimeError(said), of) is None  # type: ignore[arg-type]


def test_a_rank_that_hangs_ends_after_its_launcher() -> None:
    """Nothing else would end it: in C code that doesn't return it heeds no signal."""
    rank = """
import hashlib, os, sys
from lmtrain.distributed import ranks
ranks.end_after_parent(os.getppid(), 0.5)
print(os.getpid(), flush=True)
hashlib.pbkdf2_hmac("sha256", b"", b"", 10**9)
"""
    launcher = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {rank!r}])"
    process = subprocess.Popen([sys.executable, "-c", launcher], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    number = int(process.stdout.readline())
    process.kill()
    process.wait()
    began = time.monotonic()
    while _runs(number) and time.monotonic() - began < 30:
        time.sleep(0.1)
    assert not _runs(number)


def _runs(number: int) -> bool:
    try:
        return json.dumps(Path(f"/proc/{number}/stat").read_text().split()[2]) != '"Z"'
    except OSError:
        return False
