"""Losses over pairs of answers, as functions of summed log-probabilities: DPO and its relatives; or of rewards.

Notation: `w` is the chosen answer, `l` the rejected one, `pi` the policy, `ref` the reference, |y| the tokens of an
answer. The log-ratio of an answer is `log pi(y|x) - log ref(y|x)`; beta times it is DPO's implicit reward. Every loss
is of one pair and knows nothing of the other pairs of its batch, so batch splits change nothing.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F


class Pairs(NamedTuple):
    """Log-probabilities of P pairs, each summed over the tokens of its answer; all [P] fp32."""

    chosen: Tensor
    rejected: Tensor
    chosen_tokens: Tensor  # number of tokens summed over, any dtype
    rejected_tokens: Tensor
    ref_chosen: Tensor | None = None  # under the reference; None without one
    ref_rejected: Tensor | None = None


class LossOptions(NamedTuple):
    """The numbers that shape a loss; each is read only by the losses that say so."""

    beta: float = 0.1
    label_smoothing: float = 0.0  # probability that a label is flipped: sigmoid, robust
    gamma: float = 0.5  # target margin: simpo
    dpop_lambda: float = 50.0  # weight of the penalty: dpop
    sft_weight: float = 0.0  # weight of the chosen answer's negative log-likelihood per token: all
    length_normalize: bool = False  # log-probabilities per token instead of per answer: all but simpo, orpo


class PreferenceLosses(NamedTuple):
    """Per pair, all [P] fp32."""

    total: Tensor  # differentiable: preference + sft_weight * sft
    preference: Tensor  # detached
    sft: Tensor  # detached: negative log-likelihood of the chosen answer per token
    # Detached: beta * log-ratio of the answer, without reference its log-probability; for simpo and orpo per token.
    chosen_rewards: Tensor
    rejected_rewards: Tensor


class Ratios(NamedTuple):
    """What a loss is a function of, [P] each: log-ratios (log-probabilities per token where there is no reference)."""

    chosen: Tensor
    rejected: Tensor

    @property
    def margin(self) -> Tensor:
        return self.chosen - self.rejected


def sigmoid(r: Ratios, o: LossOptions) -> Tensor:
    """DPO (Rafailov et al. 2023, arXiv:2305.18290, eq. 7); with label smoothing cDPO (Mitchell 2023).

    `-(1 - eps) log s(beta m) - eps log s(-beta m)` for the margin m and a label that is flipped with probability eps.
    """
    logit, eps = o.beta * r.margin, o.label_smoothing
    return -(1 - eps) * F.logsigmoid(logit) - eps * F.logsigmoid(-logit)


def robust(r: Ratios, o: LossOptions) -> Tensor:
    """rDPO (Chowdhury et al. 2024, arXiv:2403.00409, eq. 12): unbiased where labels are flipped with probability eps.

    `(-(1 - eps) log s(beta m) + eps log s(-beta m)) / (1 - 2 eps)`; eps < 0.5.
    """
    logit, eps = o.beta * r.margin, o.label_smoothing
    return (-(1 - eps) * F.logsigmoid(logit) + eps * F.logsigmoid(-logit)) / (1 - 2 * eps)


def ipo(r: Ratios, o: LossOptions) -> Tensor:
    """IPO (Azar et al. 2023, arXiv:2310.12036, eq. 17): `(m - 1 / (2 beta))^2`, its tau being beta.

    The paper's results are those of log-ratios per token (its authors to TRL), which length_normalize=auto takes.
    """
    return (r.margin - 1 / (2 * o.beta)).square()


def hinge(r: Ratios, o: LossOptions) -> Tensor:
    """SLiC-HF's hinge (Zhao et al. 2023, arXiv:2305.10425) on DPO's margin (RSO, Liu et al. 2023, arXiv:2309.06657)."""
    return F.relu(1 - o.beta * r.margin)


def dpop(r: Ratios, o: LossOptions) -> Tensor:
    """DPO-Positive (Pal et al. 2024, arXiv:2402.13228, eq. 3): a chosen answer that becomes less likely is penalised.

    `-log s(beta (m - lambda max(0, -chosen log-ratio)))`
    """
    return -F.logsigmoid(o.beta * (r.margin - o.dpop_lambda * F.relu(-r.chosen)))


def kto_pair(r: Ratios, o: LossOptions) -> Tensor:
    """KTO on pairs (Ethayarajh et al. 2024, arXiv:2402.01306, eq. 8), both answers weighing the same.

    `(1 - s(beta (chosen - z_l)) + 1 - s(beta (z_w - rejected))) / 2` with reference points z of KL(pi || ref), through
    which nothing is learned. Each is `max(0, log-ratio)` of the pair's other answer: the paper's estimate over a batch
    of one, so that the loss of a pair does not depend on the micro-batch it is in.
    """
    z_chosen, z_rejected = F.relu(r.chosen.detach()), F.relu(r.rejected.detach())
    return (torch.sigmoid(o.beta * (z_rejected - r.chosen)) + torch.sigmoid(o.beta * (r.rejected - z_chosen))) / 2


def apo_zero(r: Ratios, o: LossOptions) -> Tensor:
    """APO-zero (D'Oosterlinck et al. 2024, arXiv:2408.06266, eq. 7): chosen answers up, rejected ones down.

    For chosen answers that are better than the model's: `1 - s(beta chosen) + s(beta rejected)`
    """
    return torch.sigmoid(-o.beta * r.chosen) + torch.sigmoid(o.beta * r.rejected)


def apo_down(r: Ratios, o: LossOptions) -> Tensor:
    """APO-down (D'Oosterlinck et al. 2024, arXiv:2408.06266, eq. 8): both down, rejected ones further.

    For chosen answers that are worse than the model's: `s(beta chosen) + 1 - s(beta m)`
    """
    return torch.sigmoid(o.beta * r.chosen) + torch.sigmoid(-o.beta * r.margin)


def simpo(r: Ratios, o: LossOptions) -> Tensor:
    """SimPO (Meng et al. 2024, arXiv:2405.14734, eq. 6), on log-probabilities per token, without a reference.

    `-log s(beta (log pi(w)/|w| - log pi(l)/|l|) - gamma)`
    """
    return -F.logsigmoid(o.beta * r.margin - o.gamma)


def orpo(r: Ratios, o: LossOptions) -> Tensor:
    """ORPO (Hong et al. 2024, arXiv:2403.07691, eq. 6-7), on log-probabilities per token, without a reference.

    `-log p(w) - beta log s(log odds(w) - log odds(l))` with `p(y) = exp(log pi(y) / |y|)` and `odds = p / (1 - p)`;
    the paper's lambda is beta. Its first term is the SFT loss, so it needs no sft_weight.
    """
    log_odds_ratio = _log_odds(r.chosen) - _log_odds(r.rejected)
    return -r.chosen - o.beta * F.logsigmoid(log_odds_ratio)


def _log_odds(log_p: Tensor) -> Tensor:
    """log(p / (1 - p)) from log p < 0, without cancellation near p = 1."""
    log_p = log_p.clamp(max=-torch.finfo(log_p.dtype).eps)  # p = 1 has no finite odds
    return log_p - (-torch.expm1(log_p)).log()


class Loss(NamedTuple):
    """A loss by name."""

    function: Callable[[Ratios, LossOptions], Tensor]
    at_zero: Callable[[LossOptions], float] | None  # its value where policy and reference agree; None: no reference
    per_token: bool = False  # whether its paper takes log-probabilities per token

    @property
    def has_reference(self) -> bool:
        return self.at_zero is not None


LOSSES: dict[str, Loss] = {
    "sigmoid": Loss(sigmoid, lambda o: math.log(2)),
    "robust": Loss(robust, lambda o: math.log(2)),
    "ipo": Loss(ipo, lambda o: 1 / (4 * o.beta**2), per_token=True),
    "hinge": Loss(hinge, lambda o: 1.0),
    "dpop": Loss(dpop, lambda o: math.log(2)),
    "kto_pair": Loss(kto_pair, lambda o: 0.5),
    "apo_zero": Loss(apo_zero, lambda o: 1.0),
    "apo_down": Loss(apo_down, lambda o: 1.0),
    "simpo": Loss(simpo, None, per_token=True),
    "orpo": Loss(orpo, None, per_token=True),
}


REFERENCE_FREE = ("sigmoid",)  # of the losses with a reference those that mean something without


def preference_losses(name: str, pairs: Pairs, options: LossOptions) -> PreferenceLosses:
    """The loss called `name` of each pair, with the SFT term of RPO (Pang et al. 2024, arXiv:2404.19733, eq. 2).

    Without a reference sigmoid takes it for one that finds all answers equally likely, as "reference-free" DPO does:
    `-log s(beta (log pi(w) - log pi(l)))`.

    Raises KeyError for an unknown name, ValueError where a reference is missing.
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
    """A reward model's loss of each pair, [P]: `-log s(chosen - rejected - margin) + centring (chosen + rejected)^2`.

    A pair says nothing of rewards that both are larger by: the second term holds their sum near 0 (Eisenstein et al.
    2023, arXiv:2312.09244).

    Args:
        chosen: [P] rewards of the answers that were preferred.
        rejected: [P] of the others.
        margin: [P], by how much rewards should differ at least; None: 0.
        centring: weight of the second term, 0.01 there.
    """
    difference = chosen - rejected if margin is None else chosen - rejected - margin
    return -F.logsigmoid(difference) + centring * (chosen + rejected).square()
