"""Chunked log-probabilities and their gradients against torch's log_softmax on full logits."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from lmtrain.losses import cross_entropy as losses
from lmtrain.losses.log_probs import chunked_log_probs

N, D, V = 37, 8, 23


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch):
    monkeypatch.setattr(losses, "CPU_BLOCK_BYTES", 4 * V * 5)  # five rows per block


def make(dtype=torch.float64, bias=False):
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(N, D, generator=generator, dtype=dtype).requires_grad_()
    weight = torch.randn(V, D, generator=generator, dtype=dtype).requires_grad_()
    b = torch.randn(V, generator=generator, dtype=dtype).requires_grad_() if bias else None
    return hidden, weight, b, torch.randint(0, V, (N,), generator=generator)


def reference(hidden, weight, targets, bias=None, softcap=None, scale=1.0):
    logits = scale * hidden @ weight.T + (0 if bias is None else bias)
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    return logits.log_softmax(-1).gather(1, targets[:, None])[:, 0]


def upstream(dtype):
    return torch.randn(N, generator=torch.Generator().manual_seed(1), dtype=dtype)


def gradients(log_probs, tensors):
    wanted = [t for t in tensors if t is not None]
    return torch.autograd.grad((log_probs * upstream(log_probs.dtype)).sum(), wanted)


@pytest.mark.parametrize("chunk_tokens", [1, 7, 16, N, 1000])
@pytest.mark.parametrize(
    "options", [{}, {"softcap": 2.0}, {"scale": 0.3}, {"bias": True, "scale": 2.0, "softcap": 3.0}]
)
def test_equals_log_softmax_on_full_logits(chunk_tokens, options):
    options = dict(options)
    hidden, weight, bias, targets = make(bias=options.pop("bias", False))
    ours = chunked_log_probs(
        hidden,
        weight,
        targets,
        bias=bias,
        chunk_tokens=chunk_tokens,
        logit_softcap=options.get("softcap"),
        logit_scale=options.get("scale", 1.0),
    )
    theirs = reference(hidden, weight, targets, bias, **options)
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)
    tensors = (hidden, weight, bias)
    for a, b in zip(gradients(ours, tensors), gradients(theirs, tensors), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-11)


def test_float32():
    hidden, weight, _, targets = make(torch.float32)
    ours, theirs = chunked_log_probs(hidden, weight, targets, chunk_tokens=10), reference(hidden, weight, targets)
    assert ours.dtype == torch.float32
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
    for a, b in zip(gradients(ours, (hidden, weight)), gradients(theirs, (hidden, weight)), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


def test_autocast_multiplies_in_bf16_and_returns_fp32():
    hidden, weight, _, targets = make(torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        ours = chunked_log_probs(hidden, weight, targets, chunk_tokens=10)
    theirs = reference(hidden.bfloat16().float(), weight.bfloat16().float(), targets)
    assert ours.dtype == torch.float32
    torch.testing.assert_close(ours, theirs, rtol=2e-2, atol=4e-2)
    got = gradients(ours, (hidden, weight))
    assert [g.dtype for g in got] == [torch.float32] * 2
    for a, b in zip(got, gradients(reference(hidden, weight, targets), (hidden, weight)), strict=True):
        torch.testing.assert_close(a, b, rtol=5e-2, atol=1e-1)


@pytest.mark.parametrize("trained", ["hidden", "weight"])
def test_what_is_frozen_gets_no_gradient(trained):
    hidden, weight, _, targets = make()
    tensors = {"hidden": hidden, "weight": weight}
    frozen = {name: t.detach() if name != trained else t for name, t in tensors.items()}
    ours = chunked_log_probs(frozen["hidden"], frozen["weight"], targets, chunk_tokens=10)
    expected = gradients(reference(hidden, weight, targets), (tensors[trained],))
    torch.testing.assert_close(gradients(ours, (tensors[trained],)), expected)


def test_backward_twice_adds_up():
    hidden, weight, _, targets = make()
    ours = chunked_log_probs(hidden, weight, targets, chunk_tokens=10)
    once = torch.autograd.grad(ours.sum(), (hidden, weight), retain_graph=True)
    torch.testing.assert_close(torch.autograd.grad(ours.sum(), (hidden, weight)), once)


def test_no_tokens():
    hidden, weight, bias, targets = make(bias=True)
    ours = chunked_log_probs(hidden[:0], weight, targets[:0], bias=bias, chunk_tokens=10)
    assert ours.shape == (0,)
    assert all((g == 0).all() for g in torch.autograd.grad(ours.sum(), (hidden, weight, bias)))


def test_forward_keeps_no_logits_for_backward():
    saved = []

    def count(t):
        saved.append(t.numel())
        return t

    hidden, weight, _, targets = make()
    with torch.autograd.graph.saved_tensors_hooks(count, lambda t: t):
        chunked_log_probs(hidden, weight, targets, chunk_tokens=10)
    assert max(saved) <= max(N * D, V * D) < N * V
    assert not chunked_log_probs(hidden.detach(), weight.detach(), targets, chunk_tokens=10).requires_grad


def test_a_factor_of_all_tokens_scales_the_weights_gradient_by_itself():
    """1.3477 is 1.3516 in bf16: if the factor were rounded first, the gradient would be 0.3 % too large."""
    hidden, weight, _, targets = (None if t is None else t.detach() for t in make(torch.float32))
    weight = weight.bfloat16().requires_grad_()
    one, factor = (
        torch.autograd.grad(scale * chunked_log_probs(hidden.bfloat16(), weight, targets, chunk_tokens=N).sum(), weight)
        for scale in (1.0, 1.3477)
    )
    along = (factor[0].float() * one[0].float()).sum() / one[0].float().square().sum()
    assert along == pytest.approx(1.3477, abs=1e-3)


class Products(TorchDispatchMode):
    """Counts matrix products."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm_)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("chunk_tokens", "products"), [(N, 3), (-(-N // 2), 4 * 2)])
def test_logits_that_fit_in_one_chunk_are_computed_once(chunk_tokens, products):
    """Logits, and their gradients' products with the weight and the hidden states; then the logits again."""
    hidden, weight, _, targets = make(torch.float32)
    with Products() as counted:
        gradients(chunked_log_probs(hidden, weight, targets, chunk_tokens=chunk_tokens), (hidden, weight))
    assert counted.count == products
