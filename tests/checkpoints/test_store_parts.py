"""The parts of the checkpoint store: every kind of damage by its words, ranks that share the checks, and the links."""

import errno
import hashlib
import json
import math
import os
import signal
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from lmtrain.checkpoints import checksums, manifest, retention, sharded, store
from lmtrain.checkpoints.checkpoint_io import FolderCheckpointIO, HostCopies
from lmtrain.errors import RunError, UserError


def saved(folder: Path, step: int = 5, **more: Any) -> Path:
    path = folder / store.name_of(step)
    content = {"state_dict": {"w": torch.full((3,), float(step))}, "optimizer_states": [], "global_step": step,
               "callbacks": {}, "fingerprint": {}}  # fmt: skip
    FolderCheckpointIO().save_checkpoint({**content, **more}, path)
    return path


def change(path: Path, **changes: Any) -> None:
    """Writes other values into a manifest, with the hash that belongs to them; None removes a key."""
    content = json.loads((path / manifest.NAME).read_text())
    del content["sha256"]
    content = {key: value for key, value in {**content, **changes}.items() if value is not None}
    digest = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
    (path / manifest.NAME).write_text(json.dumps({**content, "sha256": digest}))


@pytest.mark.parametrize(("changes", "words"), [
    ({}, None),
    ({"version": 1}, None),
    ({"version": None}, None),
    ({"metrics": {"a": None, "b": 1, "c": 1.5}}, None),
    ({"interim": True}, None),
    ({"version": 3}, "is of format version 3, and this lmtrain reads up to 2"),
    ({"version": "2"}, "is of format version 2, and this lmtrain reads up to 2"),
    ({"step": None, "files": None}, "lacks files, step"),
    ({"step": 5.0}, "holds a step or an interim flag of the wrong type"),
    ({"step": True}, "holds a step or an interim flag of the wrong type"),
    ({"interim": 1}, "holds a step or an interim flag of the wrong type"),
    ({"metrics": [1]}, "holds scores that are not numbers"),
    ({"metrics": {"a": "1"}}, "holds scores that are not numbers"),
    ({"files": [1]}, "holds an entry that describes no file"),
    ({"files": {"../model.pt": {"bytes": 3, "sha256": "a"}}}, "holds an entry that describes no file"),
    ({"step": 6}, "it is the checkpoint of step 6"),
])  # fmt: skip
def test_a_manifest_that_matches_its_hash_is_checked_for_sense(
    changes: dict[str, Any], words: str | None, tmp_path: Path
) -> None:
    path = saved(tmp_path)
    change(path, **changes)
    found = store.damage(path)
    assert (found is None) if words is None else (words in str(found))


@pytest.mark.parametrize(("text", "words"), [
    ("[1]", "is not a JSON object"), ("{}", "has lost its checksum"), ("{", "can't be read: Expecting"),
    ('{"step": 1, "sha256": "a"}', "does not match its own checksum"), ("[" * 100_000, "can't be read"),
])  # fmt: skip
def test_a_manifest_of_other_content_is_damage(text: str, words: str, tmp_path: Path) -> None:
    path = saved(tmp_path)
    (path / manifest.NAME).write_text(text)
    with pytest.raises(manifest.Damaged, match=r"the checkpoint .*step_00000005 is damaged \(manifest.json ") as error:
        manifest.read(path)
    assert words in error.value.what
    assert store.damage(path) == error.value.what


def test_damage_of_files_is_described(tmp_path: Path) -> None:
    path, file = saved(tmp_path), tmp_path / "step_00000005" / "model.pt"
    whole = file.read_bytes()
    file.write_bytes(whole[:-1])
    assert store.damage(path) == f"model.pt has {len(whole) - 1} bytes instead of {len(whole)}"
    file.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    assert store.damage(path) == "model.pt does not match its checksum"
    compared: list[Any] = []
    assert store.damage(path, lambda parts: compared.extend(parts)) is None
    assert sorted((p.file.name, p.offset, p.bytes) for p in compared) == [
        ("model.pt", 0, len(whole)), ("trainer.pt", 0, (path / "trainer.pt").stat().st_size)
    ]  # fmt: skip
    file.unlink()
    assert store.damage(path) == "model.pt is missing"
    file.mkdir()
    assert store.damage(path) == "model.pt is not a file"
    (path / manifest.NAME).unlink()
    assert store.damage(path) == "manifest.json is missing"
    (path / manifest.NAME).mkdir()
    assert store.damage(path) == "manifest.json is not a file in a folder"
    moved = tmp_path / "elsewhere"
    saved(tmp_path, 7).rename(moved)
    assert store.damage(moved) is None, "a folder of another name may have any step"


def test_a_part_that_is_wrong_is_named_by_its_place(tmp_path: Path) -> None:
    file = tmp_path / "a"
    file.write_bytes(b"abcdef")
    digests = [hashlib.sha256(part).hexdigest() for part in (b"abc", b"def")]
    parts = [{"offset": 3 * i, "bytes": 3, "sha256": digest} for i, digest in enumerate(digests)]
    entry = {file: {"bytes": 6, "parts": parts}}
    assert store._wrong_content(entry, checksums.first_wrong) is None
    assert store._wrong_size(file, entry[file]) is None
    file.write_bytes(b"abcdeX")
    assert store._wrong_content(entry, checksums.first_wrong) == "a does not match its checksum at byte 3"
    assert store._wrong_size(file, {"bytes": 6, "parts": parts[:1]}) == "a has 6 bytes instead of 3"
    assert store._wrong_size(file, {"bytes": 6, "parts": parts[1:]}) == "a has a gap at byte 0"
    assert checksums.gap(file, parts[::-1]) is None, "in any order"
    assert checksums.sha256(file, 2, 2) == hashlib.sha256(b"cd").hexdigest()
    assert checksums.sha256(file, 4, 99) == hashlib.sha256(b"eX").hexdigest()


def unreadable(path: Path, *_: Any, **__: Any) -> Any:
    raise OSError(errno.EIO, "Input/output error", str(path))


def test_a_disk_that_fails_is_no_damage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = saved(tmp_path)
    with monkeypatch.context() as patched:
        patched.setattr(store, "_wrong_content", lambda files, compare: unreadable(path / "model.pt"))
        with pytest.raises(RunError, match=r"cannot read .*model\.pt: .*nothing was"):
            store.damage(path)
    with monkeypatch.context() as patched:
        patched.setattr(manifest, "read_regular", unreadable)
        with pytest.raises(RunError, match=r"cannot read .*manifest\.json") as error:
            store.damage(path)
    assert not isinstance(error.value, manifest.Damaged)
    with monkeypatch.context() as patched:
        patched.setattr(Path, "iterdir", unreadable)
        with pytest.raises(RunError, match="cannot read"):
            store.scan(tmp_path)
    assert store.scan(tmp_path / "none") == []
    assert store.scan(path / "model.pt") == []
    with monkeypatch.context() as patched:
        patched.setattr(os, "rename", unreadable)
        with pytest.raises(RunError, match="cannot rename the damaged checkpoint"):
            store.set_aside(path)


def test_checkpoints_are_found_by_name_and_leftovers_removed(tmp_path: Path) -> None:
    made = [saved(tmp_path, step) for step in (100_000_000, 12, 3)]
    (tmp_path / "last").symlink_to(made[0])
    (tmp_path / "step_00000001").symlink_to(made[0])
    for name in ("step_00000004.tmp7", "step_00000005.damaged", "other"):
        (tmp_path / name).mkdir()
    (tmp_path / "best.link.tmp1").write_text("")
    (tmp_path / "link.tmp2").symlink_to(made[0])
    assert store.scan(tmp_path) == made[::-1]
    store.sweep(tmp_path)
    left = {"step_00000005.damaged", "other", "last", "step_00000001"} | {path.name for path in made}
    assert {path.name for path in tmp_path.iterdir()} == left
    assert store.damage(made[0]) is None, "what a link points to is kept"


def test_the_newest_undamaged_checkpoint_is_taken(tmp_path: Path) -> None:
    assert store.newest_complete(tmp_path) is None
    paths, told = [saved(tmp_path, step) for step in (1, 2, 3)], list[str]()
    assert store.newest_complete(tmp_path, told.append) == paths[2]
    assert told == []
    for path in paths[1:]:
        (path / "model.pt").unlink()
    assert store.newest_complete(tmp_path, told.append) == paths[0]
    missing = "is damaged (model.pt is missing); falling back to step_00000001"
    assert told == [f"checkpoint step_00000003 {missing}", f"checkpoint step_00000002 {missing}"]
    (paths[0] / "model.pt").unlink()
    with pytest.raises(UserError, match=r"all are damaged: step_00000003 \(model.pt is missing\), step_00000002"):
        store.newest_complete(tmp_path, told.append)
    kept = store.set_aside(paths[0])
    assert kept.name == "step_00000001.damaged"
    assert not paths[0].exists()


def test_a_checkpoint_of_a_step_is_written_once_and_replaces_a_damaged_one(tmp_path: Path) -> None:
    path = saved(tmp_path, 5, tokenizer={"a": "b"}, scored_on="rows", interim=True, metrics={"x": 1.0})
    assert manifest.read(path) == {
        "step": 5, "metrics": {"x": 1.0}, "interim": True, "scored_on": "rows", "tokenizer": {"a": "b"},
        "files": manifest.read(path)["files"],
    }  # fmt: skip
    before = (path / "model.pt").stat().st_mtime_ns
    saved(tmp_path, 5)
    assert (path / "model.pt").stat().st_mtime_ns == before
    (path / "model.pt").write_bytes(b"")
    saved(tmp_path, 5)
    assert store.damage(path) is None
    assert (tmp_path / "step_00000005.damaged").is_dir()
    assert manifest.read(path).keys() == {"step", "metrics", "interim", "files"}
    FolderCheckpointIO().remove_checkpoint(path)
    assert [p.name for p in tmp_path.iterdir()] == ["step_00000005.damaged"]
    (tmp_path / f"step_00000006.tmp{os.getpid()}").mkdir()  # of a process of this number that was killed
    assert store.damage(saved(tmp_path, 6)) is None
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step_00000005.damaged", "step_00000006"]


def test_a_name_is_on_the_disk_before_it_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The folder's entries are synced before it gets its name, and the name after that."""
    done, rename = list[str](), os.rename
    monkeypatch.setattr(store, "fsync", lambda path: done.append(f"sync {path.name}"))
    monkeypatch.setattr(os, "rename", lambda old, new: done.append(f"rename to {new.name}") or rename(old, new))
    saved(tmp_path)
    here = [f"sync step_00000005.tmp{os.getpid()}", "rename to step_00000005", f"sync {tmp_path.name}"]
    assert done == here
    text = (tmp_path / "step_00000005" / manifest.NAME).read_text()
    assert text == json.dumps(json.loads(text), indent=2), "to be read"


@pytest.mark.parametrize(
    "error", [OSError(errno.ENOSPC, "No space left on device"), RuntimeError("write"), RunError("x")]
)
def test_a_failed_write_says_what_to_do_and_leaves_nothing(error: Exception, tmp_path: Path) -> None:
    temporary = tmp_path / "a.tmp"
    temporary.mkdir()
    words = r"cannot write the checkpoint .*/a: .*checkpoint\.keep_last lower"
    with pytest.raises(RunError, match=words), store.explained(tmp_path / "a", temporary):
        raise error
    assert not temporary.exists()
    temporary.mkdir()
    with pytest.raises(RunError), store.explained(tmp_path / "a", None):
        raise error
    assert temporary.exists(), "another rank's"
    with pytest.raises(RuntimeError, match=r"^DataLoader worker"), store.explained(tmp_path / "a", temporary):
        raise RuntimeError("DataLoader worker (pid 7) is killed")


def test_only_plain_files_of_lmtrain_are_loaded(tmp_path: Path) -> None:
    path = saved(tmp_path)
    assert store.load_trainer_state(path)["global_step"] == 5
    assert store.load_weights(path)["w"].tolist() == [5.0] * 3
    torch.save({1: torch.ones(1)}, path / "model.pt")
    with pytest.raises(UserError, match=r"it has 1 for a parameter's name"):
        store.load_weights(path)
    torch.save([1], path / "model.pt")
    with pytest.raises(UserError, match="it holds a list"):
        store.load_weights(path)
    for content in (b"", b"no zip at all"):
        (path / "model.pt").write_bytes(content)
        with pytest.raises(UserError, match=r"model\.pt is not a tensor file written by lmtrain"):
            store.load_weights(path)
    for lacks in ("callbacks", "fingerprint"):
        torch.save({key: {} for key in ("callbacks", "fingerprint") if key != lacks}, path / "trainer.pt")
        with pytest.raises(UserError, match="not written by lmtrain as part of a checkpoint"):
            store.load_trainer_state(path)


def test_tensors_of_ranks_are_put_where_they_belong(tmp_path: Path) -> None:
    path = saved(tmp_path, 5, optimizer_states=[{"state": {}}, {"state": {0: {"kind": "x"}}}])
    save_file({"a": torch.ones(2)}, path / store.MODEL, {store.SAME: '{"b": "a"}'})
    save_file({"1.0.exp_avg": torch.zeros(1), "1.2.a.b": torch.ones(1)}, path / store.OPTIMIZER)
    found = store.load(path)
    assert found["state_dict"].keys() == {"a", "b"}
    assert found["optimizer_states"][0]["state"] == {}
    state = found["optimizer_states"][1]["state"]
    assert (state[0]["kind"], state[0]["exp_avg"].tolist(), state[2]["a.b"].tolist()) == ("x", [0.0], [1.0])


def test_a_file_is_hashed_and_synced_while_it_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[int] = []
    monkeypatch.setattr(store, "_SMALL", 4)
    monkeypatch.setattr(store, "_SYNC_BYTES", 10)
    monkeypatch.setattr(os, "fsync", lambda number: synced.append((tmp_path / "a").stat().st_size))
    parts = [b"abc", b"abcdefgh", b"ijklmnop", b"xy"]
    with (tmp_path / "a").open("wb", buffering=0) as handle:
        with store.HashedFile(handle) as file:
            for part in parts:
                assert file.write(memoryview(part)) == len(part)
                while not file._syncing.done():
                    pass
        assert file.digest.hexdigest() == hashlib.sha256(b"".join(parts)).hexdigest()
    assert synced == [19, 21], "once more than 10 bytes of large parts were written, and at the end"
    with pytest.raises(KeyError), (tmp_path / "a").open("wb") as handle, store.HashedFile(handle) as file:
        raise KeyError
    assert len(synced) == 2, "nothing is synced that has failed"


def test_a_signal_of_a_dead_child_waits_for_the_end_of_a_write(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[int] = []
    before = signal.signal(signal.SIGCHLD, lambda number, frame: told.append(number))
    try:
        with store._sigchld_waits():
            os.kill(os.getpid(), signal.SIGCHLD)
            assert told == []
        assert told == [signal.SIGCHLD]
        with store._sigchld_waits():
            pass
        assert len(told) == 1
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        with store._sigchld_waits():
            assert signal.getsignal(signal.SIGCHLD) is signal.SIG_DFL
    finally:
        signal.signal(signal.SIGCHLD, before)

    def elsewhere() -> None:
        with store._sigchld_waits():
            told.append(0)

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    assert told[-1] == 0


def test_host_copies_are_made_once_per_tensor_and_used_again() -> None:
    copies = HostCopies()
    tied, other = torch.ones(2, 3), torch.zeros(2, 3)
    tree = {"a": tied, "b": tied, "c": [other, tied.T, torch.ones(2, 3, dtype=torch.int32)], "d": "plain"}
    first = copies.take(tree)
    assert first["a"] is first["b"]
    assert first["a"] is not tied
    assert torch.equal(first["c"][1], tied.T)
    assert (first["c"][2].dtype, first["d"]) == (torch.int32, "plain")
    other.fill_(7)
    assert first["c"][0].sum() == 0
    second = copies.take(tree)
    assert second["a"].data_ptr() == first["a"].data_ptr()
    assert second["c"][0].sum() == 42
    assert len(copies._buffers) == 4


@pytest.mark.parametrize("background", [False, True])
def test_a_failed_save_is_told_at_the_next(background: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    io, published = FolderCheckpointIO(background), list[int]()
    io.published = lambda: published.append(1)
    io.save_together(lambda take: None)
    taken: list[bool] = []
    io.save_together(lambda take: taken.append(take is not None) or (lambda: False))
    io.wait()
    assert (taken, published) == ([background], [])
    io.save_together(lambda take: lambda: True)
    io.wait()
    assert published == [1]

    def fails() -> bool:
        raise RunError("full")

    def saved_and_ended() -> None:
        io.save_together(lambda take: fails)
        io.teardown()

    with pytest.raises(RunError, match="full"):
        saved_and_ended()
    io.wait()


def test_ranks_share_the_checks_and_the_first_reads_what_another_cannot(monkeypatch: pytest.MonkeyPatch) -> None:
    parts = [checksums.CheckedPart(Path(f"/none/{i}"), 0, 1, "a") for i in range(5)]
    monkeypatch.setattr(checksums.world, "rank", lambda: 1)
    monkeypatch.setattr(checksums.world, "size", lambda: 2)
    assert checksums._of_this_rank(parts) == (None, [parts[1], parts[3]])
    with monkeypatch.context() as patched:
        patched.setattr(checksums, "first_wrong", lambda some: some[0])
        assert checksums._of_this_rank(parts) == (parts[1], [])
    sent: list[Any] = []
    answers = iter([[parts[:2]], None, [[parts[2]]], None, [None], None])

    def gathered(what: Any) -> Any:
        sent.append(what)
        return next(answers)

    monkeypatch.setattr(checksums.world, "gathered", gathered)
    monkeypatch.setattr(checksums.world, "from_first", lambda work: "of the first")
    assert checksums.helped_by_ranks(lambda compare: None) == "of the first"
    assert sent == [None, (None, [parts[1]]), None, (None, []), None], "until there are no more parts"


def test_the_first_rank_takes_the_first_wrong_part_of_any(monkeypatch: pytest.MonkeyPatch) -> None:
    parts = [checksums.CheckedPart(Path(f"/none/{i}"), 0, 1, "a") for i in range(4)]
    own: Any = (None, [])
    theirs: Any = (parts[3], [])
    monkeypatch.setattr(checksums, "_of_this_rank", lambda some: own)
    monkeypatch.setattr(checksums.world, "gathered", lambda what: [own, theirs])
    read: list[Any] = []
    monkeypatch.setattr(checksums, "first_wrong", lambda some: read.append(list(some)))
    assert checksums._shared(parts) == parts[3]
    assert read == []
    own, theirs = (None, [parts[0]]), (None, [parts[1]])
    assert checksums._shared(parts) is None
    assert read == [[parts[0], parts[1]]]
    seen: list[Any] = []
    monkeypatch.setattr(checksums.world, "gathered", lambda what: seen.append(what) or [what])
    monkeypatch.setattr(checksums.world, "from_first", lambda work: work())
    assert checksums.helped_by_ranks(lambda compare: compare is checksums._shared) is True
    assert seen == [None], "the others stop waiting"


# Retention


@pytest.mark.parametrize(("last", "best", "every", "mode", "kept"), [
    (1, 0, None, "min", {6}), (2, 0, None, "min", {5, 6}), (0, 0, None, "min", set()),
    (9, 0, None, "min", {1, 2, 3, 4, 5, 6}),
    (0, 1, None, "min", {2}), (0, 2, None, "min", {2, 4}), (0, 1, None, "max", {1}), (0, 2, None, "max", {1, 3}),
    (0, 1, None, "last", {5}), (0, 2, None, "last", {4, 5}), (1, 1, 3, "min", {2, 3, 6}), (0, 0, 2, "min", {2, 4, 6}),
])  # fmt: skip
def test_which_checkpoints_are_kept(last: int, best: int, every: int | None, mode: str, kept: set[int]) -> None:
    scores = [(1, 9.0), (2, 1.0), (3, 9.0), (4, 1.0), (5, 3.0), (6, None)]
    assert retention.to_keep(scores, last, best, every, mode) == kept
    assert retention.to_keep(scores[::-1], last, best, every, mode) == kept
    assert retention.best_of([*scores, (7, math.nan), (8, math.inf)], mode) == {"min": 2, "max": 1, "last": 5}[mode]


def test_scores_are_those_of_the_same_rows(tmp_path: Path) -> None:
    for step, metrics, on, interim in ((1, {"x": 1.0}, None, False), (2, {"x": 2.0}, "a", False),
                                       (3, {"x": 3.0}, "b", False), (4, {"x": 4.0}, "a", True), (5, {}, "b", False),
                                       (6, {"y": 1.0}, "b", False)):  # fmt: skip
        saved(tmp_path, step, metrics=metrics, scored_on=on, interim=interim)
    assert retention.scores(tmp_path, "x", "a") == [(1, 1.0), (2, 2.0), (3, None), (5, None), (6, None)]
    assert retention.scores(tmp_path, "x") == [(1, 1.0), (2, 2.0), (3, 3.0), (5, None), (6, None)]
    assert retention.scored_on_others(tmp_path, "a") == {"b": [3, 6]}
    assert retention.scored_on_others(tmp_path, "c") == {"a": [2, 4], "b": [3, 6]}
    assert retention.scored_on_others(tmp_path, None) == {}
    (tmp_path / store.name_of(3) / manifest.NAME).write_text("{")
    assert [store.step_of(path) for path in retention.manifests(tmp_path)] == [1, 2, 4, 5, 6]


def test_a_link_is_replaced_and_a_file_system_without_links_is_none_worse(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, two = saved(tmp_path, 1), saved(tmp_path, 2)
    retention.link(tmp_path, "last", one)
    retention.link(tmp_path, "last", two)
    assert os.readlink(tmp_path / "last") == two.name
    assert one.is_dir()
    with monkeypatch.context() as patched:
        patched.setattr(os, "replace", unreadable)
        retention.link(tmp_path, "last", one)
    with monkeypatch.context() as patched:
        patched.setattr(os, "symlink", unreadable)
        retention.link(tmp_path, "best", one)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["last", one.name, two.name]
    (tmp_path / f"last.link.tmp{os.getpid()}").symlink_to(two)  # of a process of this number that was killed
    retention.link(tmp_path, "last", one)
    assert os.readlink(tmp_path / "last") == one.name
    assert sorted(p.name for p in tmp_path.iterdir()) == ["last", one.name, two.name]


# Files that ranks write together


def test_notes_of_ranks_are_gathered_and_an_error_is_told(tmp_path: Path) -> None:
    for rank in range(2):
        sharded._note(tmp_path, rank).write_text(json.dumps({"a": [rank]}))
    assert sharded._gather(tmp_path, 2) == [{"a": [0]}, {"a": [1]}]
    assert not list(tmp_path.iterdir())
    sharded._note(tmp_path, 0).write_text(json.dumps({"error": "full"}))
    with pytest.raises(RunError, match="rank 0: full"):
        sharded._gather(tmp_path, 1)


def test_a_late_note_is_waited_for(tmp_path: Path) -> None:
    timer = threading.Timer(0.1, lambda: sharded.write_atomic(sharded._note(tmp_path, 0), "{}"))
    timer.start()
    assert sharded._gather(tmp_path, 1) == [{}]
    timer.join()


def test_the_layout_puts_wide_dtypes_first_and_aligns_the_header() -> None:
    tied = torch.zeros(2, 2)
    layout = sharded.lay_out({"b": torch.zeros(3, dtype=torch.bool), "a": tied, "t": tied, "l": torch.zeros(1).long()})
    length = int.from_bytes(layout.header[:8], "little")
    assert len(layout.header) == 8 + length
    assert length % 8 == 0
    header = json.loads(layout.header[8:])
    assert {name: entry["data_offsets"] for name, entry in header.items() if name != "__metadata__"} == {
        "l": [0, 8], "a": [8, 24], "b": [24, 27]
    }  # fmt: skip
    assert header["__metadata__"] == {"format": "pt", store.SAME: '{"t": "a"}'}
    assert layout.offsets == {"l": len(layout.header), "a": len(layout.header) + 8, "b": len(layout.header) + 24}
    assert layout.size == len(layout.header) + 27
    assert (header["a"]["dtype"], header["b"]["dtype"], header["a"]["shape"]) == ("F32", "BOOL", [2, 2])


def test_states_are_cut_into_plain_values_and_tensors() -> None:
    tensor = torch.ones(1)
    plain, tensors = sharded._without_tensors(
        [
            {"state": {}, "param_groups": []},
            {"state": {3: {"step": tensor, "kind": "x"}}, "param_groups": [1]},
        ]
    )
    assert plain == [{"state": {}, "param_groups": []}, {"state": {3: {"kind": "x"}}, "param_groups": [1]}]
    assert list(tensors) == ["1.3.step"]
    assert tensors["1.3.step"] is tensor
