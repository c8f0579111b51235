"""Damage to a run's files: every bit of a checkpoint, lines of its logs, its summary. It is named, with no traceback.

A file is damaged if any of its bits changed. What is read must be what was written, or be refused.
"""

import errno
import json
import math
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from inprocess import Ended, message, snapshot, train_tiny
from lmtrain.checkpoints import manifest, retention, sharded, store
from lmtrain.errors import RunError, UserError
from lmtrain.files import read_jsonl
from lmtrain.run_folder.cut_back import cut_back
from lmtrain.run_folder.folder import RunDir
from support import rows


def content(step: int, score: float) -> dict[str, Any]:
    return {
        "state_dict": {"w": torch.arange(40.0) * step},
        "optimizer_states": [{"state": {0: {"exp_avg": torch.ones(40)}}, "param_groups": []}],
        "global_step": step,
        "metrics": {"val/loss": score, "val/perplexity": math.exp(score), "val/not_a_number": float("nan")},
    }


def in_parts(folder: Path, step: int) -> Path:
    """Writes a checkpoint whose weights two ranks have written, each its part of one file."""
    path, values = folder / store.name_of(step), {"w": torch.arange(40.0)}
    path.mkdir(parents=True)
    layout = sharded.lay_out(values)
    (path / store.MODEL).touch()
    whole = sharded.pieces(values, layout, rank=0)
    parts = [sharded.write_pieces(path / store.MODEL, [piece]) for piece in whole]
    files = {
        store.MODEL: {"bytes": layout.size, "parts": [entry for part in parts for entry in part]},
        "trainer.pt": store.write(path / "trainer.pt", {"global_step": step}),
    }
    manifest.write(path, {"step": step, "metrics": {"val/loss": 1.25}, "interim": False, "files": files})
    return path


def flips(file: Path, every: int = 1) -> Iterator[int]:
    """Flips each `every`-th bit of the file in turn, yields its index, and restores it."""
    data, handle = file.read_bytes(), os.open(file, os.O_RDWR)
    for bit in range(0, 8 * len(data), every):
        os.pwrite(handle, bytes([data[bit // 8] ^ 1 << bit % 8]), bit // 8)
        yield bit
        os.pwrite(handle, data[bit // 8 : bit // 8 + 1], bit // 8)
    os.close(handle)


def assert_every_flip_is_seen(path: Path, file: Path, every: int = 1) -> int:
    """Flips bits of a file of the checkpoint `path`; returns how many changed nothing that is read."""
    good, harmless = manifest.read(path), 0
    for bit in flips(file, every):
        if store.damage(path) is None:
            assert file.name == manifest.NAME, f"bit {bit} of {file.name} was not seen"
            assert repr(manifest.read(path)) == repr(good), f"bit {bit}: another content was accepted"
            harmless += 1
    assert store.damage(path) is None
    return harmless


def test_every_bit_of_a_manifest(tmp_path: Path) -> None:
    store.publish(content(3, 1.5), tmp_path / store.name_of(3))
    path = tmp_path / store.name_of(3)
    bits = 8 * (path / manifest.NAME).stat().st_size
    assert bits > 3000
    # A line end and a space can become each other; no other change may pass.
    assert assert_every_flip_is_seen(path, path / manifest.NAME) < bits / 20


def test_a_flipped_score_never_becomes_the_best(tmp_path: Path) -> None:
    for step, score in ((1, 2.0), (2, 1.0), (3, 3.0)):
        store.publish(content(step, score), tmp_path / store.name_of(step))
    file = tmp_path / store.name_of(3) / manifest.NAME
    for bit in flips(file, every=5):
        found = retention.scores(tmp_path, "val/loss")
        assert found in ([(1, 2.0), (2, 1.0)], [(1, 2.0), (2, 1.0), (3, 3.0)]), f"bit {bit}"


@pytest.mark.parametrize("make", ["whole", "parts"])
def test_bits_of_every_file_of_a_checkpoint(make: str, tmp_path: Path) -> None:
    path = tmp_path / store.name_of(3)
    store.publish(content(3, 1.5), path) if make == "whole" else in_parts(tmp_path, 3)
    names = {p.name for p in path.iterdir()}
    assert len(names) == 3
    for name in names - {manifest.NAME}:
        assert assert_every_flip_is_seen(path, path / name, every=37) == 0
    assert_every_flip_is_seen(path, path / manifest.NAME, every=11)


@pytest.mark.slow
@pytest.mark.parametrize("make", ["whole", "parts"])
def test_every_bit_of_every_file_of_a_checkpoint(make: str, tmp_path: Path) -> None:
    path = tmp_path / store.name_of(3)
    store.publish(content(3, 1.5), path) if make == "whole" else in_parts(tmp_path, 3)
    for file in list(path.iterdir()):
        assert_every_flip_is_seen(path, file)


def without_hash(path: Path, **changed: Any) -> None:
    """Removes the checksum from a checkpoint's manifest and changes values."""
    text = json.loads((path / manifest.NAME).read_text())
    del text["sha256"]
    (path / manifest.NAME).write_text(json.dumps({**text, **changed}, indent=2))


@pytest.mark.parametrize("gone", [(), ("version",), ("version", "scored_on", "tokenizer", "interim")])
def test_a_manifest_of_today_without_its_checksum_is_damage(gone: tuple[str, ...], tmp_path: Path) -> None:
    """If it were accepted as an old manifest, its edited score would choose the best checkpoint."""
    for step in (2, 3):
        saved = {**content(step, 1.5), "fingerprint": {"keys": {"seed": 1}, "contents": {}}}
        store.publish(saved, tmp_path / store.name_of(step))
    path = tmp_path / store.name_of(2)
    without_hash(path, metrics={"val/loss": 0.01})
    text = json.loads((path / manifest.NAME).read_text())
    (path / manifest.NAME).write_text(json.dumps({k: v for k, v in text.items() if k not in gone}))
    assert "checksum" in str(store.damage(path))
    assert retention.scores(tmp_path, "val/loss") == [(3, 1.5)]


def test_a_manifest_of_a_later_version_is_refused(tmp_path: Path) -> None:
    path = tmp_path / store.name_of(3)
    store.publish(content(3, 1.5), path)
    manifest.write(path, {"step": 3, "metrics": {}, "files": {}, "version": 3})
    assert store.damage(path) == "manifest.json is of format version 3, and this lmtrain reads up to 2: update it"


def test_a_pipe_in_a_run_is_refused_and_not_waited_for(tmp_path: Path) -> None:
    path = tmp_path / store.name_of(3)
    store.publish(content(3, 1.5), path)
    (path / manifest.NAME).unlink()
    os.mkfifo(path / manifest.NAME)
    assert store.damage(path) == "manifest.json is not a file in a folder"
    for name in ("summary.json", "metrics.jsonl"):
        os.mkfifo(tmp_path / name)
    with pytest.raises(UserError, match=r"summary.json can't be read: .*not a regular file"):
        RunDir(tmp_path).read_summary()
    with pytest.raises(UserError, match=r"metrics.jsonl can't be read: it is not a regular file"):
        list(read_jsonl(tmp_path / "metrics.jsonl"))
    with pytest.raises(OSError, match="not a regular file"):
        cut_back(tmp_path / "metrics.jsonl", 3, True, pytest.fail)


NO_MANIFEST = [b"", b"\0" * 300, b"\xff\xfe", b"[]", b"3", b"null", b'{"step": 1}', b"[" * 100_000,
               b'{"step": 3, "metrics": {"val/loss": "low"}, "files": {}}',
               b'{"step": 3, "metrics": {}, "files": {"../x": {"bytes": 1, "sha256": ""}}}',
               b'{"step": 3, "metrics": {}, "files": {"model.pt": {"bytes": "many", "sha256": ""}}}',
               b'{"step": 3, "metrics": {}, "files": [], "interim": false}']  # fmt: skip


@pytest.mark.parametrize("text", NO_MANIFEST, ids=range(len(NO_MANIFEST)))
def test_what_is_no_manifest_is_damage(text: bytes, tmp_path: Path) -> None:
    for step in (2, 3):
        store.publish(content(step, 1.5), tmp_path / store.name_of(step))
    (tmp_path / store.name_of(3) / manifest.NAME).write_bytes(text)
    told: list[str] = []
    assert store.newest_complete(tmp_path, told.append) == tmp_path / store.name_of(2)
    assert len(told) == 1
    assert "step_00000003 is damaged (manifest.json " in told[0]
    assert retention.scores(tmp_path, "val/loss") == [(2, 1.5)]


def test_a_checkpoint_under_the_name_of_another_step_is_damage(tmp_path: Path) -> None:
    store.publish(content(2, 1.5), tmp_path / store.name_of(2))
    shutil.copytree(tmp_path / store.name_of(2), tmp_path / store.name_of(9))
    assert store.damage(tmp_path / store.name_of(9)) == "it is the checkpoint of step 2"


def failing(monkeypatch: pytest.MonkeyPatch, broken: Path) -> None:
    """Makes opening this file fail with an I/O error."""
    real = Path.open

    def opens(self: Path, *args: Any, **kwargs: Any) -> Any:
        if self == broken:
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(self))
        return real(self, *args, **kwargs)

    monkeypatch.setattr(Path, "open", opens)


@pytest.mark.parametrize("name", [manifest.NAME, "model.pt", "trainer.pt"])
def test_an_io_error_is_no_damage(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for step in (2, 3):
        store.publish(content(step, 1.5), tmp_path / store.name_of(step))
    failing(monkeypatch, tmp_path / store.name_of(3) / name)
    with pytest.raises(RunError, match=rf"cannot read .*{name}: Input/output error.*not mean that it is damaged"):
        store.newest_complete(tmp_path, pytest.fail)


# Damaged files in a run, read by the command that would continue it.

SETTINGS = ["run.name=kept", "trainer.max_steps=4", "trainer.save_every_n_steps=2", "checkpoint.keep_last=3",
            "checkpoint.keep_best=0", "export.enabled=false"]  # fmt: skip


@pytest.fixture(scope="module")
def four_steps(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("four")
    ended = train_tiny(corpus, *SETTINGS, f"run.root={folder}")
    assert ended.code == 0, ended.err
    (folder / "kept" / "summary.json").unlink()
    return folder / "kept"


@pytest.fixture
def kept(four_steps: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Copies a run of four steps, killed before it ended, into outputs/ of the current folder."""
    monkeypatch.chdir(tmp_path)
    return Path(shutil.copytree(four_steps, tmp_path / "outputs" / "kept", symlinks=True))


def go_on(corpus: Path, *argv: str) -> Ended:
    return train_tiny(corpus, *SETTINGS, *argv)


def harm(checkpoint: Path, name: str = "model.pt") -> None:
    data = bytearray((checkpoint / name).read_bytes())
    data[len(data) // 2] ^= 4
    (checkpoint / name).write_bytes(bytes(data))


def test_all_checkpoints_damaged_is_refused_and_nothing_removed(kept: Path, corpus: Path) -> None:
    older, newer = store.scan(kept / "checkpoints")
    harm(older, manifest.NAME)
    (newer / "trainer.pt").unlink()
    before = snapshot(kept.parent)
    for argv in ([], ["run.resume=auto"], ["trainer.max_steps=6"]):
        ended = go_on(corpus, *argv)
        assert ended.code == 2
        text = message(ended.err)
        for words in ("step_00000002 (manifest.json ", "step_00000004 (trainer.pt is missing)", "Nothing was removed",
                      "another run.name", "run.resume=<folder>"):  # fmt: skip
            assert words in text
        assert snapshot(kept.parent) == before


def test_a_copy_that_lies_elsewhere_continues_a_run_without_whole_checkpoints(
    kept: Path, corpus: Path, tmp_path: Path
) -> None:
    copy = Path(shutil.copytree(kept / "checkpoints" / "step_00000002", tmp_path / "copy" / "step_00000002"))
    for checkpoint in store.scan(kept / "checkpoints"):
        harm(checkpoint)
    ended = go_on(corpus, f"run.resume={copy}")
    assert ended.code == 0, ended.err
    assert [r["step"] for r in rows(kept / "metrics.jsonl") if "train/loss" in r] == [1, 2, 3, 4]
    there = {p.name for p in (kept / "checkpoints").iterdir()}
    assert {"step_00000002.damaged", "step_00000004.damaged", "step_00000004"} <= there
    assert store.damage(kept / "checkpoints" / "last") is None


def test_a_damaged_newest_is_set_aside_and_counts_no_more(kept: Path, corpus: Path) -> None:
    newest = kept / "checkpoints" / "step_00000004"
    harm(newest)
    damaged = snapshot(newest)
    ended = go_on(corpus, "checkpoint.keep_last=1")
    assert ended.code == 0, ended.err
    said = " ".join(ended.out.replace("│", " ").split())
    assert "step_00000004 is damaged (model.pt does not match its checksum); falling back to step_00000002" in said
    assert "the damaged step_00000004 is kept as step_00000004.damaged" in said
    assert snapshot(newest.with_name("step_00000004.damaged")) == damaged
    assert [p.name for p in store.scan(kept / "checkpoints")] == ["step_00000004"]
    assert store.damage(newest) is None


def test_an_unreadable_manifest_neither_counts_for_retention_nor_is_removed(kept: Path, corpus: Path) -> None:
    older = kept / "checkpoints" / "step_00000002"
    harm(older, manifest.NAME)
    damaged = snapshot(older)
    ended = go_on(corpus, "trainer.max_steps=8", "checkpoint.keep_last=2")
    assert ended.code == 0, ended.err
    assert [store.step_of(p) for p in store.scan(kept / "checkpoints")] == [2, 6, 8]
    assert snapshot(older) == damaged


def test_an_io_error_stops_the_command(kept: Path, corpus: Path) -> None:
    """A symbolic link to itself can't be opened, although it exists."""
    broken = kept / "checkpoints" / "step_00000004" / manifest.NAME
    broken.unlink()
    broken.symlink_to(broken)
    names = sorted(p.name for p in kept.rglob("*"))
    ended = go_on(corpus)
    assert ended.code == 1
    assert f"cannot read {broken}" in message(ended.err)
    assert sorted(p.name for p in kept.rglob("*")) == names


def test_a_good_newer_checkpoint_is_never_set_aside(kept: Path, corpus: Path, tmp_path: Path) -> None:
    """This holds even when resuming from another folder's checkpoint, as the run's own later progress would be lost."""
    copy = Path(shutil.copytree(kept / "checkpoints" / "step_00000002", tmp_path / "copy" / "step_00000002"))
    before = snapshot(kept)
    ended = go_on(corpus, f"run.resume={copy}")
    assert ended.code == 2
    assert "has gone on to step_00000004" in message(ended.err)
    assert snapshot(kept) == before


def said_while_going_on(corpus: Path) -> str:
    ended = go_on(corpus, "trainer.max_steps=6")
    assert ended.code == 0, ended.err
    return " ".join(ended.out.replace("│", " ").split())


def trained_steps(run: Path) -> list[int]:
    return [row["step"] for row in rows(run / "metrics.jsonl") if "train/loss" in row]


def test_nothing_is_said_of_whole_logs(kept: Path, corpus: Path) -> None:
    with (kept / "metrics.jsonl").open("a") as file:
        file.write('{"step": 5, "train/lo')  # as a kill leaves it
    said = said_while_going_on(corpus)
    assert "damaged" not in said
    assert "is lost" not in said
    assert trained_steps(kept) == [1, 2, 3, 4, 5, 6]


def test_missing_metrics_are_said(kept: Path, corpus: Path) -> None:
    (kept / "metrics.jsonl").unlink()
    assert "metrics.jsonl is missing up to step 4: what was logged there is lost" in said_while_going_on(corpus)
    assert trained_steps(kept) == [5, 6]
    # The next resume doesn't report it again.
    ended = go_on(corpus, "trainer.max_steps=8")
    assert ended.code == 0, ended.err
    assert "is lost" not in ended.out


def test_truncated_metrics_are_said(kept: Path, corpus: Path) -> None:
    lines = (kept / "metrics.jsonl").read_text().splitlines(keepends=True)
    (kept / "metrics.jsonl").write_text("".join(lines[:3]))
    assert f"metrics.jsonl has 3 of {len(lines)} records up to step 4" in said_while_going_on(corpus)


HARM: dict[str, Callable[[list[bytes]], list[bytes]]] = {
    "garbage": lambda lines: [lines[0], b"\x80\xff garbage\n", *lines[2:]],
    "zeros": lambda lines: [*lines[:-1], b"\0" * len(lines[-1])],
    "no object": lambda lines: [lines[0], b"[1, 2]\n", *lines[2:]],
    "no step": lambda lines: [lines[0], b'{"step": null}\n', *lines[2:]],
    "joined": lambda lines: [lines[0].strip() + lines[1], *lines[2:]],
    "out of order": lambda lines: [lines[0], b'{"step": 99}\n', *lines[2:]],
}


@pytest.mark.parametrize("what", HARM)
def test_lines_that_cannot_be_read_are_said_and_kept_beside(what: str, kept: Path, corpus: Path) -> None:
    lines = (kept / "metrics.jsonl").read_bytes().splitlines(keepends=True)
    harmed = b"".join(HARM[what](lines))
    (kept / "metrics.jsonl").write_bytes(harmed)
    if what not in ("out of order", "zeros", "no step"):
        with pytest.raises(UserError, match=r"metrics\.jsonl, line \d+ can't be read"):
            list(read_jsonl(kept / "metrics.jsonl"))
    told: list[str] = []
    left = cut_back(kept / "metrics.jsonl", 4, True, told.append)
    assert len(told) == 1
    assert "metrics.jsonl is damaged: line " in told[0]
    assert (kept / "metrics.jsonl.damaged").read_bytes() == harmed
    repaired = (kept / "metrics.jsonl").read_bytes().splitlines(keepends=True)
    assert [line for line in lines if line in repaired] == repaired, "what could be read stays as it was"
    assert len(repaired) == left >= len(lines) - 2


def test_a_run_with_damaged_metrics_goes_on(kept: Path, corpus: Path) -> None:
    lines = (kept / "metrics.jsonl").read_bytes().splitlines(keepends=True)
    (kept / "metrics.jsonl").write_bytes(b"".join(HARM["garbage"](lines)))
    said = said_while_going_on(corpus)
    assert "metrics.jsonl is damaged: line 2 can't be read" in said
    assert f"has {len(lines) - 1} of {len(lines)} records" in said
    assert trained_steps(kept)[-2:] == [5, 6]


def only_says(what: str, call: Callable[[], Any]) -> None:
    """Asserts that the call succeeds, or raises the one error that names the file."""
    try:
        call()
    except UserError as error:
        if what not in str(error):
            raise


@pytest.mark.parametrize("every", [23, pytest.param(1, marks=pytest.mark.slow)])
def test_bits_of_the_logs_and_of_the_summary(every: int, tmp_path: Path) -> None:
    """Any flipped bit gives one message or none, and untouched rows stay."""
    log, lines = tmp_path / "metrics.jsonl", [json.dumps({"step": n, "train/loss": 1.5}) + "\n" for n in range(1, 9)]
    whole = "".join(lines).encode()
    for bit in range(0, 8 * len(whole), every):
        changed = bytearray(whole)
        changed[bit // 8] ^= 1 << bit % 8
        log.write_bytes(changed)
        only_says("metrics.jsonl, line ", lambda: list(read_jsonl(log)))
        cut_back(log, 6, True, lambda _: None)
        touched = whole[: bit // 8].count(b"\n")
        untouched = set(lines[:6]) - {lines[touched], lines[min(touched + 1, 7)]}  # a lost line end joins two lines
        assert untouched <= set(log.read_text().splitlines(keepends=True)), f"bit {bit}"
        log.with_name("metrics.jsonl.damaged").unlink(missing_ok=True)
    run = RunDir(tmp_path)
    run.write_summary({"status": "finished", "asked": {"max_steps": 4}, "best_metric": {"val/loss": 1.5}})
    for _ in flips(run.summary, every):
        only_says("summary.json can't be read", lambda: run.read_summary()["status"].upper())


@pytest.mark.parametrize("text", [b"", b"\0\0", b"[]", b"\xff", b'{"step": 3}', b'{"status": 3}'])
def test_a_summary_that_cannot_be_read_changes_nothing(text: bytes, kept: Path, corpus: Path) -> None:
    (kept / "summary.json").write_bytes(text)
    before = snapshot(kept)
    ended = go_on(corpus)
    assert ended.code == 2
    assert f"{kept}/summary.json can't be read" in message(ended.err)
    assert "Move it away" in ended.err
    assert snapshot(kept) == before
