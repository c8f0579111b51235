"""A kernel for the loss that is being tried: softmax, loss and gradient of a row of logits in one program.

The compiled loss reads the logits twice and writes them once, in two kernels: 10.9 ms of gpt_small's 125 ms step on an
H200, where its bytes would take 4.6. Here a row is read a second time while it is still in the cache. To be kept in
lmtrain only if the queue's part "switches" finds it faster. Needs Triton; TRITON_INTERPRET=1 runs it on a CPU.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from lmtrain.losses.cross_entropy import Terms


@triton.jit
def rows(logits, labels, losses, nlls, columns, z_loss, smoothing, GRADIENT: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    at = logits + row.to(tl.int64) * columns
    label = tl.load(labels + row)
    # Loaded before the first loop, whose reductions let no warp of the program be so far ahead as to overwrite it.
    x_label = tl.load(at + label).to(tl.float32)
    largest, total, mean = -float("inf"), 0.0, 0.0
    for start in range(0, columns, BLOCK):
        column = start + tl.arange(0, BLOCK)
        x = tl.load(at + column, mask=column < columns, other=-float("inf")).to(tl.float32)
        new = tl.maximum(largest, tl.max(x, 0))
        total = total * tl.exp(largest - new) + tl.sum(tl.exp(x - new), 0)
        mean += tl.sum(tl.where(column < columns, x, 0.0), 0) / columns
        largest = new
    lse = largest + tl.log(total)
    tl.store(nlls + row, lse - x_label)
    tl.store(losses + row, lse - (1 - smoothing) * x_label - smoothing * mean + z_loss * lse * lse)
    if GRADIENT:
        for start in range(0, columns, BLOCK):
            column = start + tl.arange(0, BLOCK)
            x = tl.load(at + column, mask=column < columns, other=-float("inf")).to(tl.float32)
            p = tl.exp(x - lse) * (1 + 2 * z_loss * lse) - smoothing / columns
            p -= tl.where(column == label, 1 - smoothing, 0.0)
            tl.store(at + column, p.to(logits.dtype.element_ty), mask=column < columns)


def block(logits: Tensor, labels: Tensor, terms: Terms, gradient: bool, size: int, warps: int) -> tuple[Tensor, Tensor]:
    """Does what losses.cross_entropy._compiled_block does, without a soft cap, for contiguous logits [b, V]."""
    if terms.logit_softcap is not None:
        raise NotImplementedError("no soft cap")
    losses, nlls = torch.empty(2, len(labels), device=logits.device)
    rows[(len(labels),)](
        logits,
        labels,
        losses,
        nlls,
        logits.shape[1],
        terms.z_loss,
        terms.label_smoothing,
        GRADIENT=gradient,
        BLOCK=size,
        num_warps=warps,
    )
    return losses, nlls
