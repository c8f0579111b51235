"""The safetensors file that ranks write together can be read by any safetensors reader."""

import datetime
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from lmtrain.checkpoints import checksums, sharded, store
from lmtrain.distributed import process_group as world
from lmtrain.errors import RunError


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
