"""Checkpoints are complete or absent, damage is detected, and retention works by scanning the folder."""

import errno
import hashlib
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from lmtrain.callbacks.checkpoints import Checkpoints
from lmtrain.checkpoints import checksums, manifest, retention, store
from lmtrain.checkpoints.checkpoint_io import FolderCheckpointIO
from lmtrain.config import compose as rules
from lmtrain.errors import RunError, UserError


def content(step: int, score: float | None = None) -> dict[str, Any]:
    return {
        "state_dict": {"w": torch.full((100,), float(step))},
        "optimizer_states": [{"state": {0: {"exp_avg": torch.ones(100)}}, "param_groups": []}],
        "global_step": step,
        "metrics": {} if score is None else {"val/loss": score},
    }


def save(folder: Path, step: int, score: float | None = None) -> Path:
    path = folder / store.name_of(step)
    FolderCheckpointIO().save_checkpoint(content(step, score), path)
    return path


def test_round_trip(tmp_path: Path) -> None:
    path = save(tmp_path, 5, 1.5)
    assert store.damage(path) is None
    loaded = FolderCheckpointIO().load_checkpoint(path)
    assert torch.equal(loaded["state_dict"]["w"], torch.full((100,), 5.0))
    assert loaded["global_step"] == 5
    assert manifest.read(path)["metrics"] == {"val/loss": 1.5}


def test_a_checkpoint_is_hashed_while_it_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its files used to be read again for their hashes; torch's own checksums, which it never reads, are left out."""
    with monkeypatch.context() as patched:
        patched.setattr(checksums, "sha256", None)
        path = save(tmp_path, 5)
    for name, entry in manifest.read(path)["files"].items():
        whole = (path / name).read_bytes()
        assert entry == {"bytes": len(whole), "sha256": hashlib.sha256(whole).hexdigest()}
    assert torch.equal(store.load_weights(path, mmap=True)["w"], torch.full((100,), 5.0))
    assert torch.serialization.get_crc32_options(), "whatever else a program saves has them"


def test_a_failed_write_of_a_checkpoint_waits_for_its_hash(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The memory that is hashed is valid only until `write` returns."""
    hashed = []

    class Full:
        def write(self, data: memoryview) -> int:
            raise OSError(errno.ENOSPC, "No space left on device")

        def flush(self) -> None: ...

    monkeypatch.setattr(store, "_SMALL", 0)
    file = store.HashedFile(Full())  # type: ignore[arg-type]
    file.digest = SimpleNamespace(update=lambda data: time.sleep(0.05) or hashed.append(data))  # type: ignore
    with pytest.raises(OSError, match="No space left"):
        file.write(memoryview(b"abc"))
    assert hashed == [b"abc"]


def test_a_large_file_goes_to_the_disk_while_it_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It used to wait as a whole at the end. The kernel reports a failed write once, to whichever sync asks first."""
    synced, real = [], os.fsync

    def fsync(file: int) -> None:
        real(file)
        synced.append(os.fstat(file).st_size)
        if full and len(synced) == 1:
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(store, "_SYNC_BYTES", 100_000)
    monkeypatch.setattr(os, "fsync", fsync)
    content = {str(i): torch.full((50_000,), float(i)) for i in range(20)}
    full = False
    entry = store.write(tmp_path / "model.pt", content)
    assert entry["bytes"] == (tmp_path / "model.pt").stat().st_size == synced[-1]
    assert len(synced) > 1, "it was synced at the end only"
    assert synced[0] > 0
    full, synced[:] = True, []
    with pytest.raises(RunError, match="the disk is full"):
        store.publish({"state_dict": content, "global_step": 1}, tmp_path / store.name_of(1))
    assert store.scan(tmp_path) == []


def _cut(path: Path) -> None:
    with path.open("r+b") as f:
        f.truncate(path.stat().st_size - 1)


def _flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("name", ["model.pt", "trainer.pt", "manifest.json"])
@pytest.mark.parametrize("how", [_cut, _flip, Path.unlink])
def test_damage_is_seen_and_passed_over(tmp_path: Path, name: str, how: Any) -> None:
    save(tmp_path, 1)
    newest = save(tmp_path, 2)
    if name == "manifest.json" and how is _flip:
        (newest / name).write_text("{")
    else:
        how(newest / name)
    told: list[str] = []
    found = store.newest_complete(tmp_path, told.append)
    assert found == tmp_path / store.name_of(1)
    assert len(told) == 1
    assert "step_00000002 is damaged" in told[0]


def test_a_good_checkpoint_is_never_overwritten(tmp_path: Path) -> None:
    path = save(tmp_path, 3)
    before = (path / "model.pt").stat().st_mtime_ns
    save(tmp_path, 3)
    assert (path / "model.pt").stat().st_mtime_ns == before


def test_a_damaged_one_is_replaced(tmp_path: Path) -> None:
    path = save(tmp_path, 3)
    _cut(path / "model.pt")
    save(tmp_path, 3)
    assert store.damage(path) is None


def test_leftovers_are_swept_and_never_taken_for_checkpoints(tmp_path: Path) -> None:
    good = save(tmp_path, 1)
    shutil.copytree(good, tmp_path / f"{store.name_of(2)}.tmp123")
    (tmp_path / "best.tmp9").symlink_to("nowhere")
    assert store.scan(tmp_path) == [good]
    store.sweep(tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == [good.name]


def test_a_full_disk_leaves_the_checkpoints_before_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path, 1)

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(RunError, match=r"the disk is full.*keep_last"):
        save(tmp_path, 2)
    monkeypatch.undo()
    assert [p.name for p in tmp_path.iterdir()] == [store.name_of(1)]
    assert store.damage(tmp_path / store.name_of(1)) is None


INTERRUPTED = """
import os
import signal
import sys
from pathlib import Path

import torch

from lmtrain.checkpoints import store


def tell(*_):
    raise RuntimeError("DataLoader worker (pid 1) is killed")  # as torch's handler does


def died(method):
    def with_signal(self, *args):
        method(self, *args)
        os.kill(os.getpid(), signal.SIGCHLD)

    return with_signal


opener = torch.serialization._open_zipfile_writer_buffer
opener.__init__, opener.__exit__ = died(opener.__init__), died(opener.__exit__)
signal.signal(signal.SIGCHLD, tell)
try:
    store.publish({"state_dict": {}, "global_step": 1}, Path(sys.argv[1]) / "step_00000001")
except RuntimeError as error:
    message = str(error)
print("goes on:", message)
assert signal.getsignal(signal.SIGCHLD) is tell
"""


@pytest.mark.slow
def test_children_that_die_in_a_save_are_told_of_after_it(tmp_path: Path) -> None:
    """Raised within the save, the error would make torch abort: its writer, when collected, writes to a closed file."""
    done = subprocess.run([sys.executable, "-c", INTERRUPTED, tmp_path], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "goes on: DataLoader worker (pid 1) is killed\n"
    assert list(tmp_path.iterdir()) == []


def test_retention() -> None:
    scores: retention.Scores = [(100, 3.0), (200, 1.0), (300, None), (400, 2.0), (500, 2.5)]
    assert retention.to_keep(scores, last=2, best=1, every=None, mode="min") == {200, 400, 500}
    assert retention.to_keep(scores, last=1, best=2, every=None, mode="min") == {200, 400, 500}
    assert retention.to_keep(scores, last=1, best=1, every=300, mode="max") == {100, 300, 500}
    assert retention.to_keep(scores, last=1, best=0, every=None, mode="min") == {500}
    assert retention.best_of([(100, 1.0), (200, 2.0), (300, None)], retention.LAST) == 200


def test_best_is_the_earliest_of_equals() -> None:
    assert retention.best_of([(1, 2.0), (2, 1.0), (3, 1.0)], "min") == 2
    assert retention.best_of([(1, None)], "min") is None


def test_removal_cut_short_leaves_nothing_that_looks_complete(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = save(tmp_path, 1)
    monkeypatch.setattr(shutil, "rmtree", lambda *a, **k: None)  # as if killed before a byte was removed
    FolderCheckpointIO().remove_checkpoint(path)
    assert store.scan(tmp_path) == []


def test_links_are_relative_so_a_run_can_be_moved(tmp_path: Path) -> None:
    folder = tmp_path / "run" / "checkpoints"
    folder.mkdir(parents=True)
    retention.link(folder, "best", save(folder, 4))
    (tmp_path / "run").rename(tmp_path / "moved")
    assert store.damage(tmp_path / "moved" / "checkpoints" / "best") is None


def test_a_copy_that_took_the_place_of_a_link_is_replaced(tmp_path: Path) -> None:
    """As scp or a bucket makes one: without this it would be loaded as `last` for ever."""
    old, new = save(tmp_path, 1), save(tmp_path, 2)
    shutil.copytree(old, tmp_path / "last")
    (tmp_path / "best").mkdir()  # holds no checkpoint
    for name in ("last", "best"):
        retention.link(tmp_path, name, new)
    assert (tmp_path / "last").is_symlink()
    assert (tmp_path / "last").resolve() == new
    assert not (tmp_path / "best").is_symlink()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["best", "last", old.name, new.name]


def test_names() -> None:
    assert store.name_of(500) == "step_00000500"
    assert store.step_of(Path("x/step_00000500")) == 500
    with pytest.raises(UserError, match="not a checkpoint's name"):
        store.step_of(Path("epoch=1.ckpt"))


def test_a_score_that_is_no_number_is_never_the_best() -> None:
    nan = float("nan")
    for scores in ([(1, nan), (2, 3.0), (3, 2.0)], [(1, 2.0), (2, nan), (3, 1.0)], [(1, 3.0), (2, 2.0), (3, nan)]):
        finite = {step: score for step, score in scores if score == score}
        assert retention.best_of(scores, "min") == min(finite, key=finite.__getitem__)
        assert retention.best_of(scores, "max") == max(finite, key=finite.__getitem__)
    assert retention.best_of([(1, nan)], "min") is None


def kept(folder: Path, scored_on: str, **changes: Any) -> list[int]:
    """Returns the steps that the callback keeps of the checkpoints in a folder."""
    config = rules.check(rules.compose([f"checkpoint.{key}={value}" for key, value in changes.items()]))
    Checkpoints(folder, mock.Mock(), config, 100, scored_on, "min").prune()
    return sorted(map(store.step_of, store.scan(folder)))


def test_the_best_checkpoint_of_earlier_validation_rows_is_kept(tmp_path: Path) -> None:
    """Scores of other rows are not compared with the present ones, so each has a best checkpoint."""
    for step, score, on in ((1, 1.5, "a"), (2, 1.0, "a"), (3, 1.2, "a"), (4, 7.0, "b"), (5, 5.0, "b"), (6, 6.0, "b")):
        FolderCheckpointIO().save_checkpoint({**content(step, score), "scored_on": on}, tmp_path / store.name_of(step))
    assert kept(tmp_path, "b", keep_last=1, keep_best=1) == [2, 5, 6]
    assert (tmp_path / "best").resolve().name == store.name_of(5)
    assert (tmp_path / "last").resolve().name == store.name_of(6)


def test_an_interim_checkpoint_displaces_no_other_and_goes_with_the_next(tmp_path: Path) -> None:
    """A run that was stopped ends with the checkpoints of one that was not."""
    for step, score, interim in ((2, 3.0, False), (4, 2.0, False), (5, 1.0, True)):
        FolderCheckpointIO().save_checkpoint(
            {**content(step, score), "interim": interim}, tmp_path / store.name_of(step)
        )
    assert kept(tmp_path, "a", keep_last=2, keep_best=1) == [2, 4, 5], "it is the newest"
    assert (tmp_path / "best").resolve().name == store.name_of(4)
    save(tmp_path, 6, 2.5)
    assert kept(tmp_path, "a", keep_last=2, keep_best=1) == [4, 6]


def test_scores_of_an_overdue_validation_are_added_once(tmp_path: Path) -> None:
    """A checkpoint that was due stays regular, and an interim one stays interim only while it is not due."""
    for step, before, now, after in (
        (1, False, False, False),
        (2, True, False, False),
        (3, True, True, True),
        (4, False, True, False),
    ):
        path = tmp_path / store.name_of(step)
        FolderCheckpointIO().save_checkpoint({**content(step), "interim": before}, path)
        assert store.add_metrics(path, {"val/loss": 1.5}, now, "rows")
        found = manifest.read(path)
        assert (found["metrics"], found["interim"], found["scored_on"]) == ({"val/loss": 1.5}, after, "rows")
        assert store.damage(path) is None
        assert not store.add_metrics(path, {"val/loss": 9.0}, now)
        assert manifest.read(path)["metrics"] == {"val/loss": 1.5}
    path = save(tmp_path, 9)
    assert store.add_metrics(path, {"val/loss": 1.5}, False)
    assert manifest.read(path).get("scored_on") is None


def test_a_part_is_described_by_its_offset_bytes_and_checksum() -> None:
    part = {"offset": 0, "bytes": 3, "sha256": "a"}
    assert manifest._is_entry("model.safetensors", {"bytes": 3, "parts": [part, part]})
    wrong: list[Any] = [
        {**part, "offset": 0.0},
        {**part, "bytes": "3"},
        {**part, "sha256": 3},
        {"offset": 0},
        [0, 3, "a"],
    ]
    for other in wrong:
        assert not manifest._is_entry("model.safetensors", {"bytes": 3, "parts": [part, other]}), other
    assert not manifest._is_entry("model.safetensors", {"bytes": 3, "parts": part})
    assert not manifest._is_entry("../model.safetensors", {"bytes": 3, "parts": [part]})
    assert manifest._is_entry("model.pt", {"bytes": 3, "sha256": "a"})
    assert not manifest._is_entry("model.pt", {"bytes": 3})
