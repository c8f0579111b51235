"""The output layer's matrix products in 8 bits, which is being tried: loss and gradients from hidden states in chunks.

Of gpt_small's step on an H200 these three products take 21 of 125 ms in bf16. "forward" multiplies the logits in
8 bits, 2.7 ms less if 8 bits are 1.6 times as fast; "all" also the two products of the gradient, which the loss kernel
then writes in 8 bits and a second kernel transposes, as the hardware multiplies only matrices whose inner dimension is
contiguous. To be kept in lmtrain only if the queue's part "switches" finds a gain at an equal loss. A CPU computes the
same products slowly (fp8_losses.py).
"""

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

from lmtrain.losses import cross_entropy

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
# p - 1 at the label, p elsewhere: at most 1, and 2e-5 on average for 50,000 columns. Times 2^14, those are far from
# both ends of e5m2 (57,344 and 1.5e-5).
GRADIENT_SCALE = 2.0**14


def to_8_bits(x: Tensor) -> tuple[Tensor, Tensor]:
    """Returns x in e4m3 with its largest value at that of the format, and what it must be multiplied by, fp32."""
    scale = x.abs().amax().float().clamp(min=1e-12) / torch.finfo(E4M3).max
    return (x.float() / scale).to(E4M3), scale


def product(a: Tensor, b: Tensor, scales: tuple[Tensor, Tensor], dtype: torch.dtype, fast: bool = False) -> Tensor:
    """Returns a @ b.T for contiguous a [m, k] and b [n, k]; `fast` adds less exactly."""
    return torch._scaled_mm(a, b.t(), *scales, out_dtype=dtype, use_fast_accum=fast)


def rows(logits: Tensor, labels: Tensor, gradient: Tensor) -> Tensor:
    """Returns the losses [c] of logits [c, V]; `gradient` receives theirs, in e5m2 times GRADIENT_SCALE."""
    factor = GRADIENT_SCALE if gradient.dtype == E5M2 else 1.0
    x, labelled = logits.float(), labels != cross_entropy.IGNORE_INDEX
    y = labels.clamp(min=0).unsqueeze(1)
    x_label = x.gather(1, y)  # before the gradient overwrites the logits
    largest = x.amax(1, keepdim=True)
    total = (x - largest).exp().sum(1, keepdim=True)
    p = (x - largest).exp() / total - (torch.arange(x.shape[1], device=x.device) == y).float()
    gradient.copy_((p * (factor * labelled.unsqueeze(1))).to(gradient.dtype))
    return (largest + total.log() - x_label)[:, 0] * labelled


def transposed(x: Tensor) -> Tensor:
    return x.t().contiguous()


@cache
def kernel(function: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(function, dynamic=False) if torch.cuda.is_available() else function


class Head(torch.autograd.Function):
    """`cross_entropy._ChunkedCrossEntropy` without bias, scale and soft cap, with its logits in 8 bits."""

    gradients_too = False

    @classmethod
    def forward(
        cls, ctx: Any, hidden: Tensor, weight: Tensor, bias: None, labels: Tensor, logits: Any, grad: bool
    ) -> Tensor:
        assert bias is None
        assert (logits.scale, logits.softcap) == (1.0, None)
        w = weight.to(logits.dtype)
        w8, w_scale = kernel(to_8_bits)(w)
        w8_t, one = kernel(transposed)(w8), hidden.new_tensor(1 / GRADIENT_SCALE, dtype=torch.float32)
        losses, grad_hidden = [], []
        grad_weight = torch.zeros_like(weight, dtype=torch.float32)
        from_bf16 = cross_entropy.WeightGradient(weight)
        for h, y in zip(hidden.split(logits.chunk_tokens), labels.split(logits.chunk_tokens), strict=True):
            h = h.to(w.dtype)
            h8, h_scale = kernel(to_8_bits)(h)
            x = product(h8, w8, (h_scale, w_scale), w.dtype, fast=True)  # [c, V]
            g = torch.empty_like(x, dtype=E5M2) if cls.gradients_too else x
            losses.append(kernel(rows)(x, y, g))
            if grad and cls.gradients_too:
                grad_hidden.append(product(g, w8_t, (one, w_scale), w.dtype))
                g_t, h8_t = kernel(transposed)(g), kernel(transposed)(h8)
                grad_weight += product(g_t, h8_t, (one, h_scale), torch.float32)
            elif grad:
                grad_hidden.append(g @ w)
                from_bf16.add_product(g, h)
        if grad:
            grad_weight = grad_weight.to(weight.dtype) if cls.gradients_too else from_bf16.result()
            ctx.gradients = torch.cat(grad_hidden).to(hidden.dtype), grad_weight
        return torch.cat(losses).sum()

    @staticmethod
    def backward(ctx: Any, grad_loss: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight = ctx.gradients
        return hidden * grad_loss, weight * grad_loss, None, None, None, None


class HeadAndGradients(Head):
    gradients_too = True


def switch_on(what: str) -> None:
    """Makes the loss of lmtrain in this process use 8 bits: for the logits ("forward") or for "all" products."""
    cross_entropy._ChunkedCrossEntropy = HeadAndGradients if what == "all" else Head
