"""Hybrids train on packed rows as transformers' own code on rows of one document: losses, gradients, weights."""

import copy
from itertools import pairwise

import pytest
import torch
from torch.nn.utils.rnn import pad_sequence

from family_variants import Variant, build, config_of
from helpers_models import packed
from lmtrain.models import mixers, probe
from lmtrain.models.blocks import compile_model, enable_activation_checkpointing
from lmtrain.models.language_model import LanguageModel

SHORT = Variant("lfm2", {"layer_types": ["conv", "full_attention"] * 3})
NONE = Variant("gemma3_text", {"layer_types": ["sliding_attention", "full_attention"] * 3})  # attention alone
HYBRIDS = [
    SHORT,
    NONE,
    Variant("granitemoehybrid", {"layer_types": ["mamba", "attention"] * 3, "router_aux_loss_coef": 0.0}),
    Variant("nemotron_h", {}),
    Variant("falcon_h1", {}),
    Variant("qwen3_5_text", {}),
    Variant("jamba", {"router_aux_loss_coef": 0.0}),  # its blocks don't tell the mixers of documents
]


def both(variant: Variant) -> tuple[LanguageModel, LanguageModel]:
    """Returns lmtrain's model, and transformers' own code with the same weights, both in training mode."""
    model = build(config_of(variant))
    with torch.no_grad():  # smaller weights, so that six layers don't enlarge rounding errors
        for parameter in model.parameters():
            if parameter.ndim >= 2:
                parameter.mul_(0.5)
    theirs = copy.deepcopy(model)
    theirs.set_attn_implementation("eager")
    probe.set_attention("auto", model, seq_len=20)
    assert model.unpacked_because is None
    assert bool(model.mixers) == (variant is not NONE)
    return LanguageModel(model).train(), LanguageModel(theirs).train()


def a_row_each(batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Returns the documents as rows of their own, padded at their ends."""
    ids = batch["input_ids"].flatten()
    rows = [ids[a:b] for a, b in pairwise(batch["cu_seqlens"].tolist())]
    labels = [torch.cat([row[1:], torch.tensor([-100])]) for row in rows]
    return {"input_ids": pad_sequence(rows, True, 3), "labels": pad_sequence(labels, True, -100)}


def step(model: LanguageModel, batch: dict[str, torch.Tensor]) -> tuple[float, float]:
    """Takes a step of SGD on the mean loss over all tokens; returns the loss and the gradient's norm."""
    model.zero_grad()
    out = model(**batch)
    loss = out.loss_sum / out.n_tokens
    loss.backward()
    trained = [p for p in model.parameters() if p.grad is not None]
    norm = torch.stack([p.grad.double().norm() for p in trained]).norm().item()
    with torch.no_grad():
        for p in trained:
            p -= 1e-3 / max(norm, 1.0) * p.grad
    return loss.item(), norm


@pytest.mark.parametrize("variant", HYBRIDS, ids=lambda v: v.family)
def test_packed_rows_train_as_documents_alone(variant: Variant) -> None:
    ours, theirs = both(variant)
    # Delta rules: transformers' own gradients for rows of one document and for padded rows differ by 1.9e-5, and a
    # step enlarges that, so each starts from equal weights.
    rel = 1e-6 if variant is SHORT else 3e-5 if variant.family == "qwen3_5_text" else 1e-5
    batch = packed()
    mixed = theirs(batch["input_ids"], batch["labels"])
    assert ours(**batch).nll_sum.item() != pytest.approx(mixed.nll_sum.item(), rel=1e-4)  # borders matter
    for seed in range(5):
        batch = packed(seed=seed)
        if variant.family == "qwen3_5_text":
            theirs.load_state_dict(ours.state_dict())
        found, expected = step(ours, batch), step(theirs, a_row_each(batch))
        assert found == pytest.approx(expected, rel=rel)
    for (name, a), b in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=rel, msg=name)


@pytest.mark.parametrize("variant", [SHORT, HYBRIDS[-1]], ids=lambda v: v.family)
def test_recomputed_activations_change_nothing(variant: Variant) -> None:
    plain, _ = both(variant)
    again = copy.deepcopy(plain)
    enable_activation_checkpointing(again.model)
    assert step(again, packed()) == pytest.approx(step(plain, packed()), rel=1e-6)


@pytest.mark.slow
def test_compiled_short_convolutions_change_nothing() -> None:
    plain, _ = both(SHORT)
    compiled = copy.deepcopy(plain)
    compile_model(compiled.model, backend="aot_eager")
    for seed in range(2):
        batch = packed(seed=seed)
        assert step(compiled, batch) == pytest.approx(step(plain, batch), rel=1e-6)


def test_rows_of_one_document_are_read_by_the_familys_own_code(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = both(SHORT)
    monkeypatch.setattr(mixers, "_convolved", lambda *_: pytest.fail("no documents were given"))
    batch = {k: packed()[k] for k in ("input_ids", "labels")}
    assert ours(**batch).nll_sum.item() == pytest.approx(theirs(**batch).nll_sum.item(), rel=1e-6)
