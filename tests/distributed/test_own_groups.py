"""Untied embeddings and output layer are FSDP groups of their own: equal numbers, and when each is gathered."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

import forked
from helpers_models import VOCAB, wrapped
from lmtrain.config.compose import check, compose
from lmtrain.models.blocks import untied_layers
from lmtrain.models.documents import Inputs
from lmtrain.models.language_model import LanguageModel
from lmtrain.strategies import sharding

SHAPE = {"num_key_value_heads": 2, "intermediate_size": 48, "tie_word_embeddings": False}


def losses(model: LanguageModel, how: str, rows: slice) -> Tensor:
    """Returns a sum over tokens of some of four rows: the usual loss, or negative log-probabilities of tokens."""
    ids = torch.randint(VOCAB, (4, 9), generator=torch.Generator().manual_seed(1))[rows]
    inputs, labels = ids[:, :-1], ids[:, 1:]
    if how != "log_probs":
        return model(inputs, labels).loss_sum
    before = torch.tensor([0, 3, 11])
    return -model.log_probs(Inputs(inputs), scored=before + 1, before=before).tokens.sum()


def gathered_now(model: Any) -> dict[str, bool]:
    parts = {"embeddings": model.model.get_input_embeddings(), "head": model.model.get_output_embeddings()}
    return {name: part._get_fsdp_state()._fsdp_param_group.is_unsharded for name, part in parts.items()}


def rank_of_two(rank: int, folder: str, how: str) -> None:
    """Accumulates two micro-batches, as a step does, and records which groups are gathered after each pass."""
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=2)
    if how == "half":
        sharding._in_half = lambda precision, device_type: True
    options = check(compose([])).trainer.fsdp
    model = wrapped("llama", **SHAPE)
    mesh = init_device_mesh("cpu", (2,))
    sharding.shard(model, mesh, torch.device("cpu"), "bf16-mixed" if how == "half" else "32-true", options)
    held, total = [], torch.tensor(0.0)
    for micro, last in ((0, False), (1, True)):
        sharding.sync_gradients(model, last)
        with torch.autocast("cpu", torch.bfloat16, enabled=how == "half"):
            loss = losses(model, how, slice(2 * rank + micro, 2 * rank + micro + 1) if how != "log_probs" else
                          slice(2 * rank, 2 * rank + 2))  # fmt: skip
        held.append(gathered_now(model))
        loss.backward()
        held.append(gathered_now(model))
        total += loss.detach()
    dist.all_reduce(total)
    gradients = {name: p.grad.full_tensor() * 2 for name, p in model.model.named_parameters()}  # FSDP's mean to a sum
    torch.save({"loss": total, "gradients": gradients, "held": held}, f"{folder}/{rank}.pt")
    dist.destroy_process_group()


@pytest.mark.slow
@pytest.mark.parametrize("how", ["loss", "log_probs", "half"])
def test_two_ranks_agree_with_one_process(how: str, tmp_path: Path) -> None:
    forked.call_in_ranks(rank_of_two, str(tmp_path), how)
    alone = wrapped("llama", **SHAPE)
    parts = [slice(0, 2), slice(0, 2), slice(2, 4), slice(2, 4)] if how == "log_probs" else [slice(0, 4)]
    expected = sum((losses(alone, how, part) for part in parts), torch.tensor(0.0))
    expected.backward()
    near = {"rtol": 2e-2, "atol": 2e-2} if how == "half" else {"rtol": 1e-6, "atol": 1e-6}
    for rank in (0, 1):
        found = torch.load(tmp_path / f"{rank}.pt")
        torch.testing.assert_close(found["loss"], expected.detach(), **near)
        for name, p in alone.model.named_parameters():
            ours = found["gradients"][name]
            assert p.grad is not None
            assert ours.dtype == torch.float32
            scale = p.grad.abs().max()
            torch.testing.assert_close(ours / scale, p.grad / scale, **(near | {"atol": 10 * near["atol"]}))
        # Embeddings are gathered for the lookup only, the output layer from the loss until its gradient is computed.
        assert found["held"] == [{"embeddings": False, "head": True}, {"embeddings": False, "head": False}] * 2


@pytest.mark.parametrize("change", [{"tie_word_embeddings": True}, {}])
def test_only_untied_layers_are_apart(change: dict[str, Any]) -> None:
    model = wrapped("llama", **SHAPE | change).model
    assert (untied_layers(model) is None) is bool(change)
