"""Muon on two ranks with the same matrices: each orthogonalizes its share, and the result equals one process's."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import forked
from lmtrain.optim import muon

SHAPES = [(24, 16)] * 5 + [(16, 24)] * 2 + [(3, 8, 8)] + [(12, 20)]


def trained(counts: list[int], lay_out: Callable[[Tensor], Tensor] = lambda tensor: tensor) -> list[Tensor]:
    """Returns parameters after three steps; `counts` collects the number of matrices per call of orthogonalize."""
    original = muon.orthogonalize

    def counting(matrices: Tensor) -> Tensor:
        counts.append(len(matrices))
        return original(matrices)

    muon.orthogonalize = counting
    try:
        random = torch.Generator().manual_seed(1)
        parameters = [lay_out(torch.randn(shape, generator=random)).requires_grad_() for shape in SHAPES]
        optimizer = muon.Muon(parameters, lr=0.02, weight_decay=0.1)
        for _ in range(3):
            for p in parameters:
                p.grad = lay_out(torch.randn(p.shape, generator=random))
            optimizer.step()
    finally:
        muon.orthogonalize = original
    return [p.detach() for p in parameters]


def rank_of_two(rank: int, folder: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=2)
    counts = list[int]()
    torch.save({"parameters": trained(counts), "counts": counts}, f"{folder}/{rank}.pt")
    dist.destroy_process_group()


def sharded_rank_of_two(rank: int, folder: str) -> None:
    """Trains row-sharded parameters, as under FSDP, for three steps; saves results, matrix counts, gathered sizes."""
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=2)
    mesh = init_device_mesh("cpu", (2,))
    gathers, original = list[int](), dist.tensor.DTensor.full_tensor

    def counting(tensor: Any, **options: Any) -> Tensor:
        gathers.append(tensor.numel())
        return original(tensor, **options)

    counts = list[int]()
    with mock.patch.object(dist.tensor.DTensor, "full_tensor", counting):
        parameters = trained(counts, lambda tensor: distribute_tensor(tensor, mesh, [Shard(0)]))
    whole = [p.full_tensor() for p in parameters]
    torch.save({"parameters": whole, "counts": counts, "gathers": gathers}, f"{folder}/{rank}.pt")
    dist.destroy_process_group()


@pytest.mark.slow
def test_sharded_matrices_are_computed_once_and_agree_with_one_process(tmp_path: Path) -> None:
    forked.call_in_ranks(sharded_rank_of_two, str(tmp_path))
    found: list[dict[str, Any]] = [torch.load(tmp_path / f"{rank}.pt", weights_only=True) for rank in (0, 1)]
    for ours, first, second in zip(trained([]), *(found[rank]["parameters"] for rank in (0, 1)), strict=True):
        assert torch.equal(first, second)
        torch.testing.assert_close(first, ours, rtol=1e-6, atol=1e-6)
    assert found[0]["gathers"] == [3 * 8 * 8] * 3  # only the experts, which are no matrix, are gathered
    assert [sum(f["counts"]) // 3 for f in found] == [3 + 1 + 2 + 1, 2 + 1 + 1 + 0]


@pytest.mark.slow
def test_two_ranks_share_the_work_and_agree_with_one(tmp_path: Path) -> None:
    forked.call_in_ranks(rank_of_two, str(tmp_path))
    found: list[dict[str, Any]] = [torch.load(tmp_path / f"{rank}.pt", weights_only=True) for rank in (0, 1)]
    alone = list[int]()
    for ours, first, second in zip(trained(alone), *(found[rank]["parameters"] for rank in (0, 1)), strict=True):
        assert torch.equal(first, second)
        torch.testing.assert_close(first, ours, rtol=1e-6, atol=1e-6)
    one_step = sum(alone) // 3
    assert one_step == 11  # 5 + 2 + 3 experts + 1
    # Both ranks compute the only matrix of its shape, as sending it would take as long.
    assert [sum(f["counts"]) // 3 for f in found] == [3 + 1 + 2 + 1, 2 + 1 + 1 + 1]


class Threads:
    """Threads of this process as ranks, whose collectives exchange tensors at a barrier."""

    def __init__(self, ranks: int) -> None:
        self.ranks, self.own = ranks, threading.local()
        self.barrier, self.sent = threading.Barrier(ranks, timeout=60), dict[int, Tensor]()

    def rank(self, group: Any = None) -> int:
        return self.own.rank

    def size(self, group: Any = None) -> int:
        return self.ranks

    def exchanged(self, sent: Tensor) -> list[Tensor]:
        self.sent[self.own.rank] = sent.clone()
        self.barrier.wait()
        found = [self.sent[rank] for rank in range(self.ranks)]
        self.barrier.wait()
        return found

    def all_gather(self, out: Tensor, sent: Tensor, group: Any = None) -> None:
        out.copy_(torch.cat(self.exchanged(sent)))

    def all_to_all(self, out: Tensor, sent: Tensor, group: Any = None) -> None:
        out.copy_(torch.cat([other.chunk(self.ranks)[self.own.rank] for other in self.exchanged(sent)]))

    def run(self, work: Callable[[int], Tensor]) -> list[Tensor]:
        def in_rank(rank: int) -> Tensor:
            self.own.rank = rank
            return work(rank)

        with (
            mock.patch.multiple(muon.world, rank=self.rank, size=self.size),
            mock.patch.multiple(muon.dist, get_rank=self.rank, get_world_size=self.size,
                                all_gather_into_tensor=self.all_gather, all_to_all_single=self.all_to_all),
            ThreadPoolExecutor(self.ranks) as pool,
        ):  # fmt: skip
            return list(pool.map(in_rank, range(self.ranks)))


@pytest.mark.parametrize(("count", "ranks"), [(1, 2), (2, 2), (5, 2), (4, 3), (2, 3), (7, 4)])
def test_matrices_are_shared_out_whatever_their_number(count: int, ranks: int) -> None:
    matrices = torch.randn(count, 6, 4, generator=torch.Generator().manual_seed(0))
    whole, original, counts = muon.orthogonalize(matrices), muon.orthogonalize, list[int]()

    def counting(some: Tensor) -> Tensor:
        counts.append(len(some))
        return original(some)

    with mock.patch.object(muon, "orthogonalize", counting):
        for found in Threads(ranks).run(lambda _: muon.orthogonalize_together(matrices)):
            torch.testing.assert_close(found, whole, rtol=0, atol=1e-2)
            assert found.shape == whole.shape
        assert sum(counts) == (ranks if count == 1 else count), "each is computed once; one alone by all"
        counts.clear()
        rows = 12
        wide = torch.randn(count, rows, 4, generator=torch.Generator().manual_seed(1))
        parts = Threads(ranks).run(lambda rank: muon.orthogonalize_rows(wide.chunk(ranks, 1)[rank], None))
        assert sum(counts) == count
        assert max(counts) == -(-count // ranks)
    torch.testing.assert_close(torch.cat(parts, 1), muon.orthogonalize(wide), rtol=0, atol=1e-2)
