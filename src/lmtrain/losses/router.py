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


class Totals(NamedTuple):
    """Sums over tokens that the terms of one router need; sums of parts add up. No gradient."""

    chosen: Tensor  # [C], how many tokens have each choice among their top k
    probabilities: Tensor  # [C]
    tokens: Tensor  # []


def probabilities_of(logits: Tensor) -> Tensor:
    """Softmax [N, C] in fp32, or fp64 where the logits are."""
    return torch.softmax(at_least_fp32(logits), dim=-1)


def at_least_fp32(logits: Tensor) -> Tensor:
    return logits if logits.dtype == torch.float64 else logits.float()


@torch.no_grad()
def totals(logits: Tensor, top_k: int) -> Totals:
    """Sums of the terms over the tokens of these logits."""
    p = probabilities_of(logits)
    choices = p.topk(top_k, dim=-1).indices.flatten()
    chosen = p.new_zeros(p.shape[-1]).scatter_add(0, choices, torch.ones_like(choices, dtype=p.dtype))
    return Totals(chosen, p.sum(0), p.new_full((), p.shape[0]))


def router_terms(logits: Tensor, top_k: int, whole: Totals | None = None) -> RouterTerms:
    """All terms of one router, of these tokens alone or their part in those of a whole.

    load_balance: C * sum_i f_i * P_i (Fedus et al. 2021, arXiv:2101.03961, eq. 4-6); top_k where the load is even. f_i
        is the share of tokens that choose i, without gradient, P_i its mean probability.
    deviation: sum_i (P_i - 1 / C)^2.
    z_loss: mean of logsumexp(logits)^2 (ST-MoE: Zoph et al. 2022, arXiv:2202.08906, eq. 5).

    Args:
        logits: [N, C].
        top_k: how many choices a token makes.
        whole: of all tokens, these among them; the parts then add up to the terms of the whole, and so do their
            gradients. None: these tokens are the whole.
    """
    whole = whole if whole is not None else totals(logits, top_k)
    choices, n = logits.shape[-1], whole.tokens.clamp(min=1)  # a step may have no trained token
    mean = probabilities_of(logits).sum(0) / n  # this part's share in P
    away = whole.probabilities / n - 1 / choices  # sums to 0, so that sum_i away_i P_i is the deviation
    deviation = torch.dot(away, mean)
    part = logits.shape[0] / n
    shares = whole.chosen / (n * top_k)  # of the choices
    return RouterTerms(
        load_balance=choices * torch.dot(whole.chosen / n, mean),
        deviation=2 * deviation - deviation.detach(),  # the gradient of a square is twice that of one factor
        z_loss=at_least_fp32(logits).logsumexp(-1).square().sum() / n,
        entropy=part * (-torch.special.xlogy(shares, shares).sum() / max(math.log(choices), 1e-9)),
        dead=part * (shares == 0).to(shares.dtype).mean(),
    )


def over_layers(logits: Sequence[Tensor], top_k: int, wholes: Sequence[Totals], how: str) -> RouterTerms:
    """The terms of several routers as one; what is only reported is averaged over them.

    Args:
        logits: of each router, [N, C].
        wholes: of each router, as of `router_terms`.
        how: sum or mean of their losses; joint: the losses of one router that has the tokens of all of them, as
            transformers' `load_balancing_loss_func` has it.
    """
    terms = [router_terms(x, top_k, whole) for x, whole in zip(logits, wholes, strict=True)]
    summed = [sum(values[1:], values[0]) for values in zip(*terms, strict=True)]
    divided = [value / len(terms) for value in summed]
    if how == "joint":
        whole = Totals(*(sum(values[1:], values[0]) for values in zip(*wholes, strict=True)))
        parts = [router_terms(x, top_k, whole)[:3] for x in logits]  # they add up
        return RouterTerms(*(sum(values[1:], values[0]) for values in zip(*parts, strict=True)), *divided[3:])
    return RouterTerms(*(summed[:3] if how == "sum" else divided[:3]), *divided[3:])
