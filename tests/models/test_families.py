"""Every causal language model family of transformers is right to 1e-6 or refused with a message, never silently wrong.

The reference is transformers' own loss for each document alone, with its own eager attention.
"""

import copy
from itertools import pairwise

import numpy as np
import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, LlamaForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from family_variants import EXCLUDED, PROBED, Variant, build, config_of, variants
from helpers_models import packed
from lmtrain.data.examples.pair_rows import PairRows
from lmtrain.errors import UserError
from lmtrain.models import build as builder
from lmtrain.models import probe
from lmtrain.models.documents import Inputs, Prefixes
from lmtrain.models.language_model import LanguageModel
from lmtrain.models.probe import TESTED, WINDOW

RTOL = {"zamba": 1e-5}  # zamba has 76 layers; all other families have 1e-6
ROW = 10**6  # a data.seq_len longer than every window


def lmtrain_model(model) -> LanguageModel:
    """Prepares a model as build_model does for a model of this config."""
    builder._settle_config(model.config)
    builder._let_padding_learn(model)
    probe.set_attention("auto", model, ROW)
    return LanguageModel(model).eval()


def documents(batch) -> list[torch.Tensor]:
    ids = batch["input_ids"].flatten()
    return [ids[a:b] for a, b in pairwise(batch["cu_seqlens"].tolist())]


def reference(model, alone: list[torch.Tensor]) -> torch.Tensor:
    """Returns the loss summed over the documents, each run by itself."""
    model.set_attn_implementation("eager")
    losses = [
        model(ids[None], labels=ids[None], use_cache=False).loss * (len(ids) - 1) for ids in alone if len(ids) > 1
    ]
    return torch.stack(losses).double().sum()


def padded(alone: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    """Returns one row per document, padded on the right with tokens of the vocabulary."""
    longest = max(map(len, alone))
    ids = torch.full((len(alone), longest), 3)
    labels = torch.full_like(ids, -100)
    for row, tokens in enumerate(alone):
        ids[row, : len(tokens)] = tokens
        labels[row, : len(tokens) - 1] = tokens[1:]
    return {"input_ids": ids, "labels": labels}


class Answers:
    """Two answers to one prompt, with the interface that PairRows reads."""

    def __init__(self) -> None:
        prompt, chosen, rejected = (
            packed(seed=1)["input_ids"][0][part] for part in (slice(6), slice(6, 11), slice(11, 20))
        )
        self.examples = [torch.cat([prompt, answer]) for answer in (chosen, rejected)]
        self.shards = ()  # no row has a margin

    def __len__(self) -> int:
        return len(self.examples)

    def read(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        ids = self.examples[index].numpy()
        return ids, np.arange(len(ids)) >= 6


def answer_log_probs(model: LanguageModel, rows: PairRows) -> torch.Tensor:
    batch = rows.read(np.array([[0, 0]]))
    prefixes = Prefixes(batch["prefix_lengths"], batch["kv_index"], batch["cu_kv"]) if "kv_index" in batch else None
    inputs = Inputs(batch["input_ids"], batch.get("position_ids"), batch.get("cu_seqlens"), prefixes)
    tokens = model.log_probs(inputs, scored=batch["scored"], before=batch["before"]).tokens.double()
    return torch.zeros(2, dtype=torch.float64).index_add(0, batch["answer"], tokens)


def reference_log_probs(model, answers: Answers) -> torch.Tensor:
    """Returns each answer's summed token log-probabilities, with each sequence run by itself."""
    sums = []
    for ids in answers.examples:
        log_probs = model(ids[None], use_cache=False).logits[0].double().log_softmax(-1)
        sums.append(log_probs[:-1].gather(1, ids[1:, None])[5:].sum())
    return torch.stack(sums)


def refused(message: str, model) -> str:
    assert type(model).__name__ in message
    assert "\n" not in message
    return f"refused: {message}"


@torch.no_grad()
def outcome(variant: Variant) -> str:
    """Returns "packed", or "unpacked" or "refused" with the reason; fails where a number differs from transformers'."""
    model = build(config_of(variant))
    theirs = copy.deepcopy(model)
    batch = packed()
    alone = documents(batch)
    try:
        ours = lmtrain_model(model)
    except UserError as error:
        return refused(str(error), model)
    rtol = RTOL.get(variant.family, 1e-6)
    expected, answers = reference(theirs, alone).item(), Answers()
    expected_answers = reference_log_probs(theirs, answers)
    found = ours(**padded(alone)).nll_sum.item()
    assert found == pytest.approx(expected, rel=rtol), f"{variant}: padded rows"
    pairs = PairRows(answers, share_prompts=ours.unpacked_because is None)
    if ours.unpacked_because is not None:
        with pytest.raises(UserError, match="isolate"):
            ours(**batch)
        pairs.pad()
    else:
        assert ours(**batch).nll_sum.item() == pytest.approx(expected, rel=rtol), f"{variant}: packed rows"
    torch.testing.assert_close(
        answer_log_probs(ours, pairs), expected_answers, rtol=rtol, atol=0, msg=f"{variant}: DPO"
    )
    return "packed" if ours.unpacked_because is None else f"unpacked: {ours.unpacked_because}"


# One representative for each way in which families differ.
REPRESENTATIVE = [
    Variant("gpt2", {}),  # learned positions
    Variant("phimoe", {"sliding_window": 64}),  # its window isn't passed to the attention
    Variant("gemma2", {}),  # capped scores, layers with and without a window
    Variant("gpt_oss", {}),  # attention sinks
    Variant("cohere2", {}),  # some layers without positions
    Variant("deepseek_v3", {}),  # latent keys and values
    Variant("nemotron", {}),  # its blocks don't pass document boundaries to the attention
    Variant("minimax", {}),  # lightning attention
    Variant("mamba", {}),
    Variant("lfm2", {"layer_types": ["conv", "full_attention"] * 3}),
    Variant("bloom", {}),  # ALiBi, its own attention
    Variant("deepseek_v32", {}),  # selects its keys
    Variant("bert", {}),  # not causal
]
UNPACKED = {"phimoe", "mamba", "bloom", "deepseek_v32"}


@pytest.mark.parametrize("variant", REPRESENTATIVE, ids=str)
def test_a_family_is_right_or_refused(variant):
    found = outcome(variant).partition(":")[0]
    assert found == ("unpacked" if variant.family in UNPACKED else "refused" if variant.family == "bert" else "packed")


@pytest.mark.slow
def test_every_family_is_right_or_refused():
    """About 250 variants are right or refused; families not probed before a run must be right in packed rows."""
    outcomes: dict[str, set[str]] = {}
    wrong = []
    for variant in variants():
        try:
            outcomes.setdefault(variant.family, set()).add(outcome(variant).partition(":")[0])
        except AssertionError as error:
            wrong.append(f"{variant}: {error}")
    assert not wrong
    assert {family for family, found in outcomes.items() if found == {"packed"}} >= set(TESTED)


def test_every_family_of_transformers_is_in_the_sweep():
    """A new release of transformers brings new families; each has to be added to a list and the sweep run again."""
    seen = {*TESTED, *PROBED, *EXCLUDED}
    new = set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES) - seen
    assert not new, (
        f"the sweep doesn't know {sorted(new)}: add them to PROBED (family_variants.py) or tested (probe.yaml)"
    )
    assert not set(TESTED) & set(PROBED)


def test_the_probe_draws_no_random_numbers_and_looks_at_no_weights():
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(CONFIG_MAPPING["nemotron"](num_key_value_heads=8))
    before = torch.get_rng_state()
    found = probe.support(model, ROW)
    assert found.attention is None
    assert found.documents is None
    assert found.mixers
    assert torch.equal(torch.get_rng_state(), before)


def test_a_family_is_probed_once_for_each_config_of_it(monkeypatch):
    """A start with a budget asks several times, and a deep model's test took half a second each time."""
    built, real = [], probe.tiny_copy
    monkeypatch.setattr(probe, "tiny_copy", lambda *args: built.append(args) or real(*args))
    monkeypatch.setattr(probe, "_KNOWN", {})
    models = [build(config_of(Variant("qwen3", {"attention_bias": bias}))) for bias in (False, False, True)]
    first, second, _ = (probe.support(model, ROW) for model in models)
    assert first is second
    assert len(built) == 2, "another config is another model"


def test_a_window_that_rows_never_fill_needs_no_support():
    model = AutoModelForCausalLM.from_config(config_of(Variant("phimoe", {"sliding_window": 64})))
    assert model.config.sliding_window == WINDOW
    assert probe.support(model, WINDOW).documents is None
    assert probe.support(model, WINDOW + 1).documents is not None


def test_an_attention_that_does_not_fit_is_refused_where_it_was_asked_for():
    model = build(config_of(Variant("bloom", {})))
    with pytest.raises(UserError, match=r"model\.attention=slices doesn't go with BloomForCausalLM.*set it to auto"):
        probe.set_attention("slices", model, ROW)
    probe.set_attention("auto", model, ROW)
    assert model.own_attention_because is not None


def test_code_of_others_is_probed_whatever_it_calls_its_family():
    class Blind(LlamaForCausalLM):
        """A model that passes no keyword arguments on to its layers, as custom code of a hub model may."""

        def __init__(self, config) -> None:
            super().__init__(config)
            for layer in self.model.layers:
                whole = layer.self_attn.forward
                layer.self_attn.forward = lambda *args, documents=None, whole=whole, **kwargs: whole(*args, **kwargs)

    config = config_of(Variant("llama", {}))
    assert probe.support(LlamaForCausalLM(config), ROW).documents is None
    assert probe.support(Blind(config), ROW).documents is not None
