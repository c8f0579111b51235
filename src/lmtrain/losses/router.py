"""Losses that keep a router from sending all tokens the same way: to experts of a mixture, to chapters of a memory.

All take logits [N, C] of one router, N tokens and C choices, in any float dtype, and give 0-dim tensors of fp32
(fp64 of fp64).
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class RouterTerms(NamedTuple):
    """Of one router, or summed or averaged over several; differentiable but for the last two, which are reported."""

    load_balance: Tensor
    deviation: Tensor
    z_loss: Tensor
    entropy: Tensor  # of the shares of tokens that choose each, 1 where even
    dead: Tensor  # share of choices that no token made


def probabilities_of(logits: Tensor) -> Tensor:
    """Softmax [N, C] in fp32, or fp64 where the logits are."""
    return torch.softmax(logits if logits.dtype == torch.float64 else logits.float(), dim=-1)


def shares(probabilities: Tensor, top_k: int) -> Tensor:
    """[C]: the share of tokens that have each choice among their `top_k`; they sum to top_k."""
    chosen = probabilities.topk(top_k, dim=-1).indices.flatten()
    counts = probabilities.new_zeros(probabilities.shape[-1])
    return counts.scatter_add(0, chosen, torch.ones_like(chosen, dtype=counts.dtype)) / probabilities.shape[0]


def load_balance(logits: Tensor, top_k: int) -> Tensor:
    """C * sum_i f_i * P_i (Fedus et al. 2021, arXiv:2101.03961, eq. 4-6); top_k where the load is even.

    f_i is the share of tokens that choose i, without gradient, P_i its mean probability.
    """
    p = probabilities_of(logits)
    return p.shape[-1] * torch.dot(shares(p, top_k), p.mean(0))


def deviation(logits: Tensor) -> Tensor:
    """sum_i (P_i - 1 / C)^2, P_i the mean probability of choice i."""
    mean = probabilities_of(logits).mean(0)
    return (mean - 1 / mean.shape[0]).square().sum()


def z_loss(logits: Tensor) -> Tensor:
    """Mean of logsumexp(logits)^2 (ST-MoE: Zoph et al. 2022, arXiv:2202.08906, eq. 5)."""
    return (logits if logits.dtype == torch.float64 else logits.float()).logsumexp(-1).square().mean()


def router_terms(logits: Tensor, top_k: int) -> RouterTerms:
    """All of them for one router."""
    with torch.no_grad():
        share = shares(probabilities_of(logits), top_k)
        p = share / top_k
        entropy = -torch.special.xlogy(p, p).sum() / max(math.log(p.shape[0]), 1e-9)
        dead = (share == 0).to(share.dtype).mean()
    return RouterTerms(load_balance(logits, top_k), deviation(logits), z_loss(logits), entropy, dead)


def over_layers(terms: Sequence[RouterTerms], how: str) -> RouterTerms:
    """Each loss summed over the routers, or averaged (`how`: sum or mean); what is only reported is averaged."""
    summed = [sum(values[1:], values[0]) for values in zip(*terms, strict=True)]
    divided = [value / len(terms) for value in summed]
    return RouterTerms(*(summed[:3] if how == "sum" else divided[:3]), *divided[3:])
