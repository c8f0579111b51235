"""A disk that fails at each write of a save in turn: no checkpoint is lost, and no damaged one is accepted."""

import builtins
import errno
import io
import os
import pathlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from lmtrain.checkpoints import store
from lmtrain.errors import RunError


class Faults:
    """Counts writes, syncs and renames; after `fail_at` of them, all fail with an error of this kind."""

    def __init__(self, kind: str, fail_at: int | None) -> None:
        self.kind, self.fail_at, self.calls = kind, fail_at, 0

    def strike(self) -> bool:
        self.calls += 1
        return self.fail_at is not None and self.calls > self.fail_at

    def error(self) -> OSError:
        number = errno.EIO if self.kind == "EIO" else errno.ENOSPC
        return OSError(number, os.strerror(number))


class FaultyFile(io.FileIO):
    """An unbuffered file on that disk. A short write stores half of its data, then the disk is full."""

    faults: Faults

    def write(self, data: Any) -> int:
        if self.faults.strike():
            if self.faults.kind == "short":
                view = memoryview(data).cast("B")
                super().write(view[: len(view) // 2])
            raise self.faults.error()
        return super().write(data)


@contextmanager
def faulty_disk(faults: Faults, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    real_open, real_fsync, real_rename = io.open, os.fsync, os.rename

    def faulty_open(file: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
        if not str(file).startswith(str(folder)) or not set(mode) & set("wxa+"):
            return real_open(file, mode, *args, **kwargs)
        raw = FaultyFile(file, mode.replace("b", "").replace("t", ""))
        raw.faults = faults
        return raw if "b" in mode else io.TextIOWrapper(io.BufferedWriter(raw), encoding="utf-8")

    def failing(real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            if faults.strike():
                raise faults.error()
            return real(*args)

        return call

    with monkeypatch.context() as m:
        m.setattr(io, "open", faulty_open)
        m.setattr(builtins, "open", faulty_open)
        m.setattr(pathlib.io, "open", faulty_open)  # what Path.open calls
        m.setattr(os, "fsync", failing(real_fsync))
        m.setattr(os, "rename", failing(real_rename))
        m.setattr(os, "replace", failing(os.replace))
        yield


def content(step: int) -> dict[str, Any]:
    return {
        "state_dict": {"w": torch.full((3000,), float(step)), "b": torch.zeros(7)},
        "optimizer_states": [{"state": {0: {"exp_avg": torch.ones(3000)}}}],
        "global_step": step,
        "metrics": {"val/loss": 1.0},
    }


@pytest.mark.parametrize("kind", ["ENOSPC", "EIO", "short"])
def test_every_write_of_a_save_fails_in_turn(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store.publish(content(1), tmp_path / store.name_of(1))
    counting = Faults(kind, None)
    with faulty_disk(counting, tmp_path, monkeypatch):
        store.publish(content(2), tmp_path / store.name_of(2))
    assert counting.calls > 10, "writes, syncs and renames of two files and a manifest must have been seen"
    for fail_at in range(counting.calls):
        path = tmp_path / store.name_of(3 + fail_at)
        told = pytest.raises(RunError, match="the ones before it are untouched")
        with faulty_disk(Faults(kind, fail_at), tmp_path, monkeypatch), told:
            store.publish(content(3 + fail_at), path)
        # A later save, on a disk that works again, succeeds whatever was left behind.
        for kept in store.scan(tmp_path):
            assert store.damage(kept) is None, f"{kept} was damaged by a failure at write {fail_at}"
        assert store.newest_complete(tmp_path) is not None
        assert {1, 2} <= {store.step_of(p) for p in store.scan(tmp_path)}
    store.publish(content(999), tmp_path / store.name_of(999))
    assert store.damage(tmp_path / store.name_of(999)) is None
