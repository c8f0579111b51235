"""The chunked cross-entropy against PyTorch's own on full logits, and against closed forms."""

import math

import pytest
import torch
from torch.nn import functional as F

from lmtrain.losses import cross_entropy as losses
from lmtrain.losses.cross_entropy import WeightGradient, chunked_cross_entropy

N, D, V = 37, 8, 23


@pytest.fixture(autouse=True)
def _always_chunked(monkeypatch):
    """Disables the shortcut for logits that fit in a cache, which these small ones would take."""
    monkeypatch.setattr(losses, "CPU_BLOCK_BYTES", 4 * V * 5)  # five rows per block


def make(dtype=torch.float64, ignored=0.3, bias=False):
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(N, D, generator=generator, dtype=dtype).requires_grad_()
    weight = torch.randn(V, D, generator=generator, dtype=dtype).requires_grad_()
    labels = torch.randint(0, V, (N,), generator=generator)
    labels[torch.rand(N, generator=generator) < ignored] = -100
    b = torch.randn(V, generator=generator, dtype=dtype).requires_grad_() if bias else None
    return hidden, weight, labels, b


def gradients(loss, *tensors, scale=0.7):
    return torch.autograd.grad(loss * scale, [t for t in tensors if t is not None])


def reference(hidden, weight, labels, bias=None, softcap=None, scale=1.0):
    """Returns the loss sum, computed on full logits."""
    logits = scale * hidden @ weight.T + (0 if bias is None else bias)
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    return F.cross_entropy(logits, labels, reduction="sum")


@pytest.mark.parametrize("chunk_tokens", [1, 7, 16, N, 1000])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_equals_cross_entropy_on_full_logits(chunk_tokens, dtype):
    hidden, weight, labels, _ = make(dtype)
    out = chunked_cross_entropy(hidden, weight, labels, chunk_tokens=chunk_tokens)
    expected = F.cross_entropy(hidden @ weight.T, labels, reduction="sum")
    tolerance = {"rtol": 1e-12, "atol": 1e-12} if dtype == torch.float64 else {"rtol": 1e-5, "atol": 1e-5}
    torch.testing.assert_close(out.loss_sum, expected, **tolerance)
    assert out.n_tokens == (labels != -100).sum()
    for ours, theirs in zip(gradients(out.loss_sum, hidden, weight), gradients(expected, hidden, weight), strict=True):
        torch.testing.assert_close(ours, theirs, **tolerance)


@pytest.mark.parametrize(
    "terms",
    [
        {"softcap": 2.0},
        {"scale": 0.25},
        {"bias": True},
        {"softcap": 3.0, "scale": 1.5, "bias": True},
    ],
    ids=lambda terms: "+".join(terms),
)
def test_every_term_follows_its_formula(terms):
    hidden, weight, labels, bias = make(bias=terms.pop("bias", False))
    expected = reference(hidden, weight, labels, bias, **terms)
    out = chunked_cross_entropy(
        hidden,
        weight,
        labels,
        bias=bias,
        chunk_tokens=10,
        logit_softcap=terms.get("softcap"),
        logit_scale=terms.get("scale", 1.0),
    )
    torch.testing.assert_close(out.loss_sum, expected)
    inputs = (hidden, weight, bias)
    for ours, theirs in zip(gradients(out.loss_sum, *inputs), gradients(expected, *inputs), strict=True):
        torch.testing.assert_close(ours, theirs)


def test_uniform_logits_cost_ln_v():
    hidden, weight, labels, _ = make(ignored=0.0)
    out = chunked_cross_entropy(torch.zeros_like(hidden), weight, labels, chunk_tokens=5)
    torch.testing.assert_close(out.loss_sum.item(), N * math.log(V))


@pytest.mark.parametrize("terms", [{}, {"logit_softcap": 0.1}, {"bias": True}])
def test_no_tokens_give_a_gradient_of_zeros(terms):
    hidden, weight = torch.ones(0, 4, requires_grad=True), torch.ones(5, 4, requires_grad=True)
    bias = torch.ones(5, requires_grad=True) if terms.pop("bias", False) else None
    out = chunked_cross_entropy(hidden, weight, torch.ones(0, dtype=torch.int64), bias=bias, chunk_tokens=8, **terms)
    out.loss_sum.backward()
    assert out.loss_sum.item() == 0
    assert torch.equal(weight.grad, torch.zeros(5, 4))
    assert bias is None or torch.equal(bias.grad, torch.zeros(5))


def test_no_labelled_token_gives_zero_not_nan():
    hidden, weight, labels, _ = make()
    out = chunked_cross_entropy(hidden, weight, torch.full_like(labels, -100), chunk_tokens=10)
    assert (out.loss_sum.item(), out.n_tokens.item()) == (0, 0)
    assert all((g == 0).all() for g in gradients(out.loss_sum, hidden, weight))


def test_improbable_label_has_a_finite_exact_loss():
    """The label's probability underflows in fp32, but its logarithm must not."""
    hidden = torch.tensor([[1.0], [1.0]], requires_grad=True)
    weight = torch.tensor([[300.0], [0.0], [-300.0]] + [[0.0]] * (V - 3))
    out = chunked_cross_entropy(hidden, weight, torch.tensor([2, 0]), chunk_tokens=1)
    torch.testing.assert_close(out.loss_sum.item(), 600.0)


def test_frozen_weight_and_evaluation_make_no_gradients():
    hidden, weight, labels, _ = make()
    out = chunked_cross_entropy(hidden, weight.detach(), labels, chunk_tokens=10)
    expected = F.cross_entropy(hidden @ weight.detach().T, labels, reduction="sum")
    torch.testing.assert_close(gradients(out.loss_sum, hidden), gradients(expected, hidden))
    for without_grad in (torch.no_grad, torch.inference_mode):
        with without_grad():
            out = chunked_cross_entropy(hidden, weight, labels, chunk_tokens=10)
            assert not out.loss_sum.requires_grad
            torch.testing.assert_close(out.loss_sum, expected.detach())


def test_second_backward_is_refused_rather_than_wrong():
    hidden, weight, labels, _ = make()
    loss = chunked_cross_entropy(hidden, weight, labels, chunk_tokens=10).loss_sum
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="one backward"):
        loss.backward()


def test_bf16_autocast_is_as_close_to_fp32_as_torchs_own():
    hidden, weight, labels, _ = make(torch.float32)
    exact = F.cross_entropy(hidden @ weight.T, labels, reduction="sum")
    exact_gradients = gradients(exact, hidden, weight)

    def distances(loss):
        found = [loss, *gradients(loss, hidden, weight)]
        return [((f - e).norm() / e.norm()).item() for f, e in zip(found, [exact, *exact_gradients], strict=True)]

    def again():
        with torch.autocast("cpu", torch.bfloat16):
            return chunked_cross_entropy(hidden, weight, labels, chunk_tokens=10)

    with torch.autocast("cpu", torch.bfloat16):
        theirs = distances(F.cross_entropy(F.linear(hidden, weight), labels, reduction="sum"))
    assert again().loss_sum.dtype == torch.float32
    ours = distances(again().loss_sum)
    assert all(o < 0.01 and o < 1.5 * t + 1e-4 for o, t in zip(ours, theirs, strict=True)), (ours, theirs)
    assert all(g.dtype == torch.float32 for g in gradients(again().loss_sum, hidden, weight))


def test_bf16_parameters_get_bf16_gradients():
    hidden, weight, labels, _ = make(torch.bfloat16)
    loss = chunked_cross_entropy(hidden, weight, labels, chunk_tokens=10).loss_sum
    expected = F.cross_entropy(hidden.float() @ weight.float().T, labels, reduction="sum")
    assert loss.dtype == torch.float32
    for ours, theirs in zip(gradients(loss, hidden, weight), gradients(expected, hidden, weight), strict=True):
        assert ours.dtype == torch.bfloat16
        assert (ours - theirs).norm() / theirs.norm() < 0.02


def test_the_shortcut_for_small_logits_gives_the_same(monkeypatch):
    hidden, weight, labels, _ = make()
    chunked = chunked_cross_entropy(hidden, weight, labels, chunk_tokens=10, logit_scale=0.5)
    monkeypatch.setattr(losses, "CPU_BLOCK_BYTES", 4 * N * V)
    plain = chunked_cross_entropy(hidden, weight, labels, chunk_tokens=10, logit_scale=0.5)
    assert type(plain.loss_sum.grad_fn) is not type(chunked.loss_sum.grad_fn)
    torch.testing.assert_close(plain, chunked)
    torch.testing.assert_close(gradients(plain.loss_sum, hidden, weight), gradients(chunked.loss_sum, hidden, weight))


def test_logits_of_one_chunk_are_the_largest_tensor_ever_made(monkeypatch):
    """No operation creates a tensor with more elements than one chunk's logits or the weight."""
    from torch.utils._python_dispatch import TorchDispatchMode

    monkeypatch.setattr(losses, "CPU_BLOCK_BYTES", 4 * 1000)
    largest = 0

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            nonlocal largest
            out = function(*args, **(kwargs or {}))
            for t in out if isinstance(out, (tuple, list)) else (out,):
                largest = max(largest, t.numel() if isinstance(t, torch.Tensor) else 0)
            return out

    hidden, weight = torch.randn(512, 4, requires_grad=True), torch.randn(1000, 4, requires_grad=True)
    with Watch():
        loss = chunked_cross_entropy(hidden, weight, torch.randint(0, 1000, (512,)), chunk_tokens=32).loss_sum
        loss.backward()
    assert largest == 32 * 1000


def test_inside_torch_compile():
    hidden, weight, labels, _ = make(torch.float32)

    def loss(h, w):
        return chunked_cross_entropy(h * 2, w, labels, chunk_tokens=10).loss_sum

    expected = gradients(loss(hidden, weight), hidden, weight)
    torch.testing.assert_close(
        gradients(torch.compile(loss, backend="eager")(hidden, weight), hidden, weight), expected
    )


@pytest.mark.skipif(not hasattr(F, "linear_cross_entropy"), reason="torch before 2.13 has none")
def test_equals_torchs_own_chunked_loss():
    hidden, weight, labels, _ = make()
    options = torch.nn.LinearCrossEntropyOptions()
    torchs = F.linear_cross_entropy(hidden, weight, labels, reduction="sum", options=options)
    expected = gradients(torchs, hidden, weight)
    found = chunked_cross_entropy(hidden, weight, labels, chunk_tokens=7).loss_sum
    torch.testing.assert_close(found, torchs)
    torch.testing.assert_close(gradients(found, hidden, weight), expected)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_gradients_of_chunks_add_up_in_fp32_on_a_gpu():
    """With one kernel per chunk where torch supports it, the sum is as close to fp64's as fp32 allows."""
    gradient, h = torch.randn(3, 64, 96), torch.randn(3, 64, 32)
    sums = WeightGradient(torch.zeros(96, 32, device="cuda"))
    for g, x in zip(gradient, h, strict=True):
        sums.add_product(g.cuda().bfloat16(), x.cuda().bfloat16())
    exact = sum(g.bfloat16().double().T @ x.bfloat16().double() for g, x in zip(gradient, h, strict=True))
    torch.testing.assert_close(sums.total.cpu().double(), exact, rtol=1e-5, atol=1e-4)


def test_halves_that_a_gpu_adds_in_fp32_are_summed_over_all_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernels, which only CUDA has, are replaced by the same products in fp32."""

    def mm(a: torch.Tensor, b: torch.Tensor, out_dtype: torch.dtype) -> torch.Tensor:
        return a.to(out_dtype) @ b.to(out_dtype)

    def addmm(total: torch.Tensor, a: torch.Tensor, b: torch.Tensor, out_dtype: torch.dtype, out: torch.Tensor) -> None:
        out.copy_(total + a.to(out_dtype) @ b.to(out_dtype))

    monkeypatch.setattr(losses, "adds_in_fp32", lambda device, dtype: dtype == torch.bfloat16)
    monkeypatch.setattr(torch, "mm", mm)
    monkeypatch.setattr(torch, "addmm", addmm)
    generator = torch.Generator().manual_seed(0)
    parts = [[torch.randn(3, n, generator=generator).bfloat16() for n in (5, 2)] for _ in range(3)]  # [c, V], [c, D]
    sums = WeightGradient(torch.zeros(5, 2, dtype=torch.bfloat16))
    for gradient, h in parts:
        sums.add_product(gradient, h)
    expected = sum(torch.einsum("cv,cd->vd", gradient.float(), h.float()) for gradient, h in parts)
    assert torch.allclose(sums.total, expected, atol=1e-6)
    assert sums.result().dtype == torch.bfloat16
