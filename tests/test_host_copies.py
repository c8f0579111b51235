"""The copies in host memory that async_save writes from, which training cannot change."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from lmtrain.checkpoints import sharded, store
from lmtrain.checkpoints.checkpoint_io import HostCopies
from lmtrain.config.compose import check, compose
from lmtrain.strategies.fsdp import writes_together


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


def test_ranks_that_write_together_copy_into_memory_that_is_kept(tmp_path: Path) -> None:
    weight, momentum, average = torch.randn(4, 3), torch.randn(4, 3), torch.ones(2)
    copies, places = HostCopies(), list[list[int]]()

    def take(tree: Any) -> Any:
        found = copies.take(tree)
        leaves = torch.utils._pytree.tree_leaves(found)
        places.append([leaf.data_ptr() for leaf in leaves if isinstance(leaf, torch.Tensor)])
        return found

    for step in (1, 2):
        optimizer = {"state": {0: {"momentum": momentum}}, "param_groups": [{"params": [0]}]}
        checkpoint = {"state_dict": {"w": weight}, "optimizer_states": [optimizer], "global_step": step,
                      "callbacks": {"average": average}, "fingerprint": {}}  # fmt: skip
        expected = [tensor.clone() for tensor in (weight, momentum, average)]
        job = sharded.prepare(checkpoint, tmp_path / store.name_of(step), take)
        for tensor in (weight, momentum, average):  # training continues while the checkpoint is written
            tensor.add_(1)
        assert job is not None
        assert job()
        read = store.load(tmp_path / store.name_of(step))
        found = (
            read["state_dict"]["w"],
            read["optimizer_states"][0]["state"][0]["momentum"],
            read["callbacks"]["average"],
        )
        assert all(map(torch.equal, found, expected))
    assert len(places[0]) == 5  # three tensors, and the headers of the two files
    assert places[0] == places[1]


def test_large_models_are_written_by_all_ranks_unless_told_otherwise() -> None:
    options = check(compose([])).trainer.fsdp
    with torch.device("meta"):
        small, large = nn.Linear(1024, 1024), nn.Linear(2**15, 2**15 + 1)  # 4 MiB; 4 GiB + 128 KiB
    assert [writes_together(options, model) for model in (small, large)] == [False, True]
    options.sharded_checkpoint = True
    assert writes_together(options, small)
    options.sharded_checkpoint = False
    assert not writes_together(options, large)
    options.sharded_checkpoint = None
    assert not writes_together(options, large.requires_grad_(False))  # an adapter checkpoint has only trained weights
