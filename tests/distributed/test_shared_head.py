"""Ranks with the same hidden states share the loss computation over tokens: work, loss and gradients."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

import forked
from lmtrain.losses.cross_entropy import CrossEntropy, chunked_cross_entropy
from lmtrain.models.language_model import shared_cross_entropy

TOKENS = (12, 7, 1)  # of 7 tokens one rank gets a padding row without a label; of 1 token one rank gets nothing else


def leaves(tokens: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    random = torch.Generator().manual_seed(tokens)
    hidden, weight, bias = (torch.randn(*s, generator=random).requires_grad_() for s in ((tokens, 8), (50, 8), (50,)))
    labels = torch.randint(50, (tokens,), generator=random)
    labels[1::3] = -100
    return hidden, weight, bias, labels


def of_rows(hidden: Tensor, weight: Tensor, labels: Tensor, bias: Tensor | None) -> CrossEntropy:
    return chunked_cross_entropy(hidden, weight, labels, bias=bias, chunk_tokens=4)


def rank_of_two(rank: int, folder: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=2)
    mesh = init_device_mesh("cpu", (2,))
    found = []
    for tokens in TOKENS:
        *inputs, labels = leaves(tokens)
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            shared_cross_entropy(of_rows, *inputs, labels, mesh)
        loss = shared_cross_entropy(of_rows, *inputs, labels, mesh)
        (loss.loss_sum * 3).backward()
        gradients = [x.grad for x in inputs]
        for gradient in gradients[1:]:
            dist.all_reduce(gradient)  # as FSDP averages over the ranks
            gradient /= 2
        found.append({"sums": [x.detach() for x in loss], "gradients": gradients, "flops": counter.get_total_flops()})
    torch.save(found, f"{folder}/{rank}.pt")
    dist.destroy_process_group()


@pytest.mark.slow
def test_two_ranks_share_the_work_and_agree_with_one(tmp_path: Path) -> None:
    forked.call_in_ranks(rank_of_two, str(tmp_path))
    for rank in (0, 1):
        found: list[dict[str, Any]] = torch.load(tmp_path / f"{rank}.pt", weights_only=True)
        for tokens, ours in zip(TOKENS, found, strict=True):
            hidden, weight, bias, labels = leaves(tokens)
            expected = F.cross_entropy(hidden @ weight.T + bias, labels, ignore_index=-100, reduction="sum")
            (expected * 3).backward()
            torch.testing.assert_close(ours["sums"][0], expected.detach(), rtol=1e-6, atol=1e-6)
            assert int(ours["sums"][1]) == int((labels != -100).sum())
            for a, b in zip(ours["gradients"], (hidden.grad, weight.grad, bias.grad), strict=True):
                torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
            assert ours["flops"] == 2 * -(-tokens // 2) * 8 * 50  # logits of half of the tokens per rank
