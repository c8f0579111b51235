"""Policy-gradient losses against plain loops written from the papers, for several splits of a step."""

import math
from typing import Any

import pytest
import torch

from lmtrain.losses.policy import (
    VARIANTS,
    LossSettings,
    Sampled,
    advantages,
    deviation,
    k1,
    k2,
    k3,
    overlong_penalty,
    policy_loss,
)

GROUP, MOST = 4, 9
LENGTHS = [3, 9, 1, 5, 2, 7, 4, 6]


def completions() -> tuple[list[torch.Tensor], list[torch.Tensor], list[torch.Tensor], torch.Tensor]:
    """Returns per-completion token log-probabilities of policy, sampler and reference, and the rewards [2, G]."""
    torch.manual_seed(1)
    old = [-2 * torch.rand(n, dtype=torch.float64) for n in LENGTHS]
    policy = [(o + 0.3 * torch.randn_like(o)).clamp(max=-1e-3).requires_grad_() for o in old]
    reference = [o - 0.2 * torch.randn_like(o) for o in old]
    return policy, old, reference, torch.rand(2, GROUP, dtype=torch.float64)


def by_the_paper(name: str, policy: Any, old: Any, advantage: list[float], low: float, high: float) -> torch.Tensor:
    """Computes the loss of all completions by the formula of the variant's paper, token by token."""
    each, lengths = [], [len(p) for p in policy]
    for p, o, a in zip(policy, old, advantage, strict=True):
        if name == "reinforce":
            each.append([-a * p.sum()])
            continue
        if name == "rloo":
            ratios = [(p - o).sum().exp()]
        elif name == "gspo":
            ratios = [((p - o).sum() / len(p)).exp()] * len(p)
        else:
            ratios = list((p - o).exp())
        each.append([-min(r * a, r.clamp(1 - low, 1 + high) * a) for r in ratios])
    if name in ("rloo", "reinforce"):
        return sum(terms[0] for terms in each) / len(each)
    if name == "dapo":
        return sum(sum(terms) for terms in each) / sum(lengths)
    if name == "dr_grpo":
        return sum(sum(terms) for terms in each) / MOST / len(each)
    return sum(sum(terms) / len(terms) for terms in each) / len(each)


@pytest.mark.parametrize("split", [[8], [4, 4], [3, 5]])
@pytest.mark.parametrize("name", VARIANTS)
def test_equals_the_paper(name: str, split: list[int]) -> None:
    """Loss and gradients equal the paper's for completions of uneven lengths, off-policy, with some ratios clipped."""
    variant = VARIANTS[name]._replace(clip_low=0.1, clip_high=0.15)
    policy, old, _, rewards = completions()
    compared = advantages(rewards, variant).flatten()
    tokens, loss, first = sum(LENGTHS), torch.zeros((), dtype=torch.float64), 0
    settings = LossSettings(0.1, 0.15, MOST)
    for count in split:
        some = slice(first, first + count)
        first += count
        lengths = torch.tensor(LENGTHS[some])
        sampled = Sampled(torch.cat(old[some]), torch.repeat_interleave(torch.arange(count), lengths), lengths,
                          compared[some], torch.ones(count, dtype=torch.float64))  # fmt: skip
        scale = torch.tensor(len(LENGTHS) / tokens, dtype=torch.float64)
        loss = loss + policy_loss(torch.cat(policy[some]), sampled, variant, settings, scale).loss / len(LENGTHS)
    found = torch.autograd.grad(loss, policy)
    expected = by_the_paper(name, policy, old, compared.tolist(), 0.1, 0.15)
    assert loss.item() == pytest.approx(expected.item(), rel=1e-12)
    for ours, theirs in zip(found, torch.autograd.grad(expected, policy), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-14)


def test_advantages_are_the_papers() -> None:
    rewards = torch.tensor([[1.0, 0.0, 0.0, 3.0], [2.0, 2.0, 2.0, 2.0]], dtype=torch.float64)
    mean, std = 1.0, math.sqrt((0 + 1 + 1 + 4) / 3)
    assert advantages(rewards, VARIANTS["dr_grpo"])[0].tolist() == [0.0, -1.0, -1.0, 2.0]
    expected = [(r - mean) / (std + 1e-4) for r in rewards[0].tolist()]
    assert advantages(rewards, VARIANTS["grpo"])[0].tolist() == pytest.approx(expected)
    others = [1 - 1.0, 0 - 4 / 3, 0 - 4 / 3, 3 - 1 / 3]
    assert advantages(rewards, VARIANTS["rloo"])[0].tolist() == pytest.approx(others)
    assert advantages(rewards, VARIANTS["reinforce"])[0].tolist() == rewards[0].tolist()
    assert advantages(rewards, VARIANTS["grpo"])[1].tolist() == [0.0] * 4


def test_a_completion_nobody_could_score_takes_no_part() -> None:
    rewards = torch.tensor([[1.0, math.nan, 0.0, 3.0], [math.nan, 1.0, math.nan, math.nan]], dtype=torch.float64)
    for name in ("grpo", "dr_grpo", "rloo"):
        found, variant = advantages(rewards, VARIANTS[name]), VARIANTS[name]
        assert found[0, 1] == 0
        without = advantages(torch.tensor([[1.0, 0.0, 3.0]], dtype=torch.float64), variant)
        assert found[0, [0, 2, 3]].tolist() == pytest.approx(without[0].tolist())
        assert found[1].tolist() == [0.0] * 4, "one alone is compared with nothing"
    assert deviation(rewards)[1].item() == 0


def test_kl_estimates() -> None:
    """On a known distribution, the means of k1 and k3 equal its KL, and the gradient of k2 is the KL's gradient."""
    torch.manual_seed(0)
    logits = torch.randn(6, dtype=torch.float64, requires_grad=True)
    reference = torch.randn(6, dtype=torch.float64).log_softmax(0)
    policy = logits.log_softmax(0)
    kl = (policy.exp() * (policy - reference)).sum()
    weights = policy.exp().detach()
    assert (weights * k1(policy, reference)).sum().item() == pytest.approx(kl.item())
    assert (weights * k3(policy, reference)).sum().item() == pytest.approx(kl.item())
    assert (k3(policy, reference) >= 0).all()
    (exact,) = torch.autograd.grad(kl, logits, retain_graph=True)
    (of_k2,) = torch.autograd.grad((weights * k2(policy, reference)).sum(), logits, retain_graph=True)
    torch.testing.assert_close(of_k2, exact)
    (corrected,) = torch.autograd.grad(
        (weights * (policy - policy.detach()).exp() * k3(policy, reference)).sum(), logits
    )
    torch.testing.assert_close(corrected, exact)


def test_overlong_completions_are_punished_softly() -> None:
    found = overlong_penalty(torch.tensor([1, 80, 81, 90, 100]), 100, 20)
    assert found.tolist() == pytest.approx([0, 0, -0.05, -0.5, -1])
    assert overlong_penalty(torch.tensor([100]), 100, 0).tolist() == [0]


def test_completions_that_are_left_out_count_in_the_recorded_kl() -> None:
    """The KL is reported over all sampled tokens, so cut-off completions that the loss leaves out are in its sum."""
    policy, old, reference, _ = completions()
    tokens, lengths = (torch.cat(list(parts)) for parts in (policy, old)), torch.tensor(LENGTHS)
    current, sampled_by = tokens
    base, number = torch.cat(reference), len(LENGTHS)
    weight = torch.tensor([1.0, 0.0] * (number // 2), dtype=torch.float64)
    which = torch.arange(number).repeat_interleave(lengths)
    sampled = Sampled(sampled_by, which, lengths, torch.ones_like(weight), weight, reference=base)
    settings = LossSettings(0.2, 0.2, MOST, 0.1, "k3")
    found = policy_loss(current, sampled, VARIANTS["grpo"], settings, torch.ones(()))
    by_hand = sum(math.exp(r - p) - 1 - (r - p) for p, r in zip(current.tolist(), base.tolist(), strict=True))
    assert found.kl.item() == pytest.approx(by_hand)


def test_tokens_that_are_left_out_are_not_counted_as_clipped() -> None:
    """Ratios of 2 and 0.5 around a clip of 0.2: clipped where the advantage pushes further away."""
    ratio = torch.tensor([2.0, 0.5, 2.0, 0.5, 2.0, 1.1, 0.5], dtype=torch.float64)
    compared = torch.tensor([1.0, 1.0, -1.0, -1.0, 1.0, 1.0, -1.0], dtype=torch.float64)
    weight = torch.tensor([1.0, 1, 1, 1, 0, 1, 0], dtype=torch.float64)
    one = torch.ones(7, dtype=torch.int64)
    sampled = Sampled(torch.zeros(7, dtype=torch.float64), torch.arange(7), one, compared, weight)
    settings = LossSettings(0.2, 0.2, MOST)
    for name, clipped in (("grpo", 2), ("rloo", 2), ("gspo", 2), ("reinforce", 0)):
        found = policy_loss(ratio.log(), sampled, VARIANTS[name], settings, torch.ones(()))
        assert found.clipped.item() == clipped, name


def test_clip_ranges_are_the_papers() -> None:
    ranges = {name: (variant.clip_low, variant.clip_high) for name, variant in VARIANTS.items()}
    assert ranges == {"grpo": (0.2, 0.2), "dr_grpo": (0.2, 0.2), "dapo": (0.2, 0.28), "rloo": (0.2, 0.2),
                      "gspo": (3e-4, 4e-4), "reinforce": (0.0, 0.0)}  # fmt: skip
    assert {name for name, variant in VARIANTS.items() if variant.overlong_share} == {"dapo"}


@pytest.mark.parametrize("by_ratio", [False, True])
@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_the_penalty_for_leaving_the_reference_and_the_samplers_correction_are_plain_sums(
    estimator: str, by_ratio: bool
) -> None:
    """Token by token: -advantage * ratio * correction + 0.3 * KL * (ratio), over the tokens of the step."""
    policy, old, reference, rewards = completions()
    compared = advantages(rewards, VARIANTS["dapo"]).flatten()
    correction = [1 + 0.1 * torch.rand(n, dtype=torch.float64) for n in LENGTHS]
    expected = torch.zeros((), dtype=torch.float64)
    for p, o, r, c, a in zip(policy, old, reference, correction, compared, strict=True):
        for i in range(len(p)):
            ratio, log = (p[i] - o[i]).exp(), p[i] - r[i]
            kl = {"k1": log, "k2": log**2 / 2, "k3": (-log).exp() - 1 + log}[estimator]
            expected = expected - a * ratio * c[i] + 0.3 * kl * (ratio if by_ratio else 1)
    lengths, tokens = torch.tensor(LENGTHS), sum(LENGTHS)
    sampled = Sampled(torch.cat(old), torch.repeat_interleave(torch.arange(8), lengths), lengths, compared,
                      torch.ones(8, dtype=torch.float64), torch.cat(correction), torch.cat(reference))  # fmt: skip
    settings = LossSettings(50.0, 50.0, MOST, 0.3, estimator, by_ratio)  # nothing is clipped
    found = policy_loss(torch.cat(policy), sampled, VARIANTS["dapo"], settings, torch.tensor(8 / tokens)).loss / 8
    assert found.item() == pytest.approx(expected.item() / tokens, rel=1e-6)
    for ours, theirs in zip(
        torch.autograd.grad(found, policy), torch.autograd.grad(expected / tokens, policy), strict=True
    ):
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-12)
    alone = policy_loss(torch.cat(policy), sampled, VARIANTS["rloo"], settings, torch.ones(())).loss
    without = policy_loss(
        torch.cat(policy), sampled._replace(reference=None), VARIANTS["rloo"], settings, torch.ones(())
    )
    assert alone.item() == without.loss.item(), "there the penalty is part of the reward"
