"""Muon on two ranks that hold the same matrices: each orthogonalises its share, and the result is one process's."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing
from torch import Tensor

from lmtrain.optim import muon

SHAPES = [(24, 16)] * 5 + [(16, 24)] * 2 + [(3, 8, 8)] + [(12, 20)]


def trained(counts: list[int]) -> list[Tensor]:
    """Parameters after three steps; `counts` gets how many matrices each call of orthogonalize was given."""
    original = muon.orthogonalize

    def counting(matrices: Tensor, steps: int) -> Tensor:
        counts.append(len(matrices))
        return original(matrices, steps)

    muon.orthogonalize = counting
    try:
        random = torch.Generator().manual_seed(1)
        parameters = [torch.randn(shape, generator=random).requires_grad_() for shape in SHAPES]
        optimizer = muon.Muon(parameters, lr=0.02, weight_decay=0.1)
        for _ in range(3):
            for p in parameters:
                p.grad = torch.randn(p.shape, generator=random)
            optimizer.step()
    finally:
        muon.orthogonalize = original
    return [p.detach() for p in parameters]


def rank_of_two(rank: int, folder: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=2)
    counts = list[int]()
    torch.save({"parameters": trained(counts), "counts": counts}, f"{folder}/{rank}.pt")
    dist.destroy_process_group()


@pytest.mark.slow
def test_two_ranks_share_the_work_and_agree_with_one(tmp_path: Path) -> None:
    multiprocessing.spawn(rank_of_two, (str(tmp_path),), nprocs=2)
    found: list[dict[str, Any]] = [torch.load(tmp_path / f"{rank}.pt", weights_only=True) for rank in (0, 1)]
    alone = list[int]()
    for ours, first, second in zip(trained(alone), *(found[rank]["parameters"] for rank in (0, 1)), strict=True):
        assert torch.equal(first, second)
        torch.testing.assert_close(first, ours, rtol=1e-6, atol=1e-6)
    one_step = sum(alone) // 3
    assert one_step == 11  # 5 + 2 + 3 experts + 1
    # The single matrix of its shape is computed by both: sending it would take as long.
    assert [sum(f["counts"]) // 3 for f in found] == [3 + 1 + 2 + 1, 2 + 1 + 1 + 1]
