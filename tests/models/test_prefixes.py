"""Documents that continue a prefix of an earlier document, against the same documents each with its own prefix."""

import numpy as np
import pytest
import torch
from test_attention import CPU_METHODS, assert_near_softmax, call, projections, softmax_attention
from transformers import AutoModelForCausalLM, MistralConfig

from example_files import ExampleWriter
from helpers_models import FAMILIES, VOCAB, tiny, wrapped
from lmtrain.data.examples.documents import Examples
from lmtrain.data.examples.pair_rows import PairRows, common_prompt, lay_answers
from lmtrain.models import attention
from lmtrain.models.documents import Documents, Inputs, Prefixes
from lmtrain.models.language_model import LanguageModel

LENGTHS, SEEN = [7, 5, 2, 1, 4, 1, 6, 6], [0, 3, 3, 2, 0, 4, 0, 6]  # of documents, and of their prefixes, which are ...
STARTS = np.cumsum([0, *LENGTHS])
HOLDS = STARTS[[0, 0, 0, 0, 4, 4, 6, 6]]  # ... in the last document before that has none


def layout(method: str, device: str = "cpu") -> Documents:
    parts = []
    for i, (length, seen) in enumerate(zip(LENGTHS, SEEN, strict=True)):
        parts += [*range(HOLDS[i], HOLDS[i] + seen), *range(STARTS[i], STARTS[i] + length)]
    cu_kv = np.cumsum([0, *(a + b for a, b in zip(LENGTHS, SEEN, strict=True))])
    prefixes = Prefixes(*(torch.tensor(x, device=device) for x in (SEEN, parts, cu_kv)))
    prefixes = prefixes._replace(lengths=prefixes.lengths.int(), cu_kv=prefixes.cu_kv.int())
    cu_seqlens = torch.tensor(STARTS, dtype=torch.int32, device=device)
    return Documents(cu_seqlens, 1, int(STARTS[-1]), method, prefixes)


def visible(window: int | None) -> torch.Tensor:
    """Returns a mask [1, T, T], computed token by token from what each document sees."""
    seen = torch.zeros(1, STARTS[-1], STARTS[-1], dtype=torch.bool)
    for i, (length, prefix) in enumerate(zip(LENGTHS, SEEN, strict=True)):
        tokens = [*range(HOLDS[i], HOLDS[i] + prefix), *range(STARTS[i], STARTS[i] + length)]
        for q in range(prefix, len(tokens)):
            for k in range(q + 1):
                seen[0, tokens[q], tokens[k]] = window is None or q - k < window
    return seen


@pytest.mark.parametrize("window", [None, 1, 4, 100])
@pytest.mark.parametrize("kv_heads", [4, 2])
@pytest.mark.parametrize("method", CPU_METHODS)
@pytest.mark.parametrize("merged", [0, 256])
def test_equals_plain_softmax_attention(
    method: str, kv_heads: int, window: int | None, merged: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lmtrain.models.documents.MERGED", merged)
    q, k, v = projections(kv_heads=kv_heads, rows=1, length=int(STARTS[-1]))
    out = call(q, k, v, documents=layout(method), sliding_window=window)
    expected = softmax_attention(q, k, v, 0.3, visible(window))
    torch.testing.assert_close(out, expected)
    weights = torch.randn_like(out)
    ours = torch.autograd.grad((out * weights).sum(), (q, k, v))
    theirs = torch.autograd.grad((expected * weights).sum(), (q, k, v))
    torch.testing.assert_close(ours, theirs)


@pytest.fixture
def pairs(tmp_path) -> Examples:
    """Writes pairs with prompts and answers of 1 to 9 tokens; in one pair the prompts differ in their last token."""
    generator = np.random.default_rng(0)
    writer = ExampleWriter(tmp_path)
    for i in range(9):
        prompt = generator.integers(0, VOCAB, 1 + i).tolist()
        for side in (0, 1):
            given = [*prompt[:-1], (prompt[-1] + side) % VOCAB] if i == 5 else prompt
            answer = generator.integers(0, VOCAB, 1 + (3 * i + 2 * side) % 9).tolist()
            writer.append([*given, *answer], [False] * len(given) + [True] * len(answer))
    return writer.close()


ALL = np.array([[0, i] for i in range(9)])


def answers(model: LanguageModel, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Returns the log-probabilities of all scored tokens of a micro-batch."""
    prefixes = Prefixes(batch["prefix_lengths"], batch["kv_index"], batch["cu_kv"]) if "kv_index" in batch else None
    return model.log_probs(
        Inputs(batch["input_ids"], batch["position_ids"], batch["cu_seqlens"], prefixes),
        scored=batch["scored"],
        before=batch["before"],
    ).tokens


def mistral(window: int, method: str) -> LanguageModel:
    torch.manual_seed(0)
    config = MistralConfig(
        vocab_size=VOCAB, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, max_position_embeddings=64, sliding_window=window, initializer_range=0.3,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config, attn_implementation=attention.NAME)
    model.documents_attention = method
    return LanguageModel(model)


@pytest.mark.parametrize("method", CPU_METHODS)
@pytest.mark.parametrize("family", [*FAMILIES, "sliding"])
def test_shared_prompts_change_no_log_probability_and_no_gradient(family: str, method: str, pairs: Examples) -> None:
    """Three answers share a prompt; one of a single token and one of several turns, whose first token isn't scored."""
    model = mistral(5, method) if family == "sliding" else wrapped(family, attention=method)
    model = model.eval()
    laid, prompts = [], []
    for i in range(9):
        ids, trained = pairs.read(2 * i)
        laid += [(ids, trained), *((np.r_[ids[: i + 1], more], np.r_[trained[: i + 1], which]) for more, which in
                                       (([i], [True]), ([2, i, 1], [False, True, False])))]  # fmt: skip
        prompts += [0, i + 1, i + 1]
    found = []
    for prefixes in (prompts, None):
        batch = lay_answers(laid, prefixes)
        log_probs = answers(model, batch)
        weights = torch.linspace(-1, 1, len(log_probs))
        found.append((log_probs, torch.autograd.grad((log_probs * weights).sum(), list(model.parameters()))))
    torch.testing.assert_close(found[0], found[1], rtol=1e-4, atol=1e-4)


def test_answers_of_one_pair_do_not_see_each_other(pairs: Examples) -> None:
    model = wrapped("llama").eval()
    batch = PairRows(pairs, share_prompts=True).read(ALL[4:5])
    before = answers(model, batch)
    chosen = batch["scored"][batch["answer"] == 0]
    batch["input_ids"][0, chosen] = (batch["input_ids"][0, chosen] + 1) % VOCAB
    after = answers(model, batch)
    assert torch.equal(before[batch["answer"] == 1], after[batch["answer"] == 1])
    assert not torch.equal(before[batch["answer"] == 0], after[batch["answer"] == 0])


def test_rows_hold_each_prompt_once(pairs: Examples) -> None:
    shared, apart = (PairRows(pairs, share_prompts=share).read(ALL) for share in (True, False))
    prompts = [common_prompt(pairs.read(2 * i), pairs.read(2 * i + 1)) for i in range(9)]
    assert prompts == [1, 2, 3, 4, 5, 5, 7, 8, 9]
    assert int(apart["seen"]) - int(shared["seen"]) == sum(prompts)
    assert PairRows(pairs, share_prompts=True).epoch_tokens == int(shared["seen"])
    assert PairRows(pairs, share_prompts=False).epoch_tokens == int(apart["seen"])
    assert shared["prefix_lengths"].tolist() == [n for prompt in prompts for n in (0, prompt)]
    assert "kv_index" not in apart
    for name in ("input_ids", "position_ids"):  # scored tokens and the tokens before them are the same in both layouts
        for which in ("scored", "before"):
            assert torch.equal(shared[name][0, shared[which]], apart[name][0, apart[which]]), (name, which)
    assert torch.equal(shared["answer"], apart["answer"])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("method", ["varlen", "dense_mask", "slices"])
@pytest.mark.parametrize("window", [None, 4])
def test_methods_on_cuda(method: str, window: int | None) -> None:
    shape = {"kv_heads": 2, "rows": 1, "length": int(STARTS[-1]), "width": 64}
    q, k, v = (x.detach().to("cuda", torch.bfloat16).requires_grad_() for x in projections(**shape))
    out = call(q, k, v, documents=layout(method, "cuda"), sliding_window=window)
    assert_near_softmax(out, (q, k, v), visible(window))


def test_tiny_models_have_no_dropout() -> None:
    """Tiny models have no dropout, which would make the comparisons above noisy."""
    assert all(m.p == 0 for m in tiny("gpt2").modules() if isinstance(m, torch.nn.Dropout))
