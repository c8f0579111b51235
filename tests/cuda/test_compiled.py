"""torch.compile makes a fixed number of graphs of the decoder blocks, without breaks, however lengths change.

Graphs are traced but not compiled to kernels (backend eager): breaks and recompilations happen before that.
"""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch._dynamo
from torch import Tensor
from torch._dynamo.utils import counters
from torch.utils._python_dispatch import TorchDispatchMode

from helpers_models import packed, tiny
from lmtrain.adapters.lora import attach
from lmtrain.adapters.trainable import disabled
from lmtrain.config.compose import check, compose
from lmtrain.losses import cross_entropy as losses
from lmtrain.models import attention, fp8, language_model
from lmtrain.models.blocks import compile_model, evaluating
from lmtrain.models.documents import Inputs, Prefixes
from lmtrain.models.language_model import LanguageModel

# Packed rows: the length of rows, the lengths of documents and the number of documents all change.
MICRO_BATCHES = [[[5, 9, 2, 1, 3], [7, 7, 6]], [[8, 4, 3], [10, 5]], [[8, 4, 3, 5, 5], [10, 15]], [[6, 9], [5, 10]]]
GEMMA3: dict[str, Any] = {
    "num_hidden_layers": 3, "num_key_value_heads": 2, "head_dim": 16, "intermediate_size": 48,
    "extra": {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention", "full_attention"]},
}  # fmt: skip


@torch._dynamo.allow_in_graph
def varlen(
    q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_k: Tensor, max_q: int, max_k: int, *, scale: Any,
    window_size: tuple[int, int], enable_gqa: bool = False,
) -> Tensor:  # fmt: skip
    """Replaces torch's varlen_attn, which runs on CUDA only: gives its shapes and checks the dtypes it requires."""
    assert {t.dtype for t in (q, k, v)} <= {torch.bfloat16, torch.float16}
    assert cu_q.dtype == cu_k.dtype == torch.int32
    return q + (k.mean() + v.mean() + cu_q.sum() + cu_k.sum())


@pytest.fixture(autouse=True)
def _stand_in(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(language_model, "choose_method", lambda *_: "varlen")
    monkeypatch.setattr(attention, "varlen_attn", varlen)
    monkeypatch.setattr(attention, "FEWER_KEY_HEADS", True)
    monkeypatch.setattr(losses, "CPU_BLOCK_BYTES", 0)  # up to which the loss isn't in chunks, nor compiled
    monkeypatch.setattr(LanguageModel, "_chunk", lambda *_: 10)
    monkeypatch.setattr(losses, "_compile_block", lambda: torch.compile(losses._block, backend="eager"))
    torch._dynamo.reset()
    counters.clear()
    with torch.autocast("cpu", torch.bfloat16):
        yield
    torch._dynamo.reset()


def compiled(family: str, changing_lengths: bool = True, **changes: Any) -> LanguageModel:
    # The loss has chunks of 10 tokens: its graphs must not depend on how many are left for the last chunk.
    model = LanguageModel(tiny(family, **changes))
    compile_model(model.model, changing_lengths, backend="eager")
    return model


def graphs() -> int:
    """Returns the number of graphs made so far, after checking that no graph was broken."""
    assert dict(counters["graph_break"]) == {}
    return counters["stats"]["unique_graphs"]


@pytest.mark.parametrize("family", ["gpt2", "llama", "qwen3", "qwen3_moe"])
def test_pretraining(family: str) -> None:
    model = compiled(family, changing_lengths=False)
    for length in (20, 20, 20):
        batch = packed([[length]] * 3)
        model(input_ids=batch["input_ids"], labels=batch["labels"]).loss_sum.backward()
    assert graphs() == 2  # one for the blocks, one for the loss


@pytest.mark.parametrize(
    ("family", "changes", "variants"),
    [("llama", {}, 1), pytest.param("gemma3_text", GEMMA3, 2, marks=pytest.mark.slow)],
)
def test_packed_rows(family: str, changes: dict[str, Any], variants: int) -> None:
    """Each variant of layer (sliding or not) needs one graph, and so does the loss; validation needs as many again."""
    model = compiled(family, **changes)
    for lengths in MICRO_BATCHES:
        model(**packed(lengths)).loss_sum.backward()
    assert graphs() == variants + 1
    for lengths in MICRO_BATCHES:
        with torch.no_grad(), evaluating(model):
            model(**packed(lengths))
    assert graphs() == 2 * (variants + 1)


def test_layers_of_eight_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    float8 = pytest.importorskip("torchao.float8")
    monkeypatch.setattr(fp8, "why_not", lambda trainer: None)
    options = float8.Float8LinearConfig(emulate=True, pad_inner_dim=True)
    monkeypatch.setattr(fp8, "recipe", lambda config: options)
    model = LanguageModel(tiny("llama", intermediate_size=1040))
    fp8.Fp8().change_model(model.model, check(compose(["trainer.precision=fp8"])))
    compile_model(model.model, changing_lengths=True, backend="eager")
    for lengths in MICRO_BATCHES:
        model(**packed(lengths)).loss_sum.backward()
    assert graphs() == 2


def test_packed_rows_with_dropout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(language_model, "choose_method", lambda *_: "dense_mask")
    model = compiled("llama")
    for lengths in MICRO_BATCHES:
        model(**packed(lengths)).loss_sum.backward()
    assert graphs() == 2


def test_preferences() -> None:
    """The policy runs with gradients and dropout, the reference without."""
    model = compiled("llama")
    for number, lengths in enumerate(MICRO_BATCHES):
        batch = packed(lengths)
        prefixes = shared_prompts(batch["cu_seqlens"], 2 * (number % 2))
        with torch.no_grad(), evaluating(model):
            log_probs(model, batch, prefixes)
        log_probs(model, batch, prefixes).sum().backward()
    assert graphs() == 4  # blocks and loss, each with and without gradients


@pytest.mark.slow
def test_preferences_of_an_adapter() -> None:
    """The policy runs with its adapter, the reference without; in validation the policy has no gradients either."""
    model = LanguageModel(tiny("llama"))
    overrides = ["model=pretrained", "model.name_or_path=base", "data.seq_len=32", "peft=lora", "peft.dropout=0.1"]
    attach(model.model, check(compose(overrides)).peft, "base", None, (), seed=0)
    compile_model(model.model, changing_lengths=True, backend="eager")
    for trains, expected in ((True, 4), (False, 5), (True, 5)):
        model.train(trains)
        for number, lengths in enumerate(MICRO_BATCHES):
            batch = packed(lengths)
            prefixes = shared_prompts(batch["cu_seqlens"], 2 * (number % 2))
            with torch.no_grad(), evaluating(model), disabled(model.model):
                log_probs(model, batch, prefixes)
            with torch.set_grad_enabled(trains):
                policy = log_probs(model, batch, prefixes)
            if trains:
                policy.sum().backward()
            # Loss: with and without gradients. Blocks: without the adapter, with it, and in validation. The first block
            # is no variant of its own, although the embeddings before it are frozen.
            assert graphs() == expected


def log_probs(model: LanguageModel, batch: dict[str, Tensor], prefixes: Prefixes) -> Tensor:
    before = torch.arange(batch["input_ids"].numel() - 1)
    inputs = Inputs(batch["input_ids"], batch["position_ids"], batch["cu_seqlens"], prefixes)
    return model.log_probs(inputs, scored=before + 1, before=before).tokens


def shared_prompts(starts: Tensor, tokens: int) -> Prefixes:
    """Makes every second document continue from the first `tokens` tokens of the one before it."""
    lengths = torch.zeros(len(starts) - 1, dtype=torch.int32)
    lengths[1::2] = tokens
    index, ends = list[int](), [0]
    for i, (start, end) in enumerate(zip(starts.tolist(), starts.tolist()[1:], strict=False)):
        if lengths[i]:
            index += range(int(starts[i - 1]), int(starts[i - 1] + lengths[i]))
        index += range(start, end)
        ends.append(len(index))
    return Prefixes(lengths, torch.tensor(index), torch.tensor(ends, dtype=torch.int32))


def test_one_more_variant_than_allowed_is_said(caplog: pytest.LogCaptureFixture) -> None:
    model = compiled("llama", changing_lengths=False)
    with torch._dynamo.config.patch(recompile_limit=1):
        for lengths in MICRO_BATCHES:
            model(**packed(lengths)).loss_sum.backward()
    assert [r.message for r in caplog.records if "runs further ones uncompiled" in r.message]


@pytest.mark.parametrize("softcap", [None, 5.0])
@pytest.mark.parametrize("gradient", [True, False])
def test_the_compiled_loss_is_the_loss(softcap: float | None, gradient: bool) -> None:
    """The compiled loss is written so that it can be fused; the reference is the same loss in fp64 with autograd."""
    generator = torch.Generator().manual_seed(0)
    logits = 20 * torch.randn(7, 50, generator=generator)
    labels = torch.randint(0, 50, (7,), generator=generator)
    exact = logits.double().requires_grad_()
    x = exact if softcap is None else softcap * torch.tanh(exact / softcap)
    nll = torch.nn.functional.cross_entropy(x, labels, reduction="none")
    nll.sum().backward()
    found = losses._compile_block()(logits, labels, softcap, gradient)
    torch.testing.assert_close(found.double(), nll.detach(), rtol=1e-5, atol=1e-5)
    if gradient:
        torch.testing.assert_close(logits.double(), exact.grad, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("bias", [False, True])
def test_around_the_compiled_loss_logits_are_there_once(bias: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A chunk of bf16 logits is the only tensor of [c, V] that is allocated, in fp32 or otherwise."""
    rows, width, vocabulary, chunk = 2048, 16, 3000, 1024
    made: list[torch.dtype] = []

    class Made(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            out = func(*args, **(kwargs or {}))
            in_place = func._schema.is_mutable or func.is_view
            if isinstance(out, Tensor) and out.numel() >= chunk * vocabulary and not in_place:
                made.append(out.dtype)
            return out

    def block(logits: Tensor, *_: Any) -> Tensor:
        return logits.new_zeros(len(logits), dtype=torch.float32)

    monkeypatch.setattr(losses, "_compiled_block", block)
    new: dict[str, Any] = {"dtype": torch.bfloat16, "requires_grad": True}
    hidden, weight = torch.ones(rows, width, **new), torch.ones(vocabulary, width, **new)
    labels = torch.zeros(rows, dtype=torch.int64)
    options = {"bias": torch.ones(vocabulary, **new) if bias else None, "chunk_tokens": chunk, "compiled": True}
    with Made():
        losses.chunked_cross_entropy(hidden, weight, labels, **options).loss_sum.backward()
    assert weight.grad is not None
    assert made == [torch.bfloat16]  # the buffer that every chunk's logits are written to


@pytest.mark.slow
def test_the_compiled_loss_moves_six_bytes_a_logit(monkeypatch: pytest.MonkeyPatch) -> None:
    """bf16 logits are read twice and their gradient is written once; nothing of [c, V] is ever stored in fp32."""
    from torch._inductor import compile_fx, config, metrics

    monkeypatch.setattr(compile_fx.inductor_metrics_log, "isEnabledFor", lambda level: True)  # else it counts no bytes
    rows, vocabulary = 64, 50304
    logits = torch.randn(rows, vocabulary).to(torch.bfloat16)
    metrics.reset()
    with config.patch(force_disable_caches=True):
        torch.compile(losses._block)(logits, torch.zeros(rows, dtype=torch.int64), None, True)
    assert 0 < metrics.num_bytes_accessed / (rows * vocabulary) < 6.1
