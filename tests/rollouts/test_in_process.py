"""The sampler against transformers' `generate`, the trainer's own forward, and the exact distribution."""

import random
from typing import Any

import pytest
import torch
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    Lfm2Config,
    Lfm2ForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from family_variants import Variant, build, config_of
from lmtrain.rollouts import cache_block, step_graph
from lmtrain.rollouts.engine import Request, Sampling, draw
from lmtrain.rollouts.in_process import InProcess

SHAPE: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "initializer_range": 0.15, "bos_token_id": 0,
    "eos_token_id": 1, "pad_token_id": None,
}  # fmt: skip
GPT2: dict[str, Any] = {"vocab_size": 64, "n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 64,
                        "initializer_range": 0.3, "bos_token_id": 0, "eos_token_id": 1}  # fmt: skip
FAMILIES = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**SHAPE)),
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**SHAPE, head_dim=16)),
    "gpt2": lambda: GPT2LMHeadModel(GPT2Config(**GPT2)),
    "lfm2": lambda: Lfm2ForCausalLM(Lfm2Config(**SHAPE, layer_types=["conv", "full_attention", "conv"])),
}
ENDS = tuple(range(1, 64, 4))
NEW = 16


# Families whose cache is their own, or isn't returned, or that can't be padded.
OWN_STATE = ("mamba", "mamba2", "falcon_mamba", "rwkv", "recurrent_gemma", "xlstm", "minimax")


def model_of(family: str) -> PreTrainedModel:
    torch.manual_seed(3)
    if family in OWN_STATE:
        return build(config_of(Variant(family, {})))
    return FAMILIES[family]().eval()


def prompts(count: int = 11) -> list[list[int]]:
    rng = random.Random(0)
    return [[rng.randrange(64) for _ in range(rng.randint(1, 20))] for _ in range(count)]


@pytest.mark.parametrize("at_once", [64, 4])
@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_completions_are_those_of_generate(family: str, at_once: int) -> None:
    """They are equal all at once and four at a time, where waiting prompts replace those that have ended."""
    model = model_of(family)
    found = InProcess(model, at_once).generate([Request(p, 0) for p in prompts()], Sampling(NEW, 0.0, 1.0, ENDS))
    for prompt, completion in zip(prompts(), found, strict=True):
        ids = torch.tensor([prompt])
        expected = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW, do_sample=False,
                                  eos_token_id=list(ENDS), pad_token_id=0)  # fmt: skip
        assert completion.ids == expected[0, len(prompt) :].tolist()
        assert completion.ended == (completion.ids[-1] in ENDS)
    lengths = {len(c.ids) for c in found}
    assert len(lengths) > 1, "no completion ended before the others"


@pytest.mark.parametrize("family", [*FAMILIES, *OWN_STATE])
def test_log_probs_are_the_trainers(family: str) -> None:
    """They agree to 1e-5 in fp32, at a temperature; entropies are those of whole rows of logits."""
    model, sampling = model_of(family), Sampling(NEW, 0.8, 1.0, ENDS)
    requests = [Request(p, 1000 * i + g) for i, p in enumerate(prompts()) for g in range(2)]
    for request, completion in zip(requests, InProcess(model, 6).generate(requests, sampling), strict=True):
        ids = torch.tensor([[*request.prompt, *completion.ids]])
        with torch.no_grad():
            rows = (model(ids, use_cache=False).logits[0, len(request.prompt) - 1 : -1] / 0.8).log_softmax(-1)
        expected = rows[torch.arange(len(completion.ids)), torch.tensor(completion.ids)]
        torch.testing.assert_close(torch.tensor(completion.log_probs), expected, rtol=0, atol=1e-5)
        assert completion.entropy == pytest.approx(-(rows.exp() * rows).sum().item(), abs=1e-3)


@pytest.mark.parametrize("at_once", [64, 6])
@pytest.mark.parametrize("family", FAMILIES)
def test_recorded_steps_sample_the_same(family: str, at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A recorded step, whose shapes are fixed, samples the same; here what it launches is called again instead."""
    model, sampling = model_of(family), Sampling(40, 0.8, 1.0, ENDS[:3])
    requests = [Request(p, 1000 * i + g) for i, p in enumerate(prompts()) for g in range(2)]
    expected = InProcess(model, at_once).generate(requests, sampling)
    recorded = []
    monkeypatch.setattr(cache_block, "HOST", "none")
    monkeypatch.setattr(cache_block, "BLOCK", 20)
    monkeypatch.setattr(step_graph, "record", lambda step: recorded.append(step) or step)
    found = InProcess(model, at_once).generate(requests, sampling)
    assert recorded
    assert [c.ids for c in found] == [c.ids for c in expected]
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(torch.tensor(a.log_probs), torch.tensor(b.log_probs), rtol=0, atol=1e-5)


def test_a_recorded_step_that_does_something_else_is_not_used(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    model, sampling = model_of("llama"), Sampling(40, 0.8, 1.0, ENDS[:3])
    requests = [Request(p, i) for i, p in enumerate(prompts())]
    expected = InProcess(model, 64).generate(requests, sampling)
    monkeypatch.setattr(cache_block, "HOST", "none")
    monkeypatch.setattr(step_graph, "record", lambda step: lambda: None)
    engine = InProcess(model, 64)
    found = engine.generate(requests, sampling)
    assert engine.graphs.usable is False
    assert caplog.text.count("it gives other logits") == 1
    assert [c.ids for c in found] == [c.ids for c in expected]


@pytest.mark.parametrize("at_once", [64, 6])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_next_turn_reads_only_what_is_new(family: str, at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Completions that go on from others are those of whole prompts; keys and values are kept of `at_once` at most."""
    model, sampling, rng = model_of(family), Sampling(NEW, 0.8, 1.0, ENDS), random.Random(1)
    engine, kept = InProcess(model, at_once), {}
    requests = [Request(p, 1000 * i + g) for i, p in enumerate(prompts()) for g in range(2)]
    first = engine.generate(requests, sampling, kept)
    assert len(kept) == (0 if family == "lfm2" else min(at_once, len(requests)))
    before = [[*r.prompt, *c.ids] for r, c in zip(requests, first, strict=True)]
    longer = [[*ids, *(rng.randrange(64) for _ in range(rng.randint(1, 6)))] for ids in before]
    again = [Request(more, 7 + i, len(ids)) for i, (more, ids) in enumerate(zip(longer, before, strict=True))]
    expected, read = engine.generate(again, sampling), []
    model.get_input_embeddings().register_forward_pre_hook(lambda _, args: read.append(args[0].shape))
    found = engine.generate(again, sampling, kept)
    assert [c.ids for c in found] == [c.ids for c in expected]
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(torch.tensor(a.log_probs), torch.tensor(b.log_probs), rtol=0, atol=1e-5)
    if family != "lfm2" and at_once == 64:
        assert max(columns for _, columns in read) <= 1 + 6, "the last sampled token and the new ones"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("at_once", [64, 6])
@pytest.mark.parametrize("family", FAMILIES)
def test_recorded_steps_on_cuda(family: str, at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA graphs sample what the trainer's own forward finds likely, and each family's steps can be recorded."""
    model, sampling = model_of(family).cuda(), Sampling(40, 0.8, 1.0, ENDS[:3])
    requests = [Request(p, 1000 * i + g) for i, p in enumerate(prompts()) for g in range(2)]
    engine = InProcess(model, at_once)
    for request, completion in zip(requests, engine.generate(requests, sampling), strict=True):
        ids = torch.tensor([[*request.prompt, *completion.ids]], device="cuda")
        with torch.no_grad():
            rows = (model(ids, use_cache=False).logits[0, len(request.prompt) - 1 : -1] / 0.8).log_softmax(-1).cpu()
        expected = rows[torch.arange(len(completion.ids)), torch.tensor(completion.ids)]
        torch.testing.assert_close(torch.tensor(completion.log_probs), expected, rtol=0, atol=1e-3)
    assert engine.graphs.usable


def test_a_completion_does_not_depend_on_those_beside_it() -> None:
    model, sampling = model_of("llama"), Sampling(NEW, 1.3, 0.95, ENDS)
    requests = [Request(p, 77 + i) for i, p in enumerate(prompts())]
    together = InProcess(model, 64).generate(requests, sampling)
    assert [c.ids for c in InProcess(model, 3).generate(requests, sampling)] == [c.ids for c in together]
    alone = [InProcess(model, 1).generate([request], sampling)[0].ids for request in requests]
    assert alone == [c.ids for c in together]
    other_keys = [Request(r.prompt, r.key + 1) for r in requests]
    assert [c.ids for c in InProcess(model, 64).generate(other_keys, sampling)] != alone


def test_tokens_are_drawn_with_their_probabilities() -> None:
    logits = torch.tensor([[0.0, 1.0, 2.0, -1.0, -torch.inf]])
    n = 40_000
    for temperature in (1.0, 0.5):
        tokens, log_probs, _ = draw(logits.expand(n, -1), torch.arange(n) * 7919, torch.zeros(n, dtype=torch.int64),
                                    Sampling(1, temperature, 1.0, ()))  # fmt: skip
        expected = (logits[0] / temperature).softmax(0)
        share = torch.bincount(tokens, minlength=5) / n
        assert ((share - expected).abs() <= 4 * (expected * (1 - expected) / n).sqrt()).all()
        torch.testing.assert_close(log_probs, expected.log()[tokens])


def test_top_p_leaves_out_the_unlikely() -> None:
    logits = torch.tensor([[0.1, 0.5, 0.05, 0.35]]).log()
    n = 20_000
    tokens, log_probs, _ = draw(logits.expand(n, -1), torch.arange(n), torch.arange(n) % 5, Sampling(1, 1.0, 0.8, ()))
    share = torch.bincount(tokens, minlength=4) / n
    torch.testing.assert_close(share, torch.tensor([0.0, 0.5, 0.0, 0.35]) / 0.85, rtol=0, atol=0.02)
    torch.testing.assert_close(log_probs, logits[0][tokens])  # of the whole distribution, as the trainer computes them


@pytest.mark.parametrize(("temperature", "top_p"), [(0.0, 1.0), (1.0, 1.0), (1.0, 0.8)])
def test_ids_beyond_the_vocabulary_are_never_drawn(temperature: float, top_p: float) -> None:
    """Log-probabilities stay those of the whole distribution, which the trainer computes."""
    n, logits = 2000, torch.tensor([[0.0, 1.0, 0.5, 3.0, 2.0]])
    sampling = Sampling(1, temperature, top_p, (), vocabulary=3)
    tokens, log_probs, _ = draw(logits.expand(n, -1), torch.arange(n), torch.zeros(n, dtype=torch.int64), sampling)
    assert tokens.max() <= 2
    torch.testing.assert_close(log_probs, logits.log_softmax(-1)[0, tokens])


def test_top_p_takes_the_fewest_tokens_that_reach_it() -> None:
    """The nucleus of Holtzman et al. 2020: a share of just 0.5 is reached by the token that has it."""
    logits, n = torch.tensor([[0.25, 0.5, 0.125, 0.125]]).log(), 500
    for top_p, drawn in ((0.5, {1}), (0.51, {0, 1}), (0.75, {0, 1}), (0.76, {0, 1, 2}), (1.0, {0, 1, 2, 3})):
        sampling = Sampling(1, 1.0, top_p, ())
        tokens, _, _ = draw(logits.expand(n, -1), torch.arange(n), torch.zeros(n, dtype=torch.int64), sampling)
        assert set(tokens.tolist()) == drawn, top_p
