"""Cross-entropy as a function of tensors, from hidden states in chunks.

Full logits of a language model are its largest tensor: 64 rows of 1,024 tokens over a vocabulary of 50,304 take 13 GB
in fp32, held two or three times by the usual loss. Here only the logits of one chunk of tokens exist at a time, and the
gradient is computed while they do, so backward recomputes nothing: three matrix products in all, as with full logits.
"""

from collections.abc import Iterator
from functools import cache
from typing import Any, NamedTuple

import torch
import torch._dynamo
from torch import Tensor
from torch.nn import functional as F

IGNORE_INDEX = -100
# fp32 copies of logits are made in blocks of rows of this size, so that on a CPU they stay in its cache. On other
# devices each block costs a round of kernel launches, so blocks are larger there. Logits that fit in one CPU block
# take the usual path, which is up to 0.2 ms faster for them.
CPU_BLOCK_BYTES = 8 * 2**20
DEVICE_BLOCK_BYTES = 128 * 2**20


class CrossEntropy(NamedTuple):
    """Sums over the tokens that carry a label; divide by `n_tokens` for means."""

    loss_sum: Tensor  # 0-dim fp32, differentiable
    n_tokens: Tensor  # 0-dim int64


@torch.compiler.disable
def chunked_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    bias: Tensor | None = None,
    chunk_tokens: int,
    logit_softcap: float | None = None,
    logit_scale: float = 1.0,
    compiled: bool = False,
) -> CrossEntropy:
    """Computes cross-entropy of `logit_scale * (hidden @ weight.T) + bias` and `labels`, never holding all the logits.

    The gradient is computed in the forward and scaled in the backward, which can therefore run only once. Matrix
    products follow autocast; the softmax, the sums over tokens and the sum of the weight's gradient over chunks are in
    fp32.

    Args:
        hidden: [N, D], any float dtype.
        weight: [V, D], the output embedding.
        labels: [N] int64 in 0..V-1, or -100 for a token that is not trained on.
        bias: [V].
        chunk_tokens: number of tokens whose logits are held at once.
        logit_softcap: logits become `cap * tanh(x / cap)` (Gemma 2).
        logit_scale: logits are multiplied by it before the bias (Cohere's logit_scale, 1 / Granite's logits_scaling).
        compiled: run the part between the matrix products through torch.compile, one kernel instead of ten.
    """
    n_tokens = (labels != IGNORE_INDEX).sum()
    if 4 * hidden.shape[0] * weight.shape[0] <= CPU_BLOCK_BYTES and bias is None and logit_softcap is None:
        logits = F.linear(hidden if logit_scale == 1.0 else hidden * logit_scale, weight)
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        loss_sum = F.cross_entropy(logits, labels, ignore_index=IGNORE_INDEX, reduction="sum")
        return CrossEntropy(loss_sum, n_tokens)
    head = Logits(logit_softcap, logit_scale, chunk_tokens, matmul_dtype(hidden, weight), compiled)
    with_grad = torch.is_grad_enabled()
    with torch.autocast(hidden.device.type, enabled=False):
        loss_sum = _ChunkedCrossEntropy.apply(hidden, weight, bias, labels, head, with_grad)
    return CrossEntropy(loss_sum, n_tokens)


def matmul_dtype(hidden: Tensor, weight: Tensor) -> torch.dtype:
    """Returns the dtype in which logits are multiplied: autocast's if enabled, else that of the promoted inputs."""
    device_type = hidden.device.type
    if torch.is_autocast_enabled(device_type):
        return torch.get_autocast_dtype(device_type)
    return torch.promote_types(hidden.dtype, weight.dtype)


class Logits:
    """The computation of logits from hidden states, one chunk at a time."""

    def __init__(
        self, softcap: float | None, scale: float, chunk_tokens: int, dtype: torch.dtype, compiled: bool
    ) -> None:
        self.softcap, self.scale, self.dtype, self.compiled = softcap, scale, dtype, compiled
        self.chunk_tokens = chunk_tokens

    def chunks(
        self, hidden: Tensor, w: Tensor, bias: Tensor | None, targets: Tensor, losses: Tensor, gradient: bool
    ) -> Iterator[tuple[slice, Tensor, Tensor]]:
        """Yields of each chunk of c tokens its slice, the inputs [c, D] of its product, and the gradient [c, V].

        The inputs are the scaled and cast hidden states, the gradient is that of the losses with respect to the logits;
        it is overwritten by the next chunk's. Chunks are equally large, but for the last.

        Args:
            hidden: [N, D].
            w: [V, D], in `dtype`.
            targets: [N]; those below 0 are read as 0.
            losses: [N], receives the negative log-likelihoods.
            gradient: whether to compute the gradient; if not, what is yielded in its place has no meaning.
        """
        tokens = hidden.shape[0]
        size = -(-tokens // max(1, -(-tokens // self.chunk_tokens)))
        buffer = hidden.new_empty(size, w.shape[0], dtype=self.dtype)
        for start in range(0, tokens, max(1, size)):
            chunk = slice(start, min(start + size, tokens))
            h = (hidden[chunk] * self.scale if self.scale != 1.0 else hidden[chunk]).to(self.dtype)
            logits = torch.mm(h, w.t(), out=buffer[: h.shape[0]])  # [c, V]
            if bias is not None:
                logits += bias
            rows = logits.shape[0] if self.compiled else _block_rows(logits.shape[1], logits.device)
            labels, outs = targets[chunk].clamp(min=0), losses[chunk]
            for x, y, out in zip(logits.split(rows), labels.split(rows), outs.split(rows), strict=True):
                out.copy_((_compiled_block if self.compiled else _block)(x, y, self.softcap, gradient))
            yield chunk, h, logits


class _ChunkedCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, logits: Logits, with_grad: bool
    ) -> Tensor:
        need_hidden, need_weight, need_bias = (with_grad and need for need in ctx.needs_input_grad[:3])
        gradient = need_hidden or need_weight or need_bias
        dtype, w = logits.dtype, weight.to(logits.dtype)
        grad_hidden = hidden.new_empty(hidden.shape, dtype=dtype) if need_hidden else None
        grad_weight = WeightGradient(weight) if need_weight else None
        grad_bias = torch.zeros_like(bias, dtype=torch.float32) if need_bias and bias is not None else None
        losses = hidden.new_empty(hidden.shape[0], dtype=torch.promote_types(dtype, torch.float32))

        for chunk, h, grad_logits in logits.chunks(hidden, w, bias, labels, losses, gradient):
            # A row without a label has loss and gradient 0. Its gradient is masked in [c, D] instead of [c, V].
            labelled = (labels[chunk] != IGNORE_INDEX).unsqueeze(1)  # [c, 1]
            if grad_hidden is not None:
                grad = torch.mm(grad_logits, w, out=grad_hidden[chunk])
                grad *= labelled * logits.scale
            if grad_weight is not None:
                grad_weight.add_product(grad_logits, h * labelled)
            if grad_bias is not None:
                grad_bias += labelled[:, 0].to(dtype) @ grad_logits

        ctx.gradients = (
            None if grad_hidden is None else grad_hidden.to(hidden.dtype),
            None if grad_weight is None else grad_weight.result(),
            None if grad_bias is None or bias is None else grad_bias.to(bias.dtype),
        )
        return losses.masked_fill_(labels == IGNORE_INDEX, 0.0).sum()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_loss: Tensor) -> tuple[Tensor | None, ...]:
        gradients, ctx.gradients = ctx.gradients, None
        if gradients is None:
            raise RuntimeError("chunked_cross_entropy keeps its gradients for one backward; run the forward again")
        # In place: nothing else holds these tensors, and a second [V, D] would be the backward's largest allocation.
        scaled = [None if g is None else g.mul_(grad_loss) for g in gradients]
        return (*scaled, None, None, None)


class WeightGradient:
    """The sum of `gradient.T @ h` over chunks, in fp32 (fp64 for fp64 weights)."""

    def __init__(self, weight: Tensor) -> None:
        self.weight, self.dtype = weight, torch.promote_types(weight.dtype, torch.float32)
        self.total = weight.new_empty(0)
        self.product: Tensor | None = None

    def add_product(self, gradient: Tensor, h: Tensor) -> None:
        """Adds `gradient.T @ h` for a gradient [c, V] and h [c, D]."""
        if h.dtype != self.dtype and adds_in_fp32(h.device, h.dtype):
            if self.total.numel() == 0:
                self.total = torch.mm(gradient.t(), h, out_dtype=self.dtype)
            else:
                torch.addmm(self.total, gradient.t(), h, out_dtype=self.dtype, out=self.total)
        elif self.total.numel() == 0:
            self.total = torch.mm(gradient.t(), h).to(self.dtype)
        elif h.dtype == self.dtype:
            self.total.addmm_(gradient.t(), h)
        else:
            self.product = torch.mm(gradient.t(), h, out=self.product)
            # A CPU adds mixed dtypes at a quarter of the speed, so one block at a time is converted in its cache.
            block = _block_rows(h.shape[1], h.device)
            for total, product in zip(self.total.split(block), self.product.split(block), strict=True):
                total += product.to(self.dtype)

    def result(self) -> Tensor:
        """Returns the sum [V, D] in the weight's dtype; zeros if nothing was added, as for no tokens."""
        return torch.zeros_like(self.weight) if self.total.numel() == 0 else self.total.to(self.weight.dtype)


@cache
def adds_in_fp32(device: torch.device, dtype: torch.dtype) -> bool:
    """Returns whether a product of half-precision matrices can be added to fp32 in one kernel without being rounded.

    On CUDA, newer releases of torch can; it is tried once, on numbers.
    """
    if device.type != "cuda":
        return False
    ones, total = torch.ones(16, 16, device=device, dtype=dtype), torch.ones(16, 16, device=device, dtype=torch.float32)
    try:
        torch.addmm(total, ones, ones, out_dtype=torch.float32, out=total)
    except (RuntimeError, TypeError):
        return False
    return bool((total == 17).all())


def _block_rows(columns: int, device: torch.device) -> int:
    block_bytes = CPU_BLOCK_BYTES if device.type == "cpu" else DEVICE_BLOCK_BYTES
    return max(1, block_bytes // (4 * columns))


def _compiled_block(logits: Tensor, labels: Tensor, softcap: float | None, gradient: bool) -> Tensor:
    """Runs `_block` as one kernel for any number of rows, which differs by micro-batch and in a step's last chunk."""
    torch._dynamo.maybe_mark_dynamic(logits, 0)
    torch._dynamo.maybe_mark_dynamic(labels, 0)
    with torch.autocast(logits.device.type, enabled=False):  # already disabled in forward, but not in backward
        return _compile_block()(logits, labels, softcap, gradient)


@cache
def _compile_block() -> Any:
    return torch.compile(_block)


def _block(logits: Tensor, labels: Tensor, softcap: float | None, gradient: bool) -> Tensor:
    """Returns the negative log-likelihoods [b] of rows [b, V]; if asked, `logits` receives the gradient."""
    y = labels.unsqueeze(1)  # [b, 1]
    x = logits.to(torch.promote_types(logits.dtype, torch.float32))  # [b, V]
    if softcap is not None:
        x = softcap * torch.tanh(x / softcap)
    p, lse = _softmax(x)
    nll = (lse - x.gather(1, y))[:, 0]
    if not gradient:
        return nll
    if torch.compiler.is_compiling():
        p = p - (torch.arange(x.shape[1], device=x.device) == y).to(p.dtype)
    else:
        p.scatter_(1, y, p.gather(1, y) - 1)
    if softcap is not None:
        p = p * (1 - (x / softcap).square())
    logits.copy_(p)
    return nll


def _softmax(x: Tensor) -> tuple[Tensor, Tensor]:
    """Returns (softmax [b, V], logsumexp [b, 1]) of fp32 [b, V].

    The compiled form is written so that no [b, V] tensor is stored: the sums take two passes over the logits, and the
    gradient recomputes them in a third. Run eagerly, that would store three [b, V] tensors, where softmax stores one.
    """
    if torch.compiler.is_compiling():
        largest = x.amax(1, keepdim=True)
        total = (x - largest).exp().sum(1, keepdim=True)
        return (x - largest).exp() / total, largest + total.log()
    p = torch.softmax(x, dim=1)
    # The largest probability is at least 1 / V, so this log is exact where log(p[y]) may underflow.
    return p, x.amax(1, keepdim=True) - p.amax(1, keepdim=True).log()
