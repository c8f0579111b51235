"""lmtrain's attention against transformers' eager attention and a plain softmax, and the isolation of documents."""

import inspect

import pytest
import torch
from torch._subclasses import FakeTensorMode

from helpers_models import FAMILIES, LENGTHS, VOCAB, packed, tiny, wrapped
from lmtrain.errors import UserError
from lmtrain.models import attention
from lmtrain.models.documents import Documents, Inputs, choose_method
from lmtrain.models.language_model import LanguageModel

CPU = torch.device("cpu")
CPU_METHODS = ["slices", "dense_mask"]


@pytest.fixture(params=list(FAMILIES))
def family(request):
    return request.param


def softmax_attention(q, k, v, scaling, visible):
    """Computes plain softmax attention with the mask visible [B, T, T]. Returns [B, T, H, D]."""
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    scores = (q @ k.transpose(-1, -2)) * scaling
    return (scores.masked_fill(~visible[:, None], float("-inf")).softmax(-1) @ v).transpose(1, 2)


def visible(lengths: list[list[int]], window: int | None) -> torch.Tensor:
    """Returns a mask [B, T, T], computed pair by pair: same document, not later, not further back than the window."""
    total = sum(lengths[0])
    seen = torch.zeros(len(lengths), total, total, dtype=torch.bool)
    for b, row in enumerate(lengths):
        document = [d for d, n in enumerate(row) for _ in range(n)]
        for q in range(total):
            for k in range(q + 1):
                seen[b, q, k] = document[q] == document[k] and (window is None or q - k < window)
    return seen


def projections(heads=4, kv_heads=4, rows=3, length=20, width=8, dtype=torch.float64):
    generator = torch.Generator().manual_seed(0)
    shapes = [(rows, length, h, width) for h in (heads, kv_heads, kv_heads)]
    return [torch.randn(s, generator=generator, dtype=dtype).transpose(1, 2).requires_grad_() for s in shapes]


def assert_near_softmax(out, inputs, seen):
    """Compares half-precision attention, the output and the gradients, with plain softmax attention in fp32."""
    exact = [x.detach().float().requires_grad_() for x in inputs]
    expected = softmax_attention(*exact, 0.3, seen.to(out.device))
    torch.testing.assert_close(out.float(), expected, rtol=0.05, atol=0.05)
    weights = torch.randn_like(expected)
    ours = torch.autograd.grad((out.float() * weights).sum(), inputs)
    theirs = torch.autograd.grad((expected * weights).sum(), exact)
    for a, b in zip(ours, theirs, strict=True):
        assert (a.float() - b).norm() / b.norm() < 0.05


def call(q, k, v, **options):
    return attention.attention(torch.nn.Module(), q, k, v, None, scaling=0.3, **options)[0]


@pytest.mark.parametrize("window", [None, 1, 4, 100])
@pytest.mark.parametrize("kv_heads", [4, 2, 1])
@pytest.mark.parametrize("method", [None, *CPU_METHODS])
def test_equals_plain_softmax_attention(method, kv_heads, window):
    q, k, v = projections(kv_heads=kv_heads)
    lengths = LENGTHS if method else [[20]] * 3
    layout = Documents(packed()["cu_seqlens"], 3, 20, method) if method else None
    out = call(q, k, v, documents=layout, sliding_window=window)
    expected = softmax_attention(q, k, v, 0.3, visible(lengths, window))
    torch.testing.assert_close(out, expected)
    weights = torch.randn_like(out)
    ours = torch.autograd.grad((out * weights).sum(), (q, k, v))
    theirs = torch.autograd.grad((expected * weights).sum(), (q, k, v))
    torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("window", [None, 4])
@pytest.mark.parametrize("kv_heads", [4, 2])
def test_a_dense_mask_that_is_added_to_scores_is_made_once(kv_heads, window):
    """The additive mask used on CUDA gives bit for bit what torch computes from a bool mask, and is built only once."""
    q, k, v = projections(kv_heads=kv_heads)
    seen = Documents(packed()["cu_seqlens"], 3, 20, "dense_mask")
    added = Documents(packed()["cu_seqlens"], 3, 20, "dense_mask", bias_dtype=q.dtype)
    outs = [call(q, k, v, documents=layout, sliding_window=window) for layout in (seen, added)]
    assert torch.equal(*outs)
    gradients = [torch.autograd.grad(out.square().sum(), (q, k, v)) for out in outs]
    assert all(map(torch.equal, *gradients))
    assert added.mask(window).dtype == q.dtype
    assert added.mask(window) is added.mask(window)


def test_documents_that_are_whole_rows_run_as_one_batch():
    q, k, v = projections()
    cu_seqlens = torch.arange(0, 80, 20, dtype=torch.int32)
    layout = Documents(cu_seqlens, 3, 20, "slices")
    assert layout.pieces == [((20,), 3, 0)]
    torch.testing.assert_close(call(q, k, v, documents=layout), call(q, k, v))


def test_empty_documents_at_the_end_are_ignored():
    q, k, v = projections()
    cu_seqlens = packed()["cu_seqlens"]
    longer = torch.cat([cu_seqlens, cu_seqlens[-1:].repeat(3)])
    for method in CPU_METHODS:
        outs = [call(q, k, v, documents=Documents(c, 3, 20, method)) for c in (cu_seqlens, longer)]
        torch.testing.assert_close(*outs)


@pytest.mark.parametrize("method", CPU_METHODS)
def test_no_token_reaches_another_document(family, method):
    """Changing any one token of a document changes no hidden state and no gradient outside it."""
    model = wrapped(family, attention=method)
    batch = packed()
    embeddings = model.model.get_input_embeddings().weight
    together = visible(LENGTHS, None) | visible(LENGTHS, None).transpose(1, 2)  # [B, T, T], same document

    def run(ids):
        hidden, _ = model.hidden_states(Inputs(ids, batch["position_ids"], batch["cu_seqlens"]))
        return hidden

    before = run(batch["input_ids"])
    rows, length = batch["input_ids"].shape
    for b in range(rows):
        for t in range(0, length, 3):
            changed = batch["input_ids"].clone()
            changed[b, t] = (changed[b, t] + 1) % VOCAB
            difference = (run(changed) - before).detach().abs().amax(-1)
            inside = torch.zeros_like(difference, dtype=torch.bool)
            inside[b] = together[b, t]
            assert difference[~inside].max() < 1e-6
            assert difference[b, t] > 1e-3
    # A loss on one document alone reaches only the embeddings of its own tokens.
    ids = torch.arange(rows * length).remainder(VOCAB).view(rows, length)
    hidden = run(ids)
    (gradient,) = torch.autograd.grad((hidden[0, :5] * torch.randn(5, hidden.shape[-1])).sum(), embeddings)
    touched = gradient.abs().amax(1) > 1e-6
    assert set(touched.nonzero().flatten().tolist()) == set(ids[0, :5].tolist())


def test_without_cu_seqlens_the_row_is_one_sequence(family):
    model, batch = wrapped(family), packed()
    joined = model.hidden_states(Inputs(batch["input_ids"]))[0]
    apart = model.hidden_states(Inputs(batch["input_ids"], batch["position_ids"], batch["cu_seqlens"]))[0]
    assert (joined[0, 5:] - apart[0, 5:]).abs().max() > 1e-2


@pytest.mark.parametrize("name", ["mistral", "qwen3"])
def test_sliding_window_models_see_what_transformers_shows_them(name):
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM

    extra = {"use_sliding_window": True, "max_window_layers": 1} if name == "qwen3" else {}

    def build(window):
        torch.manual_seed(0)
        config = CONFIG_MAPPING[name](
            vocab_size=VOCAB, hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4,
            num_key_value_heads=2, head_dim=8, max_position_embeddings=64, sliding_window=window,
            initializer_range=0.3, bos_token_id=0, eos_token_id=0, **extra,
        )  # fmt: skip
        return AutoModelForCausalLM.from_config(config)

    def logits(model, implementation):
        model.set_attn_implementation(implementation)
        return model(packed()["input_ids"], use_cache=False).logits

    model = build(6)
    expected = logits(model, "eager")
    torch.testing.assert_close(logits(model, attention.NAME), expected, rtol=1e-4, atol=1e-4)
    assert (logits(build(64), attention.NAME) - expected).abs().max() > 1e-2


def test_attention_dropout_drops():
    model = wrapped("llama", dropout=0.5).train()  # Llama has no other dropout
    batch = packed()
    torch.manual_seed(0)
    losses = {model(**batch).loss_sum.item() for _ in range(3)}
    assert len(losses) == 3
    model.eval()
    assert len({model(**batch).loss_sum.item() for _ in range(3)}) == 1


@pytest.mark.parametrize(("limit", "dtype"), [(0, torch.bfloat16), (256 * 64, torch.float32)])
def test_autocast_runs_attention_in_bf16_but_for_short_rows_on_cpu(family, limit, dtype, monkeypatch):
    monkeypatch.setattr(attention, "CPU_HALF_PRECISION_FROM", limit)
    seen = set()
    sdpa = torch.nn.functional.scaled_dot_product_attention

    def watch(query, key, value, **options):
        seen.update({query.dtype, key.dtype, value.dtype})
        return sdpa(query, key, value, **options)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", watch)
    model, batch = wrapped(family), packed()
    exact = model(**batch).loss_sum
    seen.clear()
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(**batch).loss_sum
    assert seen == {dtype}
    assert loss.dtype == torch.float32
    assert abs(loss - exact) / exact < 0.02


@pytest.mark.parametrize(
    ("choice", "device", "dtype", "dropout", "expected"),
    [
        ("auto", "cpu", torch.float32, 0.0, "slices"),
        ("auto", "cpu", torch.bfloat16, 0.1, "slices"),
        ("auto", "cuda", torch.bfloat16, 0.0, "varlen"),
        ("auto", "cuda", torch.bfloat16, 0.1, "dense_mask"),
        ("dense_mask", "cuda", torch.bfloat16, 0.1, "dense_mask"),
        ("auto", "cuda", torch.float32, 0.0, "dense_mask"),
        ("slices", "cuda", torch.bfloat16, 0.1, "slices"),
        ("varlen", "cuda", torch.float16, 0.0, "varlen"),
        ("sdpa", "cpu", torch.float32, 0.0, UserError),
        ("transformers", "cuda", torch.bfloat16, 0.0, UserError),
        ("varlen", "cpu", torch.bfloat16, 0.0, UserError),
        ("varlen", "cuda", torch.float32, 0.0, UserError),
        ("varlen", "cuda", torch.bfloat16, 0.1, UserError),
    ],
)
def test_choice_of_method(choice, device, dtype, dropout, expected, monkeypatch):
    has_capability(monkeypatch, 9, 0)
    if expected is UserError:
        with pytest.raises(UserError, match=f"model.attention={choice}"):
            choose_method(choice, torch.device(device), dtype, dropout)
    else:
        assert choose_method(choice, torch.device(device), dtype, dropout) == expected


def has_capability(monkeypatch, major, minor):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (major, minor))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: "Tesla T4")


def test_capped_scores_and_sinks_run_in_slices_on_cuda():
    assert choose_method("auto", torch.device("cuda"), torch.bfloat16, 0.0, plain=False) == "slices"


def test_a_gpu_without_flash_attention_takes_the_dense_mask(monkeypatch):
    cuda = torch.device("cuda")
    has_capability(monkeypatch, 7, 5)
    assert choose_method("auto", cuda, torch.float16, 0.0) == "dense_mask"
    with pytest.raises(UserError, match=r"varlen needs a GPU of compute capability 8.0 or newer \(Tesla T4 has 7.5\)"):
        choose_method("varlen", cuda, torch.float16, 0.0)
    has_capability(monkeypatch, 8, 0)
    assert choose_method("auto", cuda, torch.float16, 0.0) == "varlen"


def test_varlen_gets_flat_tokens_and_an_upper_bound_known_without_the_gpu(monkeypatch):
    """The kernel runs on CUDA only, so here a plain softmax replaces it and gets the same arguments."""
    calls = []

    def stand_in(q, k, v, cu_q, cu_k, max_q, max_k, *, scale, window_size, enable_gqa=False):
        calls.append((max_q, max_k, window_size, enable_gqa))
        lengths = [(cu_q[1:] - cu_q[:-1]).tolist()]
        seen = visible(lengths, None if window_size[0] < 0 else window_size[0] + 1)
        return softmax_attention(*(x.transpose(0, 1)[None] for x in (q, k, v)), scale, seen)[0]

    monkeypatch.setattr(attention, "varlen_attn", stand_in)
    for fewer in (True, False):
        monkeypatch.setattr(attention, "FEWER_KEY_HEADS", fewer)
        layout = Documents(packed()["cu_seqlens"], 3, 20, "varlen")
        for window in (None, 4):
            q, k, v = projections(kv_heads=2)
            out = call(q, k, v, documents=layout, sliding_window=window)
            torch.testing.assert_close(out, softmax_attention(q, k, v, 0.3, visible(LENGTHS, window)))
    assert calls == [(20, 20, (-1, 0), True), (20, 20, (3, 0), True), (20, 20, (-1, 0), False), (20, 20, (3, 0), False)]


def test_torchs_varlen_has_the_parameters_we_use():
    parameters = inspect.signature(attention.varlen_attn).parameters.keys()
    assert {"query", "key", "value", "cu_seq_q", "cu_seq_k", "max_q", "max_k", "scale", "window_size"} <= parameters


@pytest.mark.parametrize("window", [None, 4])
@pytest.mark.parametrize("kv_heads", [4, 2])
@pytest.mark.parametrize("method", [None, *CPU_METHODS])
@pytest.mark.parametrize("extra", ["softcap", "s_aux"])
def test_capped_scores_and_sinks_equal_their_formula(extra, method, kv_heads, window):
    """Gemma 2: a score is c tanh(s / c). gpt-oss: each head has an extra logit in the softmax that has no value."""
    q, k, v = projections(kv_heads=kv_heads)
    sinks = torch.tensor([0.5, -1.0, 2.0, 0.0], dtype=torch.float64, requires_grad=True)
    lengths = LENGTHS if method else [[20]] * 3
    layout = Documents(packed()["cu_seqlens"], 3, 20, method) if method else None
    options = {"softcap": 0.7} if extra == "softcap" else {"s_aux": sinks}
    out = call(q, k, v, documents=layout, sliding_window=window, **options)

    keys, values = (x.repeat_interleave(4 // kv_heads, dim=1) for x in (k, v))
    scores = 0.3 * q @ keys.transpose(-1, -2)
    if extra == "softcap":
        scores = 0.7 * torch.tanh(scores / 0.7)
    weights = scores.exp() * visible(lengths, window)[:, None]
    total = weights.sum(-1, keepdim=True) + (sinks.exp().view(1, 4, 1, 1) if extra == "s_aux" else 0)
    expected = (weights / total @ values).transpose(1, 2)
    torch.testing.assert_close(out, expected)
    inputs = (q, k, v, *([sinks] if extra == "s_aux" else []))
    direction = torch.randn_like(out)
    ours, theirs = (torch.autograd.grad((x * direction).sum(), inputs) for x in (out, expected))
    torch.testing.assert_close(ours, theirs)


def test_what_it_does_not_do_is_refused():
    q, k, v = projections()
    with pytest.raises(UserError, match=r"model\.attention=transformers"):
        call(q, k, v, position_bias=torch.zeros(4))
    with pytest.raises(UserError, match="see those that come after them") as refused:
        call(q, k, v, is_causal=False)
    assert "model.attention" not in str(refused.value)


def test_no_mask_is_built(family, monkeypatch):
    """transformers passes our attention no mask, so none costs time or memory."""
    masks, model = [], wrapped(family)
    original = attention.attention

    def watch(module, query, key, value, attention_mask, **kwargs):
        masks.append(attention_mask)
        return original(module, query, key, value, attention_mask, **kwargs)

    attention.AttentionInterface.register(attention.NAME, watch)
    try:
        model(**packed())
    finally:
        attention.AttentionInterface.register(attention.NAME, original)
    assert masks == [None, None]


def test_the_models_own_attention_trains_but_refuses_packed_documents():
    model = LanguageModel(tiny("gpt2", attention="transformers"))
    assert model.model.config._attn_implementation != attention.NAME
    batch = packed()
    expected = wrapped("gpt2")(batch["input_ids"], batch["labels"]).loss_sum
    torch.testing.assert_close(model(batch["input_ids"], batch["labels"]).loss_sum, expected)
    with pytest.raises(UserError, match="isolate_documents=false"):
        model(**batch)


def test_exported_config_does_not_name_our_attention(tmp_path):
    tiny("llama").save_pretrained(tmp_path)
    assert attention.NAME not in (tmp_path / "config.json").read_text()


def test_no_kernel_with_wrong_gradients_computes_attention_with_a_mask(monkeypatch):
    """cuDNN's is the fastest without a mask; with fewer queries than keys only plain products are trusted."""
    allowed = []

    def kernel(query, key, value, attn_mask, **_):
        flags = torch.backends.cuda
        allowed.append((flags.cudnn_sdp_enabled(), flags.mem_efficient_sdp_enabled(), flags.math_sdp_enabled()))
        return torch.empty_like(query)

    torch.backends.cuda.enable_cudnn_sdp(True)  # off after a model with transformers' own attention
    monkeypatch.setattr(attention.F, "scaled_dot_product_attention", kernel)
    plain = attention.AttentionScores(None, None, None, 0.0)
    with FakeTensorMode():
        whole, keys, few = (torch.empty(1, 2, n, 16, device="cuda", dtype=torch.bfloat16) for n in (128, 8, 3))
        fewer_heads = torch.empty(1, 1, 128, 16, device="cuda", dtype=torch.bfloat16)
        attention._sdpa(whole, whole, whole, plain, None)
        attention._sdpa(whole, fewer_heads, fewer_heads, plain, None)
        attention._sdpa(keys, keys, keys, plain, None)
        for queries in (keys, few):
            mask = torch.ones(queries.shape[2], 8, dtype=torch.bool, device="cuda")
            attention._sdpa(queries, keys, keys, plain, mask)
    without_cudnn, products_alone = (False, True, True), (False, False, True)
    assert allowed == [(True, True, True), without_cudnn, without_cudnn, without_cudnn, products_alone]
    assert torch.backends.cuda.cudnn_sdp_enabled()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("method", ["varlen", "dense_mask", "slices"])
@pytest.mark.parametrize("window", [None, 4])
def test_methods_on_cuda_equal_plain_softmax_attention(method, window):
    q, k, v = (x.detach().to("cuda", torch.bfloat16).requires_grad_() for x in projections(kv_heads=2, width=64))
    layout = Documents(packed()["cu_seqlens"].cuda(), 3, 20, method)
    out = call(q, k, v, documents=layout, sliding_window=window)
    assert_near_softmax(out, (q, k, v), visible(LENGTHS, window))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("kv_heads", [4, 2])
@pytest.mark.parametrize("length", [1000, 100, 7, 6, 256])
def test_whole_rows_on_cuda_equal_plain_softmax_attention(length, kv_heads):
    shape = {"rows": 2, "length": length, "width": 64, "kv_heads": kv_heads}
    q, k, v = (x.detach().to("cuda", torch.bfloat16).requires_grad_() for x in projections(**shape))
    assert_near_softmax(call(q, k, v), (q, k, v), torch.ones(2, length, length).tril().bool())
