"""Losses over pairs of answers, as functions of summed log-probabilities (DPO and related losses) or of rewards.

Notation: `w` is the chosen answer, `l` the rejected one, `pi` the policy, `ref` the reference, |y| the number of tokens
of an answer. The log-ratio of an answer is `log pi(y|x) - log ref(y|x)`; beta times it is DPO's implicit reward. The
loss of a pair doesn't depend on the other pairs of its batch, so batch splits change nothing.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F


class Pairs(NamedTuple):
    """Log-probabilities of P pairs, each summed over the tokens of its answer; all [P], in fp32 or fp64."""

    chosen: Tensor
    rejected: Tensor
    chosen_tokens: Tensor  # number of tokens summed over, any dtype
    rejected_tokens: Tensor
    ref_chosen: Tensor | None = None  # under the reference; None without one
    ref_rejected: Tensor | None = None


class LossOptions(NamedTuple):
    """The numeric options of the losses; an option is read only by the losses that its comment names."""

    beta: float = 0.1
    label_smoothing: float = 0.0  # probability that a label is flipped: sigmoid, robust
    gamma: float = 0.5  # target margin: simpo
    dpop_lambda: float = 50.0  # weight of the penalty: dpop
    sft_weight: float = 0.0  # weight of the chosen answer's negative log-likelihood per token: all
    length_normalize: bool = False  # log-probabilities per token instead of per answer: all but simpo, orpo


class PreferenceLosses(NamedTuple):
    """The losses and rewards of each pair, all [P], in the dtype of the log-probabilities."""

    total: Tensor  # differentiable: preference + sft_weight * sft
    preference: Tensor  # detached
    sft: Tensor  # detached: negative log-likelihood of the chosen answer per token
    # Detached: beta times the answer's log-ratio (without a reference, its log-probability; for simpo, orpo per token).
    chosen_rewards: Tensor
    rejected_rewards: Tensor


class Ratios(NamedTuple):
    """The arguments of a loss, [P] each: log-ratios (without a reference log-probabilities; simpo, orpo: per token)."""

    chosen: Tensor
    rejected: Tensor

    @property
    def margin(self) -> Tensor:
        return self.chosen - self.rejected


def sigmoid(r: Ratios, o: LossOptions) -> Tensor:
    """Computes DPO (Rafailov et al. 2023, arXiv:2305.18290, eq. 7); with label smoothing, cDPO (Mitchell 2023).

    `-(1 - eps) log s(beta m) - eps log s(-beta m)` for the margin m and a label that is flipped with probability eps.
    """
    logit, eps = o.beta * r.margin, o.label_smoothing
    return -(1 - eps) * F.logsigmoid(logit) - eps * F.logsigmoid(-logit)


def robust(r: Ratios, o: LossOptions) -> Tensor:
    """Computes rDPO (Chowdhury et al. 2024, arXiv:2403.00409, eq. 12).

    `(-(1 - eps) log s(beta m) + eps log s(-beta m)) / (1 - 2 eps)`, eps < 0.5: unbiased if labels are flipped with
    probability eps.
    """
    logit, eps = o.beta * r.margin, o.label_smoothing
    return (-(1 - eps) * F.logsigmoid(logit) + eps * F.logsigmoid(-logit)) / (1 - 2 * eps)


def ipo(r: Ratios, o: LossOptions) -> Tensor:
    """Computes IPO (Azar et al. 2023, arXiv:2310.12036, eq. 17): `(m - 1 / (2 beta))^2`; the paper's tau is beta.

    The paper's results are for log-ratios per token (as its authors told TRL), which length_normalize=auto selects.
    """
    return (r.margin - 1 / (2 * o.beta)).square()


def hinge(r: Ratios, o: LossOptions) -> Tensor:
    """Computes SLiC-HF's hinge (Zhao et al. 2023, arXiv:2305.10425).

    It is applied to DPO's margin, as in RSO (Liu et al. 2023, arXiv:2309.06657).
    """
    return F.relu(1 - o.beta * r.margin)


def dpop(r: Ratios, o: LossOptions) -> Tensor:
    """Computes DPO-Positive (Pal et al. 2024, arXiv:2402.13228, eq. 3), which penalises a less likely chosen answer.

    `-log s(beta (m - lambda max(0, -chosen log-ratio)))`
    """
    return -F.logsigmoid(o.beta * (r.margin - o.dpop_lambda * F.relu(-r.chosen)))


def kto_pair(r: Ratios, o: LossOptions) -> Tensor:
    """Computes KTO on pairs (Ethayarajh et al. 2024, arXiv:2402.01306, eq. 8), with equal weight for both answers.

    `(1 - s(beta (chosen - z_l)) + 1 - s(beta (z_w - rejected))) / 2` with reference points z of KL(pi || ref), which
    carry no gradient. Each is `max(0, log-ratio)` of the pair's other answer: the paper's estimate over a batch of one,
    so that the loss of a pair does not depend on the micro-batch it is in.
    """
    z_chosen, z_rejected = F.relu(r.chosen.detach()), F.relu(r.rejected.detach())
    return (torch.sigmoid(o.beta * (z_rejected - r.chosen)) + torch.sigmoid(o.beta * (r.rejected - z_chosen))) / 2


def apo_zero(r: Ratios, o: LossOptions) -> Tensor:
    """Computes APO-zero (D'Oosterlinck et al. 2024, arXiv:2408.06266, eq. 7): chosen answers up, rejected ones down.

    For chosen answers that are better than the model's: `1 - s(beta chosen) + s(beta rejected)`
    """
    return torch.sigmoid(-o.beta * r.chosen) + torch.sigmoid(o.beta * r.rejected)


def apo_down(r: Ratios, o: LossOptions) -> Tensor:
    """Computes APO-down (D'Oosterlinck et al. 2024, arXiv:2408.06266, eq. 8): both answers down, rejected ones further.

    For chosen answers that are worse than the model's: `s(beta chosen) + 1 - s(beta m)`
    """
    return torch.sigmoid(o.beta * r.chosen) + torch.sigmoid(-o.beta * r.margin)


def simpo(r: Ratios, o: LossOptions) -> Tensor:
    """Computes SimPO (Meng et al. 2024, arXiv:2405.14734, eq. 6) from log-probabilities per token without a reference.

    `-log s(beta (log pi(w)/|w| - log pi(l)/|l|) - gamma)`
    """
    return -F.logsigmoid(o.beta * r.margin - o.gamma)


def orpo(r: Ratios, o: LossOptions) -> Tensor:
    """Computes ORPO (Hong et al. 2024, arXiv:2403.07691, eq. 6-7) from log-probabilities per token without a reference.

    `-log p(w) - beta log s(log odds(w) - log odds(l))` with `p(y) = exp(log pi(y) / |y|)` and `odds = p / (1 - p)`;
    the paper's lambda is beta. Its first term is the SFT loss, so it needs no sft_weight.
    """
    log_odds_ratio = _log_odds(r.chosen) - _log_odds(r.rejected)
    return -r.chosen - o.beta * F.logsigmoid(log_odds_ratio)


def _log_odds(log_p: Tensor) -> Tensor:
    """Computes log(p / (1 - p)) from log p < 0, without cancellation near p = 1."""
    log_p = log_p.clamp(max=-torch.finfo(log_p.dtype).eps)  # p = 1 has no finite odds
    return log_p - (-torch.expm1(log_p)).log()


class Loss(NamedTuple):
    """A preference loss and its properties."""

    function: Callable[[Ratios, LossOptions], Tensor]
    at_zero: Callable[[LossOptions], float] | None  # its value if policy and reference agree; None: no reference
    per_token: bool = False  # whether its paper takes log-probabilities per token
    options: tuple[str, ...] = ()  # those of LossOptions that only some losses read

    @property
    def has_reference(self) -> bool:
        return self.at_zero is not None


LOSSES: dict[str, Loss] = {
    "sigmoid": Loss(sigmoid, lambda o: math.log(2), options=("label_smoothing",)),
    "robust": Loss(robust, lambda o: math.log(2), options=("label_smoothing",)),
    "ipo": Loss(ipo, lambda o: 1 / (4 * o.beta**2), per_token=True),
    "hinge": Loss(hinge, lambda o: 1.0),
    "dpop": Loss(dpop, lambda o: math.log(2), options=("dpop_lambda",)),
    "kto_pair": Loss(kto_pair, lambda o: 0.5),
    "apo_zero": Loss(apo_zero, lambda o: 1.0),
    "apo_down": Loss(apo_down, lambda o: 1.0),
    "simpo": Loss(simpo, None, per_token=True, options=("gamma",)),
    "orpo": Loss(orpo, None, per_token=True),
}


REFERENCE_FREE = ("sigmoid",)  # losses with a reference that are also defined without one


def preference_losses(name: str, pairs: Pairs, options: LossOptions) -> PreferenceLosses:
    """Computes the loss called `name` of each pair, with RPO's SFT term (Pang et al. 2024, arXiv:2404.19733, eq. 2).

    Without a reference, sigmoid assumes one that finds all answers equally likely, as "reference-free" DPO does:
    `-log s(beta (log pi(w) - log pi(l)))`.

    Raises KeyError for an unknown name, ValueError if the loss needs a reference and there is none.
    """
    loss = LOSSES[name]
    sft = -pairs.chosen / pairs.chosen_tokens
    if loss.has_reference:
        if pairs.ref_chosen is not None and pairs.ref_rejected is not None:
            per_answer = Ratios(pairs.chosen - pairs.ref_chosen, pairs.rejected - pairs.ref_rejected)
        elif name in REFERENCE_FREE:
            per_answer = Ratios(pairs.chosen, pairs.rejected)
        else:
            raise ValueError(f"{name} needs the reference's log-probabilities")
        ratios = _per_token(per_answer, pairs) if options.length_normalize else per_answer
        rewards = per_answer
    else:
        ratios = rewards = _per_token(Ratios(pairs.chosen, pairs.rejected), pairs)
    preference = loss.function(ratios, options)
    total = preference + options.sft_weight * sft if options.sft_weight else preference
    return PreferenceLosses(
        total,
        preference.detach(),
        sft.detach(),
        options.beta * rewards.chosen.detach(),
        options.beta * rewards.rejected.detach(),
    )


def _per_token(ratios: Ratios, pairs: Pairs) -> Ratios:
    return Ratios(ratios.chosen / pairs.chosen_tokens, ratios.rejected / pairs.rejected_tokens)


def bradley_terry(chosen: Tensor, rejected: Tensor, margin: Tensor | None, centring: float) -> Tensor:
    """Computes a reward model's loss of each pair, [P].

    It is `-log s(chosen - rejected - margin) + centring (chosen + rejected)^2`. A constant added to both rewards leaves
    the first term unchanged, so the second keeps their sum near 0 (Eisenstein et al. 2023, arXiv:2312.09244).

    Args:
        chosen: [P] rewards of the preferred answers.
        rejected: [P] rewards of the others.
        margin: [P], by how much the rewards should differ at least; None: 0.
        centring: weight of the second term; 0.01 in that paper.
    """
    difference = chosen - rejected if margin is None else chosen - rejected - margin
    return -F.logsigmoid(difference) + centring * (chosen + rejected).square()
