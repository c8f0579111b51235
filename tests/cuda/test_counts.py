"""What ranks exchange in each step stays on the hosts, since the host would wait for a collective on the device."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from lmtrain.distributed.devices import agreed


def trainer_of(ranks: int, copies: int = 1) -> Any:
    strategy = SimpleNamespace(tensor_parallel_size=copies, root_device=torch.device("meta"))
    return SimpleNamespace(world_size=ranks, global_rank=0, strategy=strategy)


@pytest.mark.parametrize(("copies", "counts"), [(1, [14, 18]), (2, [7, 9])])
@pytest.mark.parametrize("asked", [(False, False), (True, False), (False, True)])
def test_counts_and_a_request_to_stop(
    copies: int, counts: list[int], asked: tuple[bool, bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Counts of two ranks are summed if they read rows of their own, and count once if both read the same rows."""

    def all_reduce(summed: Tensor) -> None:
        assert summed.device.type == "cpu"
        summed += torch.tensor([7, 9, int(asked[1])])

    monkeypatch.setattr(torch.distributed, "get_backend_config", lambda: "cpu:gloo,cuda:nccl")
    monkeypatch.setattr(torch.distributed, "all_reduce", all_reduce)
    found, stop = agreed(trainer_of(2, copies), torch.tensor([7, 9]), asked[0])
    assert found.tolist() == counts
    assert stop is any(asked)


def test_a_group_of_gpus_alone_sums_on_them(monkeypatch: pytest.MonkeyPatch) -> None:
    class Summed(Exception): ...

    def all_reduce(summed: Tensor) -> None:
        assert summed.device.type == "meta"
        raise Summed

    monkeypatch.setattr(torch.distributed, "get_backend_config", lambda: "cuda:nccl")
    monkeypatch.setattr(torch.distributed, "all_reduce", all_reduce)
    with pytest.raises(Summed):
        agreed(trainer_of(2), torch.tensor([7, 9]), False)


def test_one_rank_asks_nobody() -> None:
    counts = torch.tensor([7, 9])
    assert agreed(trainer_of(1), counts, True) == (counts, True)
