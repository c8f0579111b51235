"""Losses that keep a router from sending all tokens to the same experts of a mixture, or chapters of a memory.

They are computed from the logits [N, C] of a router, N tokens and C choices, in any float dtype, and are 0-dim tensors
in fp32 (fp64 for fp64 logits).
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class RouterTerms(NamedTuple):
    """The terms of one router, or their sum or mean over several; the last two are only reported, without gradient."""

    load_balance: Tensor
    deviation: Tensor
    z_loss: Tensor
    entropy: Tensor  # of the choices' shares of tokens, scaled to 1 for an even load
    dead: Tensor  # share of choices that no token made


class Totals(NamedTuple):
    """Sums over tokens from which the terms of one router are computed; sums of parts add up. No gradient."""

    chosen: Tensor  # [C], how many tokens have each choice among their top k
    probabilities: Tensor  # [C]
    tokens: Tensor  # []


def probabilities_of(logits: Tensor) -> Tensor:
    """Returns the softmax [N, C] in fp32, or in fp64 for fp64 logits."""
    return torch.softmax(at_least_fp32(logits), dim=-1)


def at_least_fp32(logits: Tensor) -> Tensor:
    return logits if logits.dtype == torch.float64 else logits.float()


@torch.no_grad()
def totals(logits: Tensor, top_k: int) -> Totals:
    """Sums what the terms need over the tokens of these logits."""
    p = probabilities_of(logits)
    choices = p.topk(top_k, dim=-1).indices.flatten()
    chosen = p.new_zeros(p.shape[-1]).scatter_add(0, choices, torch.ones_like(choices, dtype=p.dtype))
    return Totals(chosen, p.sum(0), p.new_full((), p.shape[0]))


def router_terms(logits: Tensor, top_k: int, whole: Totals | None = None) -> RouterTerms:
    """Computes all terms of one router, of these tokens alone or as their part in the terms of a larger set.

    load_balance: C * sum_i f_i * P_i (Fedus et al. 2021, arXiv:2101.03961, eq. 4-6); top_k for an even load. f_i is the
        share of tokens that choose i, without gradient, P_i its mean probability.
    deviation: sum_i (P_i - 1 / C)^2.
    z_loss: mean of logsumexp(logits)^2 (ST-MoE: Zoph et al. 2022, arXiv:2202.08906, eq. 5).

    Args:
        logits: [N, C].
        top_k: how many choices a token makes.
        whole: totals of a larger set of tokens that includes these; the parts then add up to the terms of that set, and
            so do their gradients. None: the totals of these tokens.
    """
    whole = whole if whole is not None else totals(logits, top_k)
    choices, n = logits.shape[-1], whole.tokens.clamp(min=1)  # a step may have no trained token
    mean = probabilities_of(logits).sum(0) / n  # these tokens' contribution to P
    away = whole.probabilities / n - 1 / choices  # sums to 0, so that sum_i away_i P_i is the deviation
    deviation = torch.dot(away, mean)
    part = logits.shape[0] / n
    shares = whole.chosen / (n * top_k)  # each choice's share of all choices made
    return RouterTerms(
        load_balance=choices * torch.dot(whole.chosen / n, mean),
        deviation=2 * deviation - deviation.detach(),  # the gradient of a square is twice that of one factor
        z_loss=at_least_fp32(logits).logsumexp(-1).square().sum() / n,
        entropy=part * (-torch.special.xlogy(shares, shares).sum() / max(math.log(choices), 1e-9)),
        dead=part * (shares == 0).to(shares.dtype).mean(),
    )


def over_layers(logits: Sequence[Tensor], top_k: int, wholes: Sequence[Totals], how: str) -> RouterTerms:
    """Combines the terms of several routers; those that are only reported are averaged over the routers.

    Args:
        logits: of each router, [N, C].
        wholes: of each router, as in `router_terms`.
        how: sum or mean of their losses; joint: the losses of one router that gets the tokens of all of them, as in
            transformers' `load_balancing_loss_func`.
    """
    terms = [router_terms(x, top_k, whole) for x, whole in zip(logits, wholes, strict=True)]
    summed = [sum(values[1:], values[0]) for values in zip(*terms, strict=True)]
    divided = [value / len(terms) for value in summed]
    if how == "joint":
        whole = Totals(*(sum(values[1:], values[0]) for values in zip(*wholes, strict=True)))
        parts = [router_terms(x, top_k, whole)[:3] for x in logits]  # these add up
        return RouterTerms(*(sum(values[1:], values[0]) for values in zip(*parts, strict=True)), *divided[3:])
    return RouterTerms(*(summed[:3] if how == "sum" else divided[:3]), *divided[3:])
