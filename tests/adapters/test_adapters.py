"""Adapters get the gradients of a plain peft loop on every kind of layer, and invalid settings are refused."""

import hashlib
import json
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from family_variants import Variant, build, config_of
from lmtrain.adapters import lora as adapters
from lmtrain.adapters import lora_files
from lmtrain.adapters.lora_merge import merged
from lmtrain.adapters.trainable import (
    adapter_of,
    base_identity,
    check_weights,
    describe_adapter,
    disabled,
    restore_start,
    without_frozen,
)
from lmtrain.config.schema import OptimizerConfig, PeftConfig
from lmtrain.data.store.contents import REMEMBER_FROM, Facts
from lmtrain.errors import UserError
from lmtrain.models import flops
from lmtrain.models.blocks import enable_activation_checkpointing
from lmtrain.models.language_model import LanguageModel
from lmtrain.optim.groups import parameter_groups
from tiny_pretrained import load_pretrained, save_pretrained

VOCAB = 257
BATCH = {"input_ids": torch.arange(60).reshape(3, 20) + 7, "labels": (torch.arange(60) * 5 % VOCAB).reshape(3, 20)}
NEW = [255, 256]  # tokens whose embedding rows are trained
LORA: dict[str, Any] = {
    "method": "lora",
    "r": 4,
    "alpha": 8,
    "dropout": 0.0,
    "target_modules": "all-linear",
    "modules_to_save": [],
    "bias": "none",
    "use_rslora": False,
    "use_dora": False,
    "init_weights": "default",
}


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("bases")
    return {
        "untied": save_pretrained(root / "untied"),
        "tied": save_pretrained(root / "tied", tie_word_embeddings=True),
        "gpt2": save_pretrained(root / "gpt2", "gpt2"),
        "experts": save_pretrained(root / "experts", "qwen3_moe"),
    }


def pretrained(folder: Path, vocab_size: int = VOCAB, **options: Any) -> PreTrainedModel:
    return load_pretrained(folder, vocab_size, **options)


def adapted(folder: Path, new_tokens: list[int] | None = None, **changes: Any) -> PreTrainedModel:
    model = pretrained(folder)
    adapters.attach(model, PeftConfig(**{**LORA, **changes}), str(folder), None, new_tokens or [], seed=3)
    return model


def train(model: PreTrainedModel, steps: int, lr: float = 1e-2) -> None:
    wrapped = LanguageModel(model)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=lr)
    for _ in range(steps):
        out = wrapped(**BATCH)
        (out.loss_sum / out.n_tokens).backward()
        optimizer.step()
        optimizer.zero_grad()


def logits(model: Any) -> torch.Tensor:
    model.eval()
    if hasattr(model, "set_attn_implementation"):
        model.set_attn_implementation("sdpa")
    with torch.no_grad():
        return model(input_ids=BATCH["input_ids"]).logits


def trained_state(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


KINDS: dict[str, dict[str, Any]] = {
    "lora": {},
    "rslora": {"use_rslora": True, "bias": "all"},
    "dora": {"use_dora": True},
    "pissa": {"init_weights": "pissa"},
    "some": {"target_modules": ["q_proj", "v_proj"]},
    "pattern": {"target_modules": r".*layers\.1\..*(up|down)_proj"},
    "output layer": {"target_modules": ["q_proj", "lm_head"]},
    "embedding": {"target_modules": ["q_proj", "embed_tokens"]},
    "in full": {"modules_to_save": ["embed_tokens", "lm_head"]},
}


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_equal_a_plain_peft_loop(kind: str, bases: dict[str, Path]) -> None:
    """The reference is peft used as documented, with transformers' logits and torch's cross-entropy."""
    assert_gradients_equal(bases["untied"], [], KINDS[kind])


@pytest.mark.parametrize("base", ["tied", "untied"])
@pytest.mark.parametrize("also", [{}, {"modules_to_save": ["embed_tokens"]}], ids=["rows", "in full"])
def test_gradients_of_added_tokens_equal_a_plain_peft_loop(
    base: str, also: dict[str, Any], bases: dict[str, Path]
) -> None:
    assert_gradients_equal(bases[base], NEW, also)


def assert_gradients_equal(base: Path, new_tokens: list[int], changes: dict[str, Any]) -> None:
    ours = adapted(base, new_tokens, **changes)
    with torch.no_grad():  # perturbs the adapter, since A has no gradient while B is zero
        for name, p in ours.named_parameters():
            if p.requires_grad:
                p += 0.05 * torch.randn(p.shape, generator=torch.Generator().manual_seed(len(name)))
    out = LanguageModel(ours)(**BATCH)
    (out.loss_sum / out.n_tokens).backward()

    cfg = adapter_of(ours)
    assert cfg is not None
    theirs = peft.get_peft_model(AutoModelForCausalLM.from_pretrained(base), cfg.config)
    reference = theirs.get_base_model()
    reference.load_state_dict(ours.state_dict())
    loss = torch.nn.functional.cross_entropy(
        theirs(input_ids=BATCH["input_ids"]).logits.flatten(0, 1), BATCH["labels"].flatten()
    )
    loss.backward()
    assert torch.allclose(out.loss_sum / out.n_tokens, loss, rtol=1e-5)
    expected, found = trained_state(reference), trained_state(ours)
    assert expected.keys() == found.keys()
    for name, parameter in expected.items():
        assert parameter.grad is not None, name
        assert torch.allclose(found[name].grad, parameter.grad, rtol=1e-3, atol=1e-5), name


def test_dropout_on_the_output_layer_is_pefts(bases: dict[str, Path]) -> None:
    """The loss never calls the layer, so our own code draws its dropout; the same seed must give peft's loss."""
    ours = adapted(bases["untied"], target_modules=["lm_head"], dropout=0.5)
    ours.get_output_embeddings().lora_B["default"].weight.data.normal_()
    torch.manual_seed(1)
    out = LanguageModel(ours)(**BATCH)
    torch.manual_seed(1)
    ours.set_attn_implementation("sdpa")
    theirs = ours(input_ids=BATCH["input_ids"]).logits.flatten(0, 1)
    loss = torch.nn.functional.cross_entropy(theirs, BATCH["labels"].flatten(), reduction="sum")
    assert torch.allclose(out.loss_sum, loss, rtol=1e-5)


@pytest.mark.parametrize("base", ["untied", "gpt2"])
@pytest.mark.parametrize("kind", ["lora", "rslora", "dora"])
def test_every_b_moves_and_the_base_does_not(base: str, kind: str, bases: dict[str, Path]) -> None:
    model = adapted(bases[base], **KINDS[kind] | {"bias": "none"})
    before = {name: p.clone() for name, p in model.named_parameters() if not p.requires_grad}
    train(model, steps=10)
    after = dict(model.named_parameters())
    b_matrices = [p for name, p in after.items() if "lora_B" in name]
    assert len(b_matrices) == {"untied": 14, "gpt2": 8}[base], "every linear layer but the output"
    assert all(p.abs().max() > 0 for p in b_matrices)
    assert all(torch.equal(after[name], p) for name, p in before.items())


def test_activation_checkpointing_changes_no_gradient(bases: dict[str, Path]) -> None:
    """With frozen embeddings no input of a block requires a gradient, which reentrant checkpointing can't handle."""
    found = []
    for checkpointing in (False, True):
        model = adapted(bases["untied"], dropout=0.1)
        if checkpointing:
            enable_activation_checkpointing(model)
        torch.manual_seed(0)
        LanguageModel(model)(**BATCH).loss_sum.backward()
        found.append({name: p.grad for name, p in trained_state(model).items()})
    assert found[0].keys() == found[1].keys()
    assert all(torch.equal(g, found[1][name]) for name, g in found[0].items())
    assert any(g.abs().max() > 0 for g in found[0].values())


@pytest.mark.parametrize("by_root", [False, True], ids=["lora", "rslora"])
@pytest.mark.parametrize("kind", ["pissa", "pissa_niter_4", "olora"])
def test_what_is_moved_from_the_base_is_accounted_for(
    kind: str, by_root: bool, bases: dict[str, Path], tmp_path: Path
) -> None:
    base = AutoModelForCausalLM.from_pretrained(bases["untied"])
    expected = logits(base)
    model = adapted(bases["untied"], init_weights=kind, use_rslora=by_root)
    assert torch.allclose(logits(model), expected, atol=1e-4), "at the start the model is the base"
    weight = model.model.layers[0].self_attn.q_proj.base_layer.weight
    assert not torch.allclose(weight, base.model.layers[0].self_attn.q_proj.weight, atol=1e-2)
    model.train()
    train(model, steps=3)
    live, adapter = logits(model), adapter_of(model)
    assert adapter is not None
    assert not torch.allclose(live, expected, atol=1e-1)
    lora_files.write_adapter(adapter, tmp_path / "adapter", torch.float32)
    loaded = peft.PeftModel.from_pretrained(base, tmp_path / "adapter")
    assert torch.allclose(logits(loaded), live, atol=1e-4), "exported, it works on the untouched base"
    with pytest.raises(UserError, match="moved its weights"), disabled(model):
        pass


def test_a_decomposition_that_differs_is_put_back(bases: dict[str, Path]) -> None:
    """Another machine's SVD may give other A and B: the base must be what remained without the checkpoint's A and B."""
    first, second = (adapted(bases["untied"], init_weights="pissa") for _ in range(2))
    ours, theirs = adapter_of(first), adapter_of(second)
    assert ours is not None
    assert theirs is not None
    assert all(torch.equal(t, theirs.start[name]) for name, t in ours.start.items()), "the same seed, the same start"
    start = {name: t + 0.01 * torch.randn_like(t) for name, t in theirs.start.items()}
    restore_start(first, start)
    for name, module in first.named_modules():
        if hasattr(module, "lora_A"):
            a, b = start[f"{name}.lora_A.default.weight"], start[f"{name}.lora_B.default.weight"]
            base = AutoModelForCausalLM.from_pretrained(bases["untied"]).get_submodule(name).weight
            assert torch.allclose(module.base_layer.weight, base - 2.0 * b @ a, atol=1e-5)


def test_disabled_is_the_base(bases: dict[str, Path]) -> None:
    model = adapted(bases["tied"], NEW)
    train(model, steps=2)
    expected = logits(AutoModelForCausalLM.from_pretrained(bases["tied"]))
    assert not torch.allclose(logits(model), expected, atol=1e-3)
    with disabled(model):
        assert torch.allclose(logits(model), expected, atol=1e-5)
        hidden = LanguageModel(model)(**BATCH)
    base = LanguageModel(pretrained(bases["tied"]))(**BATCH)
    assert torch.allclose(hidden.loss_sum, base.loss_sum, rtol=1e-6)


def test_experts_that_share_one_tensor_are_adapted(tmp_path: Path) -> None:
    """transformers keeps a layer's experts in one parameter, which LoRA on linear layers alone would leave out."""
    model = adapted(save_pretrained(tmp_path / "experts", "qwen3_moe"))
    experts = {n: p for n, p in trained_state(model).items() if ".experts." in n and "lora_B" in n}
    assert len(experts) == 2 * 2  # both products of both layers
    train(model, steps=2)
    assert all(p.abs().max() > 0 for p in experts.values())
    live = logits(model)
    assert torch.allclose(logits(merged(model)), live, atol=1e-4)


def test_the_plan_names_what_is_adapted(bases: dict[str, Path]) -> None:
    """peft's all-linear adapts some families' routers, which few expect."""
    model = adapted(bases["experts"])
    found = {n for n, m in model.named_modules() if hasattr(m, "lora_A") and m.lora_A}
    assert any(name.endswith("mlp.gate") for name in found)
    said = describe_adapter(adapter_of(model), PeftConfig(**LORA)).partition(", on ")[2].split(", ")
    assert said == ["experts.down_proj", "experts.gate_up_proj", "gate.weight", "k_proj", "o_proj", "q_proj", "v_proj"]


@pytest.mark.parametrize("names", [["lm_head"], ["embed_tokens", "lm_head"], ["lm_head", "embed_tokens"]], ids=str)
def test_a_tied_matrix_is_trained_once_whatever_it_is_called(names: list[str], bases: dict[str, Path]) -> None:
    made, one = (adapted(bases["tied"], modules_to_save=n) for n in (names, ["embed_tokens"]))
    for model in (made, one):
        train(model, steps=2)
    assert trained_state(made).keys() == trained_state(one).keys()
    live = logits(one)
    assert torch.equal(logits(made), live)
    assert torch.allclose(logits(merged(made)), live, atol=1e-5)


@pytest.mark.parametrize("base", ["tied", "untied", "gpt2"])
@pytest.mark.parametrize("kind", ["lora", "dora", "in full", "rows"])
def test_merged_and_reloaded_equal_the_live_model(base: str, kind: str, bases: dict[str, Path], tmp_path: Path) -> None:
    names = {"gpt2": ["wte"]}.get(base, ["embed_tokens"])
    changes = {"modules_to_save": names} if kind == "in full" else KINDS.get(kind, {})
    model = adapted(bases[base], NEW if kind == "rows" else [], **changes)
    train(model, steps=3)
    live = logits(model)
    plain = merged(model)
    assert plain.config.tie_word_embeddings == (base != "untied"), "what is tied stays tied"
    assert not any("lora" in name for name, _ in plain.named_modules())
    plain.save_pretrained(tmp_path)
    reloaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    for found in (logits(plain), logits(reloaded)):
        assert (found - live).abs().max() < 1e-5 * max(1.0, live.abs().max())


def test_an_adapter_is_continued(bases: dict[str, Path], tmp_path: Path) -> None:
    model = adapted(bases["untied"], NEW, use_rslora=True)
    train(model, steps=3)
    live, adapter = logits(model), adapter_of(model)
    assert adapter is not None
    lora_files.write_adapter(adapter, tmp_path / "a", torch.float32)
    assert lora_files.adapter_token_ids(str(tmp_path / "a")) == NEW
    again = adapted(bases["untied"], NEW, adapter=str(tmp_path / "a"), r=64, dropout=0.25)
    found = adapter_of(again)
    assert found is not None
    assert (found.config.r, found.config.lora_dropout) == (4, 0.25), "its own rank, this run's dropout"
    assert torch.equal(logits(again), live)
    assert trained_state(again).keys() == trained_state(model).keys()
    with pytest.raises(UserError, match=r"no embedding row for the added token 250"):
        adapted(bases["untied"], [250, *NEW], adapter=str(tmp_path / "a"))
    with pytest.raises(UserError, match="can't be loaded onto this model"):
        adapted(bases["gpt2"], adapter=str(tmp_path / "a"))
    with pytest.raises(UserError, match=r"peft\.adapter=.*nowhere can't be loaded"):
        adapted(bases["untied"], adapter=str(tmp_path / "nowhere"))


@pytest.mark.parametrize(
    ("base", "changes", "message"),
    [
        ("untied", {"target_modules": ["q_proj", "v_prj"]}, "'v_prj' matches no module.*v_proj"),
        ("untied", {"target_modules": "q_proj"}, r"a pattern must match the whole name.*\(there are q_proj"),
        ("untied", {"target_modules": "(q"}, "not a regular expression"),
        ("untied", {"target_modules": ["input_layernorm"]}, "peft refuses this adapter: Target module"),
        ("untied", {"modules_to_save": ["embeddings"]}, r"peft\.modules_to_save: 'embeddings' matches no module"),
        ("tied", {"target_modules": ["q_proj", "lm_head"]}, "one matrix"),
        ("tied", {"target_modules": ["embed_tokens"]}, "one matrix"),
        ("untied", {"target_modules": ["lm_head"], "use_dora": True}, "use_dora=true on the output layer"),
        ("experts", {"init_weights": "pissa"}, r"init_weights=pissa\): set peft\.init_weights=default.*stacked"),
        ("experts", {"init_weights": "olora"}, r"init_weights=olora\): set peft\.init_weights=default"),
        ("experts", {"init_weights": "orthogonal"}, r"init_weights=orthogonal\): set peft\.init_weights=default"),
    ],
)
def test_what_can_not_be_right_is_refused(
    base: str, changes: dict[str, Any], message: str, bases: dict[str, Path]
) -> None:
    with pytest.raises(UserError, match=f"(?s){message}"):
        adapted(bases[base], **changes)


LEFT_OUT = {  # layers that are called, and those that aren't, give no tensor, or share their matrix
    "falcon": ({"dense", "query_key_value", "dense_h_to_4h", "dense_4h_to_h"}, set()),
    "falcon_h1": ({"in_proj", "q_proj", "o_proj", "down_proj"}, {"out_proj"}),
    "mamba": ({"in_proj"}, {"out_proj", "x_proj", "dt_proj"}),
    "zamba2": ({"in_proj"}, {"out_proj", "q_proj", "o_proj"}),
}


@pytest.mark.parametrize("family", LEFT_OUT)
def test_only_layers_that_are_called_are_adapted(family: str) -> None:
    model = build(config_of(Variant(family, {})))
    adapters.attach(model, PeftConfig(**LORA), "base", None, [], seed=3)
    on = {name.rpartition(".")[2] for name, module in model.named_modules() if hasattr(module, "lora_A")}
    called, others = LEFT_OUT[family]
    assert called <= on
    assert not others & on


def test_an_adapter_that_peft_would_not_read_again_is_refused() -> None:
    with pytest.raises(UserError, match=r"peft doesn't read an adapter on down_proj, .* of a LagunaForCausalLM back"):
        adapters.attach(build(config_of(Variant("laguna", {}))), PeftConfig(**LORA), "base", None, [], seed=3)


def test_what_is_advised_for_stacked_experts_works(bases: dict[str, Path]) -> None:
    model = adapted(bases["experts"], target_modules=["q_proj", "v_proj"], init_weights="pissa")
    assert adapter_of(model) is not None


def test_a_tokenizer_of_another_model_is_no_reason_to_grow(bases: dict[str, Path]) -> None:
    assert pretrained(bases["tied"], VOCAB + 2, new_tokens=[VOCAB, VOCAB + 1]).config.vocab_size == VOCAB + 2
    with pytest.raises(UserError, match="use its own, tokenizer=hub"):
        pretrained(bases["tied"], VOCAB + 2, new_tokens=[VOCAB + 1])


def test_groups_by_adapter_names(bases: dict[str, Path]) -> None:
    """LoRA+ (arXiv:2402.12354): B gets a higher learning rate than A, and rows of new tokens get their own rate."""
    model = adapted(bases["untied"], NEW)
    rules = [{"pattern": "lora_B", "lr": 0.016}, {"pattern": "lora_A"}, {"pattern": "trainable_tokens", "lr": 5e-4}]
    cfg = OptimizerConfig(name="adamw", lr=1e-3, weight_decay=0.0, groups=rules)
    groups = {g["name"]: g for g in parameter_groups(model.named_parameters(), cfg)}
    rates = {name.partition("/")[0]: (g["lr"], len(g["params"])) for name, g in groups.items()}
    assert rates == {"lora_B": (0.016, 14), "lora_A": (1e-3, 14), "trainable_tokens": (5e-4, 2)}


def test_a_checkpoint_holds_what_is_trained_and_nothing_else(bases: dict[str, Path]) -> None:
    model = adapted(bases["untied"], NEW)
    state = without_frozen(model, model.state_dict())
    assert state.keys() == trained_state(model).keys()
    check_weights(model, state)
    missing = sorted(state)[0]
    with pytest.raises(UserError, match=rf"lacks {missing} \(1 in all\)"):
        check_weights(model, {k: v for k, v in state.items() if k != missing})
    with pytest.raises(UserError, match=r"holds extra"):
        check_weights(model, {**state, "extra": state[missing]})
    full = pretrained(bases["tied"])
    assert without_frozen(full, full.state_dict()).keys() == full.state_dict().keys()
    full.model.embed_tokens.requires_grad_(False)  # plain freezing, without an adapter
    assert without_frozen(full, full.state_dict()).keys() == trained_state(full).keys()


def test_a_large_base_is_read_once_until_it_changes(bases: dict[str, Path], tmp_path: Path) -> None:
    base, known = tmp_path / "base", tmp_path / "files.json"
    base.mkdir()
    weights = base / "model.safetensors"
    weights.write_bytes(b"a" * REMEMBER_FROM)
    model = pretrained(bases["gpt2"])
    digest = hashlib.sha256(hashlib.sha256(b"a" * REMEMBER_FROM).digest()).hexdigest()[:16]
    assert base_identity(model, str(base), Facts(tmp_path)) == digest
    facts = json.loads(known.read_text())
    facts[str(weights)]["sha256"] = "ab" * 32  # a hash that only the remembered facts contain
    known.write_text(json.dumps(facts))
    assert base_identity(model, str(base), Facts(tmp_path)) == hashlib.sha256(b"\xab" * 32).hexdigest()[:16]
    weights.write_bytes(b"a" * REMEMBER_FROM)
    assert base_identity(model, str(base), Facts(tmp_path)) == digest


def test_flops_of_a_frozen_base(bases: dict[str, Path]) -> None:
    """Per token, a frozen weight costs 2 FLOPs forward and 2 for its input's gradient, a trained one 2 more."""
    plain, model = pretrained(bases["untied"]), adapted(bases["untied"])
    total, trained, tables = flops.parameter_counts(model)
    assert trained == sum(p.numel() for p in trained_state(model).values())
    assert total - trained == flops.parameter_counts(plain)[0]
    attention = flops.flops_per_token(plain, 32) - 6 * (flops.parameter_counts(plain)[0] - tables)
    expected = (4 + 2 * trained / total) * (total - tables) + attention
    assert flops.flops_per_token(model, 32) == pytest.approx(expected)
