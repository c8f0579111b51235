"""Policy-gradient losses over sampled completions, as functions of token log-probabilities: GRPO and related methods.

Notation: a prompt has a group of G completions; completion i has |o_i| tokens and reward R_i. `pi` is the policy that
is trained, `old` the policy that sampled the completions, both computed by the trainer's own forward pass. Sums over
completions are returned, never means, so that the parts of a step add up however it is split.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

STD_EPS = 1e-4  # added to a group's standard deviation, as TRL does


class Variant(NamedTuple):
    """The properties in which the policy-gradient methods differ."""

    ratio: str  # pi / old of a "token", its "geometric" mean over a completion, of the whole "completion"; or "none"
    over: str  # token losses are averaged over their "completion", the step's "tokens", "max_tokens"; or a "sum"
    baseline: str  # subtracted from a reward: the mean of the "group" or of the "others" in it; "none"
    by_std: bool  # whether advantages are divided by the group's standard deviation
    clip_low: float  # ratios below 1 - clip_low are not pushed further down
    clip_high: float
    overlong_share: float = 0.0  # the final share of max_new_tokens, in which length is penalised

    @property
    def kl_in_reward(self) -> bool:
        """Whether the KL penalty is subtracted from a completion's reward instead of being added to the loss."""
        return self.over == "sum"


VARIANTS: dict[str, Variant] = {
    # Shao et al. 2024, DeepSeekMath, arXiv:2402.03300, eq. 3.
    "grpo": Variant("token", "completion", "group", True, 0.2, 0.2),
    # Liu et al. 2025, "Understanding R1-Zero-like training", arXiv:2503.20783: no length or std normalisation.
    "dr_grpo": Variant("token", "max_tokens", "group", False, 0.2, 0.2),
    # Yu et al. 2025, arXiv:2503.14476: clip-higher, token-level loss, soft punishment of overlong completions.
    "dapo": Variant("token", "tokens", "group", True, 0.2, 0.28, overlong_share=0.2),
    # Ahmadian et al. 2024, arXiv:2402.14740: REINFORCE with a leave-one-out baseline; a completion is one action.
    "rloo": Variant("completion", "sum", "others", False, 0.2, 0.2),
    # Zheng et al. 2025, arXiv:2507.18071, eq. 5: one ratio per sequence, with that paper's clip range.
    "gspo": Variant("geometric", "completion", "group", True, 3e-4, 4e-4),
    # Williams 1992: the log-probability of a completion times its reward.
    "reinforce": Variant("none", "sum", "none", False, 0.0, 0.0),
}


def advantages(rewards: Tensor, variant: Variant) -> Tensor:
    """Computes how much better each completion is than its group, [P, G] from rewards [P, G].

    A NaN reward means that the completion could not be scored: it is left out of its group's statistics and gets an
    advantage of 0. Groups whose rewards are all equal also get advantages of 0, if the variant has a baseline.
    """
    known = ~rewards.isnan()
    count = known.sum(1, keepdim=True)
    total = rewards.nansum(1, keepdim=True)
    if variant.baseline == "none":
        found = rewards
    elif variant.baseline == "others":
        found = rewards - (total - rewards) / (count - 1)
    else:
        found = rewards - total / count
    if variant.by_std:
        found = found / (deviation(rewards) + STD_EPS)
    # Equal rewards give no signal, even if rounding sets their mean apart from them.
    lowest = torch.where(known, rewards, torch.inf).amin(1, keepdim=True)
    highest = torch.where(known, rewards, -torch.inf).amax(1, keepdim=True)
    enough = known if variant.baseline == "none" else known & (highest > lowest)
    return torch.where(enough, found, torch.zeros_like(found))


def deviation(rewards: Tensor) -> Tensor:
    """Computes the standard deviation of each group's rewards, [P, 1] from [P, G], without NaN; 0 of fewer than two."""
    known = ~rewards.isnan()
    count = known.sum(1, keepdim=True)
    mean = rewards.nansum(1, keepdim=True) / count
    squares = torch.where(known, (rewards - mean).square(), torch.zeros_like(rewards)).sum(1, keepdim=True)
    return torch.where(count > 1, (squares / (count - 1).clamp(min=1)).sqrt(), torch.zeros_like(squares))


def overlong_penalty(lengths: Tensor, max_tokens: int, buffer: int) -> Tensor:
    """Computes DAPO's soft penalty (eq. 13): 0 up to `max_tokens - buffer` tokens, falling to -1 at `max_tokens`."""
    if not buffer:
        return torch.zeros_like(lengths, dtype=torch.float64)
    return ((max_tokens - buffer - lengths.double()) / buffer).clamp(-1, 0)


def k1(policy: Tensor, reference: Tensor) -> Tensor:
    """Computes `log pi - log ref`: unbiased, of high variance. As a loss term its expected gradient is zero."""
    return policy - reference


def k2(policy: Tensor, reference: Tensor) -> Tensor:
    """Computes half the squared log-ratio; on samples of the policy its gradient is unbiased for KL(pi || ref)."""
    return (policy - reference).square() / 2


def k3(policy: Tensor, reference: Tensor) -> Tensor:
    """Computes `ref / pi - 1 - log(ref / pi)`, GRPO's estimator: unbiased and never negative."""
    return torch.expm1(reference - policy) - (reference - policy)


# Schulman 2020, "Approximating KL divergence".
KL_ESTIMATORS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {"k1": k1, "k2": k2, "k3": k3}


class Sampled(NamedTuple):
    """C sampled tokens of A completions, with what a loss needs. Log-probabilities are fp64."""

    old: Tensor  # [C], under the policy that sampled them
    completion: Tensor  # int64 [C], which of the A completions each belongs to
    lengths: Tensor  # int64 [A]
    advantages: Tensor  # [A]
    weight: Tensor  # [A], 1, or 0 for a completion that is left out
    correction: Tensor | None = None  # [C], factor of a token's loss: trainer's / sampler's probability
    reference: Tensor | None = None  # [C], under the reference


class LossSettings(NamedTuple):
    """The numeric settings of a policy loss."""

    clip_low: float
    clip_high: float
    max_tokens: int  # maximum length of a completion
    kl_coef: float = 0.0
    kl_estimator: str = "k3"
    kl_by_ratio: bool = False  # multiply the estimate by the ratio: its gradient is then that of the KL itself


class PolicyLoss(NamedTuple):
    """Sums over the completions (`loss`) and over their tokens (the others, detached)."""

    loss: Tensor  # 0-dim, differentiable
    clipped: Tensor  # tokens whose gradient is clipped away (with sequence ratios: all of a completion)
    kl: Tensor  # KL estimates of the tokens, of completions that are left out as well


def policy_loss(
    policy: Tensor, sampled: Sampled, variant: Variant, settings: LossSettings, completions_per_token: Tensor
) -> PolicyLoss:
    """Computes the summed loss of A completions; divided by the completions of the whole step it is the variant's loss.

    Args:
        policy: [C] fp64, differentiable log-probabilities of the tokens.
        completions_per_token: 0-dim, completions / tokens of the whole step; read where `over` is "tokens".
    """
    where, advantage = sampled.completion, sampled.advantages[sampled.completion]
    log_ratio = policy - sampled.old
    ratio = torch.ones_like(policy)
    if variant.ratio == "none":
        tokens, clipped = -advantage * policy, torch.zeros_like(policy, dtype=torch.bool)
    else:
        if variant.ratio != "token":
            summed = per_completion(log_ratio, sampled)
            if variant.ratio == "geometric":
                summed = summed / sampled.lengths.clamp(min=1)
            log_ratio = summed[where]
        ratio = log_ratio.exp()
        low, high = 1 - settings.clip_low, 1 + settings.clip_high
        tokens = -torch.minimum(ratio * advantage, ratio.clamp(low, high) * advantage)
        clipped = ((ratio < low) & (advantage < 0)) | ((ratio > high) & (advantage > 0))
        if variant.ratio == "completion":  # one action, whose loss counts once: split it among the tokens
            tokens = tokens / sampled.lengths.clamp(min=1)[where]
    if sampled.correction is not None:
        tokens = tokens * sampled.correction
    weight = sampled.weight[where]
    kl = torch.zeros_like(policy)
    if sampled.reference is not None:
        kl = KL_ESTIMATORS[settings.kl_estimator](policy, sampled.reference)
        if settings.kl_coef and not variant.kl_in_reward:
            tokens = tokens + settings.kl_coef * (kl * ratio if settings.kl_by_ratio else kl)
    scales: dict[str, Tensor | float] = {
        "completion": 1 / sampled.lengths.clamp(min=1).double()[where],
        "tokens": completions_per_token,
        "max_tokens": 1 / settings.max_tokens,
        "sum": 1.0,
    }
    loss = (tokens * scales[variant.over] * weight).sum()
    return PolicyLoss(loss, (clipped * weight).sum(), kl.detach().sum())


def per_completion(tokens: Tensor, sampled: Sampled) -> Tensor:
    """Sums the values [C] of the tokens of each completion: [A]."""
    return torch.zeros_like(sampled.advantages, dtype=tokens.dtype).index_add(0, sampled.completion, tokens)
