"""A new memory leaves the base unchanged, computes what dense attention computes, and has correct gradients."""

import copy
from typing import Any

import pytest
import torch
import torch._dynamo
from torch import Tensor
from torch._dynamo.utils import counters

from helpers_models import VOCAB, packed, tiny
from lmtrain.adapters.memory import (
    TILE,
    MemoryBank,
    MemoryBlock,
    MemorySettings,
    attach_memory,
    memory_blocks,
    read_chapters,
    tiles,
)
from lmtrain.adapters.memory_adapter import check_start, without_memory
from lmtrain.config.schema import OptimizerConfig
from lmtrain.errors import RunError
from lmtrain.models.blocks import compile_model, enable_activation_checkpointing
from lmtrain.models.documents import Inputs
from lmtrain.models.language_model import LanguageModel
from lmtrain.optim.groups import parameter_groups

SETTINGS: dict[str, Any] = {
    "num_chapters": 6, "chapter_size": 5, "memory_dim": 8, "num_heads": 2, "top_k": 2, "layers": (0, 1),
    "router": "top_k", "router_noise": 0.0, "share_bank": True,
}  # fmt: skip


def settings(**changes: Any) -> MemorySettings:
    return MemorySettings(**{**SETTINGS, **changes})


def with_memory(family: str = "llama", **changes: Any) -> Any:
    """Builds a tiny model with a memory whose gates are open, so that it changes the output."""
    model = tiny(family)
    attach_memory(model, settings(**changes))
    open_gates(model)
    return model


def open_gates(model: Any) -> None:
    for block in memory_blocks(model):
        block.gate.data.fill_(0.5)


def dense(block: MemoryBlock, x: Tensor) -> Tensor:
    """Computes the block's formula chapter by chapter over all chapters, without routing."""
    s, bank = block.settings, block.bank
    h = x / (x.square().mean(-1, keepdim=True) + s.norm_eps).sqrt() * block.norm.weight
    p = torch.softmax(h @ block.router.weight.T, -1)
    q = (h @ block.query.weight.T).unflatten(-1, (s.num_heads, -1))
    mixed = torch.zeros_like(q)
    for c in range(s.num_chapters):
        for head in range(s.num_heads):
            scores = q[:, head] @ bank.keys[c, head].T * q.shape[-1] ** -0.5
            mixed[:, head] += p[:, c, None] * (torch.softmax(scores, -1) @ bank.values[c, head])
    return x + block.gate * (mixed.flatten(1) @ block.output.weight.T)


@pytest.mark.parametrize("router", ["top_k", "straight_through", "soft"])
def test_all_chapters_are_dense_attention(router: str) -> None:
    torch.manual_seed(0)
    s = settings(top_k=6, router=router)
    block = MemoryBlock(12, s, MemoryBank(s).double()).double()
    torch.nn.init.normal_(block.gate)
    x = torch.randn(300, 12, dtype=torch.float64)
    torch.testing.assert_close(block(x[None])[0], dense(block, x), rtol=0, atol=1e-12)


def test_a_token_reads_its_own_chapters() -> None:
    """Sorting into tiles and back gives each token the results of its own chapters, checked one pair at a time."""
    generator = torch.Generator().manual_seed(0)
    keys, values = (torch.randn(7, 2, 5, 4, generator=generator, dtype=torch.float64) for _ in range(2))
    queries = torch.randn(200, 2, 4, generator=generator, dtype=torch.float64)
    skewed = torch.rand(200, 7, generator=generator) + torch.tensor([1.0, 0.7, 0, 0, 0, 0, -9])
    chapters = skewed.topk(3, dim=-1).indices
    found = read_chapters(queries, keys, values, chapters)
    for n in (0, 7, 63, 64, 199):
        for j in range(3):
            c = int(chapters[n, j])
            scores = torch.einsum("hd,hsd->hs", queries[n], keys[c]) / 2
            expected = torch.einsum("hs,hsd->hd", scores.softmax(-1), values[c])
            torch.testing.assert_close(found[n, j], expected)


@pytest.mark.parametrize("rows", [1, 3, TILE, 5 * TILE + 1])
@pytest.mark.parametrize("spread", ["one", "even", "last"])
def test_tiles_hold_one_chapter_each(rows: int, spread: str) -> None:
    chapters = {
        "one": torch.full((rows,), 2), "even": torch.arange(rows) % 5, "last": torch.full((rows,), 4)
    }[spread]  # fmt: skip
    place, of_tile = tiles(chapters, 5)
    assert len(set(place.tolist())) == rows, "no two rows in one place"
    assert place.max() < len(of_tile) * TILE
    assert torch.equal(of_tile[place // TILE], chapters)


@pytest.mark.parametrize("share_bank", [True, False])
def test_gradients_of_every_part_are_those_of_finite_differences(share_bank: bool) -> None:
    torch.manual_seed(0)
    s = settings(num_chapters=3, chapter_size=2, memory_dim=4, share_bank=share_bank)
    bank = MemoryBank(s).double() if share_bank else None
    block = MemoryBlock(3, s, bank).double()
    torch.nn.init.normal_(block.gate)
    x = torch.randn(1, 5, 3, dtype=torch.float64, requires_grad=True)
    parts = list(block.parameters()) + ([] if bank is None else list(bank.parameters()))
    assert len(parts) == 7
    assert torch.autograd.gradcheck(lambda *_: block(x), (x, *parts))


def test_straight_through_has_the_gradient_of_the_probabilities() -> None:
    """Weights equal top_k's, but their gradient is the probabilities': even a single chapter trains the router."""
    torch.manual_seed(0)
    block = MemoryBlock(3, settings(router="straight_through"), None)
    logits = torch.randn(4, 6, dtype=torch.float64, requires_grad=True)
    chapters, weights = block.route(logits)
    torch.testing.assert_close(weights.sum(-1), torch.ones(4, dtype=torch.float64))
    chosen = torch.softmax(logits, -1).gather(1, chapters)
    direction = torch.randn_like(weights)
    expected = torch.autograd.grad((chosen * direction).sum(), logits)
    torch.testing.assert_close(torch.autograd.grad((weights * direction).sum(), logits), expected)


@pytest.mark.parametrize("family", ["gpt2", "llama", "qwen3"])
def test_a_new_memory_is_the_base_bit_for_bit(family: str) -> None:
    model, ids = tiny(family), packed()["input_ids"]
    expected = model(ids).logits
    attach_memory(model, settings())
    assert torch.equal(model(ids).logits, expected)
    check_start(model)
    open_gates(model)
    assert not torch.equal(model(ids).logits, expected)
    with pytest.raises(RunError, match="changes the model before it is trained"):
        check_start(model)
    with without_memory(model):
        assert torch.equal(model(ids).logits, expected)


def test_a_shared_bank_stands_once_and_others_once_a_layer() -> None:
    shared, own = with_memory(), with_memory(share_bank=False)
    banks = [[n for n in m.state_dict() if n.endswith(".keys")] for m in (shared, own)]
    assert banks[0] == ["model.memory_bank.keys"]
    assert banks[1] == [f"model.layers.{i}.memory.own_bank.keys" for i in (0, 1)]


def test_documents_stay_apart() -> None:
    """Changing a token of one document changes no hidden state of another document."""
    model = LanguageModel(with_memory()).eval()
    batch = packed()
    changed = {**batch, "input_ids": batch["input_ids"].clone()}
    changed["input_ids"][0, 2] = (changed["input_ids"][0, 2] + 1) % VOCAB
    rows = (Inputs(b["input_ids"], b["position_ids"], b["cu_seqlens"]) for b in (batch, changed))
    before, after = (model.hidden_states(inputs)[0] for inputs in rows)
    difference = (before - after).abs().amax(-1)
    assert difference[0, 2:5].max() > 1e-3
    assert difference[0, 5:].max() < 1e-6
    assert difference[1:].max() < 1e-6


@pytest.mark.parametrize("how", ["checkpointing", pytest.param("compilation", marks=pytest.mark.slow)])
def test_other_ways_to_compute_change_no_gradient(how: str) -> None:
    expected_model = LanguageModel(with_memory("gpt2", layers=(1,)))
    model = LanguageModel(copy.deepcopy(expected_model.model))
    expected_model.router_losses.z_loss = model.router_losses.z_loss = 0.1
    torch._dynamo.reset()
    counters.clear()
    if how == "checkpointing":
        enable_activation_checkpointing(model.model)
    else:
        compile_model(model.model, changing_lengths=True, backend="eager")
    batch = {name: packed()[name] for name in ("input_ids", "labels")}
    expected, found = expected_model(**batch), model(**batch)
    torch.testing.assert_close(found.loss_sum, expected.loss_sum)
    torch.testing.assert_close(found.aux, expected.aux)
    expected.loss_sum.backward()
    found.loss_sum.backward()
    for (name, p), q in zip(expected_model.named_parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(q.grad, p.grad, rtol=1e-4, atol=1e-5, msg=name)
    shorter = {name: tensor[:, :11] for name, tensor in batch.items()}
    torch.testing.assert_close(model(**shorter).loss_sum, expected_model(**shorter).loss_sum)
    assert dict(counters["graph_break"]) == {}
    if how == "compilation":
        assert counters["stats"]["unique_graphs"] == 2, "a block with a memory and one without, whatever the length"
    torch._dynamo.reset()


def test_groups_by_component() -> None:
    """Groups named base and memory need no pattern, and together they take every parameter once."""
    rules = [{"name": "base", "lr": 1e-5}, {"name": "memory", "lr": 1e-3, "weight_decay": 0.0}]
    cfg = OptimizerConfig(name="adamw", lr=1e-4, weight_decay=0.1, groups=rules)
    model = with_memory()
    groups = parameter_groups(model.named_parameters(), cfg)
    named = {name: g["lr"] for g in groups for name in g["param_names"]}
    assert named.keys() == dict(model.named_parameters()).keys()
    assert {name for name, lr in named.items() if lr == 1e-3} == {n for n in named if "memory" in n}
    assert set(named.values()) == {1e-3, 1e-5}


def test_router_losses_reach_the_loss() -> None:
    model = LanguageModel(with_memory())
    plain = model(**packed())
    model.router_losses.kinds["memory"] = model.router_losses.kinds["memory"]._replace(load_balance=0.5)
    weighted = model(**packed())
    added = (weighted.loss_sum - plain.loss_sum) / plain.n_tokens
    torch.testing.assert_close(added, 0.5 * 2 * 2 * plain.aux["router/load_balance"], msg="layers x top_k x 1 if even")
    assert set(plain.aux) == set(model.router_losses.names())
