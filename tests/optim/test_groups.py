"""Assignment of parameters to optimizer groups, on real (tiny) models of transformers."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from lmtrain.config.compose import check, compose
from lmtrain.config.options import MuonConfig
from lmtrain.config.schema import OptimizerConfig
from lmtrain.errors import UserError
from lmtrain.optim.groups import parameter_groups, table_rows

TOKENS: dict[str, Any] = {"vocab_size": 48, "bos_token_id": None, "eos_token_id": None}


def gpt2() -> PreTrainedModel:
    return GPT2LMHeadModel(GPT2Config(n_layer=2, n_head=2, n_embd=16, n_positions=8, **TOKENS))


def llama() -> PreTrainedModel:
    return LlamaForCausalLM(
        LlamaConfig(
            hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
            tie_word_embeddings=False, **TOKENS,
        )
    )  # fmt: skip


def qwen3_moe() -> PreTrainedModel:
    return Qwen3MoeForCausalLM(
        Qwen3MoeConfig(
            hidden_size=16, intermediate_size=32, moe_intermediate_size=8, num_hidden_layers=2, num_experts=4,
            num_experts_per_tok=2, num_attention_heads=2, num_key_value_heads=2, head_dim=8, **TOKENS,
        )
    )  # fmt: skip


def config(name: str = "adamw", groups: list[dict[str, Any]] | None = None) -> OptimizerConfig:
    common: dict[str, Any] = {"name": name, "lr": 1e-3, "weight_decay": 0.1, "groups": groups or []}
    if name != "muon":
        return OptimizerConfig(**common)
    muon = {"momentum": 0.95, "adamw_pattern": "embed|wte|wpe|lm_head"}
    return MuonConfig(betas=[0.9, 0.95], eps=1e-8, **muon, **common)


def by_name(groups: list[dict[str, Any]]) -> dict[str, set[str]]:
    return {g["name"]: set(g["param_names"]) for g in groups}


@pytest.mark.parametrize("build", [gpt2, llama, qwen3_moe])
@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_every_parameter_is_in_exactly_one_group(build: Callable[[], PreTrainedModel], name: str) -> None:
    model = build()
    groups = parameter_groups(model.named_parameters(), config(name))
    members = [p for g in groups for p in g["params"]]
    assert {id(p) for p in members} == {id(p) for p in model.parameters()}
    assert len(members) == len({id(p) for p in members})
    names = dict(model.named_parameters())
    for g in groups:
        assert [id(names[n]) for n in g["param_names"]] == [id(p) for p in g["params"]]
        assert g["lr"] == g["base_lr"] == 1e-3


@pytest.mark.parametrize("build", [gpt2, llama, qwen3_moe])
@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_decay_is_for_matrices(build: Callable[[], PreTrainedModel], name: str) -> None:
    """Only matrices decay; here module types tell vectors from matrices, in lmtrain parameter names do."""
    model = build()
    vectors = {
        f"{prefix}.{n}"
        for prefix, module in model.named_modules()
        for n, p in module.named_parameters(recurse=False)
        if n == "bias" or "Norm" in type(module).__name__
    }
    assert vectors
    groups = parameter_groups(model.named_parameters(), config(name))
    undecayed = {n for g in groups if g["weight_decay"] == 0 for n in g["param_names"]}
    assert undecayed == vectors
    assert {g["weight_decay"] for g in groups} == {0.0, 0.1}


def test_two_dimensional_biases_and_norms_do_not_decay() -> None:
    parameters = {
        "mlp.experts.down_proj_bias": nn.Parameter(torch.zeros(4, 8)),
        "attn.q_norm.weight": nn.Parameter(torch.zeros(2, 8)),
        "mlp.experts.down_proj": nn.Parameter(torch.zeros(4, 8, 8)),
    }
    groups = by_name(parameter_groups(parameters.items(), config()))
    assert groups == {
        "decay": {"mlp.experts.down_proj"},
        "no_decay": {"mlp.experts.down_proj_bias", "attn.q_norm.weight"},
    }


def test_muon_takes_hidden_matrices() -> None:
    """Muon gets all Linear, Conv1D and expert weights of the layers; embeddings, output, norms and biases get AdamW."""
    for build, n_hidden in ((gpt2, 2 * 4), (llama, 2 * 7), (qwen3_moe, 2 * 7)):
        model = build()
        groups = parameter_groups(model.named_parameters(), config("muon"))
        muon = {n for g in groups if g["algorithm"] == "muon" for n in g["param_names"]}
        hidden = {
            n
            for n, p in model.named_parameters()
            if p.ndim >= 2 and (".layers." in n or ".h." in n) and "norm" not in n
        }
        assert muon == hidden
        assert len(muon) == n_hidden
        assert all(g["name"].startswith(g["algorithm"]) for g in groups)


def test_tied_weights_stand_once_even_if_named_twice() -> None:
    model = gpt2()
    assert model.lm_head.weight is model.transformer.wte.weight
    both = list(model.named_parameters(remove_duplicate=False))
    assert len(both) == len(list(model.named_parameters())) + 1
    names = [n for g in parameter_groups(both, config()) for n in g["param_names"]]
    assert "transformer.wte.weight" in names
    assert "lm_head.weight" not in names


def test_frozen_parameters_are_left_out() -> None:
    model = llama()
    model.model.embed_tokens.weight.requires_grad_(False)
    names = {n for g in parameter_groups(model.named_parameters(), config()) for n in g["param_names"]}
    assert names == {n for n, _ in model.named_parameters()} - {"model.embed_tokens.weight"}
    model.requires_grad_(False)
    with pytest.raises(UserError, match="no trainable parameter"):
        parameter_groups(model.named_parameters(), config())


def test_patterns_first_match_wins() -> None:
    model = llama()
    groups = parameter_groups(
        model.named_parameters(),
        config(
            groups=[
                {"pattern": "embed_tokens|lm_head", "weight_decay": 0.0, "name": "embeddings"},
                {"pattern": r"layers\.0\.", "lr": 5e-4},
                {"pattern": "mlp", "lr": 2e-3, "weight_decay": 0.3},
            ]
        ),
    )
    got = {g["name"]: (g["base_lr"], g["weight_decay"]) for g in groups}
    assert got == {
        "decay": (1e-3, 0.1),
        "no_decay": (1e-3, 0.0),
        "embeddings/decay": (1e-3, 0.0),
        r"layers\.0\./decay": (5e-4, 0.1),
        r"layers\.0\./no_decay": (5e-4, 0.0),  # norms never decay
        "mlp/decay": (2e-3, 0.3),
    }
    assert next(iter(got)) == "decay"  # parameters that no pattern matches come first
    members = by_name(groups)
    assert all(n.startswith("model.layers.1.mlp.") for n in members["mlp/decay"])
    assert "model.layers.0.mlp.up_proj.weight" in members[r"layers\.0\./decay"]


def test_patterns_split_by_algorithm_under_muon() -> None:
    groups = parameter_groups(gpt2().named_parameters(), config("muon", [{"pattern": "wte|c_attn", "lr": 1e-4}]))
    assert [g["name"] for g in groups] == [
        "muon/decay",
        "adamw/decay",
        "adamw/no_decay",
        "wte|c_attn/muon/decay",
        "wte|c_attn/adamw/decay",
        "wte|c_attn/adamw/no_decay",
    ]


@pytest.mark.parametrize(
    ("groups", "message"),
    [
        ([{"pattern": "lora_"}], r"'lora_' matches no trained parameter.*model\.embed_tokens\.weight"),
        ([{"pattern": "mlp"}, {"pattern": "up_proj"}], "taken by an earlier group"),
        ([{"pattern": "("}], r"groups\[0\]\.pattern.*not a regular expression"),
        ([{"lr": 1e-3}], r"groups\[0\] has no pattern"),
        ([{"name": "adapter", "lr": 1e-3}], r"\{name: adapter\}: no adapter is trained \(peft=lora"),
        ([{"name": "memory", "lr": 1e-3}], r"\{name: memory\}: this model has no memory"),
        ([{"name": "memry", "lr": 1e-3}], r"has no pattern.*names memory, adapter, base"),
        ([{"pattern": "mlp", "learning_rate": 1e-3}], r"groups\[0\]\.learning_rate is not known.*weight_decay"),
        ([{"pattern": "mlp", "lr": "1e-3"}], r"groups\[0\]\.lr='1e-3'.*write 1.0e-4"),
        ([{"pattern": "mlp", "lr": -1.0}], r"groups\[0\]\.lr=-1\.0"),
        ([{"pattern": "mlp", "weight_decay": True}], r"groups\[0\]\.weight_decay=True"),
    ],
)
def test_wrong_groups_are_explained(groups: list[dict[str, Any]], message: str) -> None:
    with pytest.raises(UserError, match=message):
        parameter_groups(llama().named_parameters(), config(groups=groups))


@pytest.mark.parametrize(("name", "key"), [("muon", "adamw_pattern"), ("adamw_8bit", "full_state_pattern")])
def test_patterns_are_regular_expressions(name: str, key: str) -> None:
    with pytest.raises(UserError, match=rf"optimizer\.{key}='\[' is not a regular expression"):
        check(compose([f"optimizer={name}", f"optimizer.{key}='['"]))


def test_table_rows() -> None:
    model = gpt2()
    rows = table_rows(parameter_groups(model.named_parameters(), config()))
    matrices = [p for p in model.parameters() if p.ndim >= 2]
    vectors = [p for p in model.parameters() if p.ndim < 2]
    assert rows == [
        ("decay", len(matrices), sum(p.numel() for p in matrices), 1e-3, 0.1),
        ("no_decay", len(vectors), sum(p.numel() for p in vectors), 1e-3, 0.0),
    ]
