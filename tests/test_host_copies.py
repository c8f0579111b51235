"""What async_save writes from: copies in host memory that training can't change."""

from typing import Any

import pytest
import torch

from lmtrain.checkpoints.checkpoint_io import HostCopies


def test_tied_weights_are_copied_once_and_memory_is_kept() -> None:
    weight = torch.randn(4, 3)
    tree: dict[str, Any] = {"embed": weight.detach(), "head": weight.detach(), "other": torch.ones(4, 3), "step": 7}
    copies = HostCopies()
    first = copies.take(tree)
    assert first["step"] == 7
    assert first["embed"] is first["head"]
    assert first["other"].data_ptr() != first["embed"].data_ptr() != weight.data_ptr()
    assert torch.equal(first["embed"], weight)
    places = [first[name].data_ptr() for name in ("embed", "other")]
    weight.add_(1)
    assert not torch.equal(first["embed"], weight)
    second = copies.take(tree)
    assert torch.equal(second["head"], weight)
    assert torch.equal(second["other"], torch.ones(4, 3))
    assert [second[name].data_ptr() for name in ("embed", "other")] == places


def test_a_file_of_tied_weights_is_no_larger(tmp_path: Any) -> None:
    weight = torch.randn(100, 100)
    state = {"embed": weight, "head": weight}
    torch.save(state, tmp_path / "now.pt")
    torch.save(HostCopies().take(state), tmp_path / "beside.pt")
    assert (tmp_path / "beside.pt").stat().st_size < 1.1 * (tmp_path / "now.pt").stat().st_size


def test_memory_is_page_locked_where_there_is_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[bool] = []
    empty = torch.empty

    def watched(*size: Any, pin_memory: bool = False, **options: Any) -> torch.Tensor:
        asked.append(pin_memory)
        return empty(*size, **options)

    monkeypatch.setattr(torch, "empty", watched)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    HostCopies().take({"weight": torch.ones(2)})
    assert asked == [True]
