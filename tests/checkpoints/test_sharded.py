"""The safetensors file that ranks write together can be read by any safetensors reader."""

import datetime
import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from lmtrain.checkpoints import checksums, sharded, store
from lmtrain.checkpoints.checkpoint_io import FolderCheckpointIO
from lmtrain.distributed import process_group as world
from lmtrain.errors import RunError, UserError


@pytest.fixture
def tensors() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    weight = torch.randn(5, 3)
    return {
        "flags": torch.tensor([True, False, True]),
        "weight": weight,
        "tied": weight,
        "half": torch.randn(3, 1, 2).bfloat16(),
        "step": torch.tensor(7.0),
        "count": torch.tensor([2**40, -1]),
        "transposed": torch.randn(4, 6).T,
        "empty": torch.zeros(0, 4),
    }


def written(file: Path, tensors: dict[str, torch.Tensor]) -> list[dict]:
    layout = sharded.lay_out(tensors)
    file.touch()
    assert sharded.pieces(tensors, layout, rank=1) == []
    return sharded.write_pieces(file, sharded.pieces(tensors, layout, rank=0))


def test_what_is_written_is_read(tensors: dict[str, torch.Tensor], tmp_path: Path) -> None:
    file = tmp_path / "a.safetensors"
    ranges = written(file, tensors)
    assert checksums.gap(file, ranges) is None
    found, by_the_library = store.read_tensors(file), load_file(file)
    assert found.keys() == tensors.keys()
    assert by_the_library.keys() == tensors.keys() - {"tied"}
    assert found["tied"] is found["weight"]
    for name, tensor in tensors.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor), name
        assert torch.equal(by_the_library.get(name, by_the_library["weight"]), tensor), name


def test_damage_is_seen(tensors: dict[str, torch.Tensor], tmp_path: Path) -> None:
    file = tmp_path / "a.safetensors"
    ranges = written(file, tensors)
    assert "gap" in str(checksums.gap(file, [r for r in ranges if r["offset"] != 0]))
    assert "instead of" in str(checksums.gap(file, sorted(ranges, key=lambda r: r["offset"])[:-1]))
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    changed = [r for r in ranges if checksums.sha256(file, r["offset"], r["bytes"]) != r["sha256"]]
    assert len(changed) == 1


def test_a_rank_that_is_late_is_waited_for_as_long_as_the_config_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(world, "_patience", datetime.timedelta(seconds=0.2))
    with pytest.raises(RunError, match=r"rank 0 has not written .* within 0.2 s: .*trainer.rank_timeout"):
        sharded._gather(tmp_path, ranks=1)


def in_each_rank(ranks: int, make: Callable[[int], list[sharded.FilePiece]]) -> list[list[sharded.FilePiece]]:
    """Calls `make` once as each of several ranks, whose collectives do nothing."""
    found = []
    # torch remembers results of operations with the mesh of whom it was asked for first, here another rank.
    place = lambda mesh: tuple((mesh.mesh == dist.get_rank()).nonzero()[0].tolist())  # noqa: E731
    with mock.patch.object(DeviceMesh, "get_coordinate", place):
        for rank in range(ranks):
            dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=ranks)
            try:
                found.append(make(rank))
            finally:
                dist.destroy_process_group()
    return found


@pytest.mark.parametrize("rows", [8, 5, 2, 1])
@pytest.mark.parametrize(("shape", "first"), [((4,), "rows"), ((2, 2), "rows"), ((2, 2), "copies"), ((1, 4), "copies")])
def test_ranks_write_each_row_once(rows: int, shape: tuple[int, ...], first: str, tmp_path: Path) -> None:
    """Rows cut as torch.chunk cuts them by one mesh dimension, or by two, or copied along the first of two (HSDP)."""
    whole = torch.arange(rows * 3.0).reshape(rows, 3)
    tensors = {"first": torch.ones(2), "whole": whole}
    layout = sharded.lay_out(tensors)

    def pieces(rank: int) -> list[sharded.FilePiece]:
        mesh = init_device_mesh("cpu", shape)
        at, local = mesh.get_coordinate(), whole
        copied = first == "copies"
        for dim, index in enumerate(at):
            if not (copied and dim == 0):
                begin, number = sharded._cut(len(local), shape[dim], index)
                local = local[begin : begin + number]
        placements = [Replicate() if copied and dim == 0 else Shard(0) for dim in range(len(shape))]
        part = DTensor.from_local(local, mesh, placements, run_check=False, shape=whole.shape, stride=whole.stride())
        return sharded.pieces({"first": tensors["first"], "whole": part}, layout, rank)

    file = tmp_path / "a.safetensors"
    file.touch()
    written = [sharded.write_pieces(file, some) for some in in_each_rank(4, pieces)]
    assert checksums.gap(file, [part for some in written for part in some]) is None, "nothing is written twice"
    assert sum(part["bytes"] for some in written for part in some) == layout.size
    found = load_file(file)
    assert torch.equal(found["whole"], whole)
    assert torch.equal(found["first"], tensors["first"])


@pytest.mark.parametrize(("rows", "parts"), [(8, 4), (5, 4), (5, 2), (2, 4), (0, 2), (7, 7)])
def test_rows_are_cut_as_torch_does(rows: int, parts: int) -> None:
    chunks = [chunk.tolist() for chunk in torch.arange(rows).chunk(parts)]
    cuts = [sharded._cut(rows, parts, index) for index in range(parts)]
    found = [list(range(begin, begin + number)) for begin, number in cuts]
    assert [chunk for chunk in found if chunk] == [chunk for chunk in chunks if chunk]


def a_checkpoint(step: int) -> dict[str, Any]:
    state = {
        0: {"exp_avg": torch.ones(3, 2), "step": torch.tensor(4.0), "kind": "plain"},
        1: {"exp_avg": torch.zeros(5)},
    }
    groups = [{"lr": 0.1, "params": [0, 1]}]
    return {
        "state_dict": {"w": torch.full((3, 2), float(step)), "b": torch.arange(5)},
        "optimizer_states": [{"state": state, "param_groups": groups}, {"state": {}, "param_groups": []}],
        "global_step": step,
        "metrics": {"val/loss": 1.5},
    }


def same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    return len(a) == len(b) and all(map(same, a, b)) if isinstance(a, list) else a == b


def test_a_checkpoint_written_in_parts_is_read_as_it_was(tmp_path: Path) -> None:
    path, io, told = tmp_path / store.name_of(7), FolderCheckpointIO(), []
    io.published = lambda: told.append(path.exists())
    for content in (a_checkpoint(7), a_checkpoint(8)):  # a good checkpoint is not written again
        io.save_together(lambda take, content=content: sharded.prepare(content, path, take))
    assert told == [True]
    assert store.damage(path) is None
    assert same(store.load(path), a_checkpoint(7))
    assert [p.name for p in tmp_path.iterdir()] == [path.name]
    assert not list(path.glob("rank_*")), "the ranks' notes are gone"
    (path / store.OPTIMIZER).write_bytes(b"damaged")
    io.save_together(lambda take: sharded.prepare(a_checkpoint(7), path, take))
    assert store.damage(path) is None
    assert same(store.load(path), a_checkpoint(7))
    assert told == [True, True]


def test_another_rank_writes_its_note_and_publishes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, temporary = tmp_path / store.name_of(7), tmp_path / f"{store.name_of(7)}.tmp"
    sharded.prepare(a_checkpoint(7), path, None)  # creates the files
    monkeypatch.setattr(world, "rank", lambda: 1)
    monkeypatch.setattr(world, "from_first", lambda _: True)
    job = sharded.prepare(a_checkpoint(7), path, None)
    assert job is not None
    assert job() is False
    assert json.loads((temporary / "rank_1.json").read_text()) == {store.MODEL: [], store.OPTIMIZER: []}
    assert not path.exists()
    (temporary / store.MODEL).unlink()
    with pytest.raises(RunError):
        job()
    assert "error" in json.loads((temporary / "rank_1.json").read_text()), "rank 0 is told"
    (temporary / "rank_0.json").write_text("{}")
    with pytest.raises(RunError, match="rank 1: "):
        sharded._gather(temporary, ranks=2)


def test_copies_are_written_while_training_goes_on(tmp_path: Path) -> None:
    """In the background, what is saved are the values of the call, whatever a later step does to the tensors."""
    path, io, content = tmp_path / store.name_of(7), FolderCheckpointIO(background=True), a_checkpoint(7)
    held = threading.Event()
    io.published = lambda: None
    original = sharded._write
    with mock.patch.object(sharded, "_write", lambda *args: held.wait(60) and original(*args)):
        io.save_together(lambda take: sharded.prepare(content, path, take))
        content["state_dict"]["w"].zero_()
        assert not path.exists()
        held.set()
        io.wait()
    assert torch.equal(store.load(path)["state_dict"]["w"], torch.full((3, 2), 7.0))


def test_a_file_that_is_no_safetensors_is_named(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"not at all")
    with pytest.raises(UserError, match=r"model\.safetensors"):
        store.read_tensors(tmp_path / "model.safetensors")
