"""Log-probabilities of tokens from hidden states in chunks, with a separate gradient for each token.

A preference loss weights every answer differently, and the weights are known only once all log-probabilities are. So
the gradient can't be completed in the forward pass as for cross-entropy. But a token's log-probability depends on its
own hidden state only: that gradient is computed in the forward pass, up to a factor, at no cost in the backward pass.
For a trained output embedding, the backward pass computes the logits again unless all of them fit in one chunk.
"""

from typing import Any

import torch
from torch import Tensor

from lmtrain.losses.cross_entropy import Logits, WeightGradient, matmul_dtype


@torch.compiler.disable
def chunked_log_probs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    bias: Tensor | None = None,
    chunk_tokens: int,
    logit_softcap: float | None = None,
    logit_scale: float = 1.0,
    compiled: bool = False,
) -> Tensor:
    """Computes `log_softmax(logit_scale * (hidden @ weight.T) + bias)` at `targets`, never holding all the logits.

    Matrix products follow autocast; the softmax and the sum of the weight's gradient over chunks are in fp32.

    Args:
        hidden: [N, D], any float dtype.
        weight: [V, D], the output embedding.
        targets: [N] int64 in 0..V-1.
        bias: [V].
        chunk_tokens: number of tokens whose logits are held at once.
        logit_softcap: logits become `cap * tanh(x / cap)` (Gemma 2).
        logit_scale: logits are multiplied by it before the bias (Cohere's logit_scale, 1 / Granite's logits_scaling).
        compiled: run the part between the matrix products through torch.compile, one kernel instead of ten.

    Returns: [N] fp32 (fp64 for fp64 inputs), differentiable in hidden, weight and bias.
    """
    logits = Logits(logit_softcap, logit_scale, chunk_tokens, matmul_dtype(hidden, weight), compiled)
    with_grad = torch.is_grad_enabled()
    with torch.autocast(hidden.device.type, enabled=False):
        return _ChunkedLogProbs.apply(hidden, weight, bias, targets, logits, with_grad)


class _ChunkedLogProbs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, logits: Logits, with_grad: bool
    ) -> Tensor:
        need_hidden = with_grad and ctx.needs_input_grad[0]
        keep = with_grad and any(ctx.needs_input_grad[1:3]) and hidden.shape[0] <= logits.chunk_tokens
        w = weight.to(logits.dtype)
        unit_grad = hidden.new_empty(hidden.shape, dtype=logits.dtype) if need_hidden else None
        losses = hidden.new_empty(hidden.shape[0], dtype=torch.promote_types(logits.dtype, torch.float32))
        ctx.logits, ctx.only_chunk = logits, []
        for chunk, h, grad_logits in logits.chunks(hidden, w, bias, targets, losses, need_hidden or keep):
            if unit_grad is not None:
                torch.mm(grad_logits, w, out=unit_grad[chunk])
            if keep:
                ctx.only_chunk.append((chunk, h, grad_logits))
        # Weights are cast again in backward, so that no second [V, D] is kept from forward to backward.
        ctx.save_for_backward(hidden, weight, bias, targets, unit_grad)
        return losses.neg_()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, targets, unit_grad = ctx.saved_tensors
        logits: Logits = ctx.logits
        grad_hidden = None
        if unit_grad is not None:
            factor = (-logits.scale * grad).unsqueeze(1)  # [N, 1]
            grad_hidden = (unit_grad * factor).to(hidden.dtype)
        if not any(ctx.needs_input_grad[1:3]):
            return grad_hidden, None, None, None, None, None
        grad_weight, grad_bias = (
            WeightGradient(weight),
            torch.zeros(weight.shape[0], dtype=torch.float32, device=weight.device),
        )
        chunks = ctx.only_chunk
        if not chunks:
            losses = hidden.new_empty(hidden.shape[0], dtype=torch.promote_types(logits.dtype, torch.float32))
            chunks = logits.chunks(hidden, weight.to(logits.dtype), bias, targets, losses, gradient=True)
        for chunk, h, grad_logits in chunks:
            g = -grad[chunk]
            # A factor common to all tokens of an answer must not be rounded before the multiplication.
            grad_weight.add_product(grad_logits, (h * g.unsqueeze(1)).to(logits.dtype))
            if bias is not None:
                grad_bias = grad_bias + g.to(logits.dtype) @ grad_logits
        bias_gradient = None if bias is None else grad_bias.to(bias.dtype)
        return grad_hidden, grad_weight.result(), bias_gradient, None, None, None
