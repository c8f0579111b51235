"""Preference losses against their papers' formulas, computed with plain floats, and in limiting cases."""

import math

import pytest
import torch

from lmtrain.losses.preferences import LOSSES, REFERENCE_FREE, LossOptions, Pairs, preference_losses

WITH_REFERENCE = [name for name, loss in LOSSES.items() if loss.has_reference]


def s(x):
    return 1 / (1 + math.exp(-x))


def log_s(x):
    return -math.log1p(math.exp(-x))


def log_odds(log_p):
    p = math.exp(log_p)
    return math.log(p / (1 - p))


def make_pairs(dtype=torch.float64, n=40):
    generator = torch.Generator().manual_seed(0)
    policy = [(-60 * torch.rand(n, generator=generator, dtype=dtype) - 0.5).requires_grad_() for _ in range(2)]
    reference = [p.detach() + 4 * torch.randn(n, generator=generator, dtype=dtype) for p in policy]
    tokens = [torch.randint(1, 30, (n,), generator=generator) for _ in range(2)]
    return Pairs(*policy, *tokens, *reference)


def by_hand(name, o, c, r, nc, nr, rc, rr):
    """Computes the loss of one pair (floats) by its paper's formula; c, r, rc, rr are summed log-probabilities."""
    a, b, beta, eps = c - rc, r - rr, o.beta, o.label_smoothing
    if o.length_normalize:
        a, b = a / nc, b / nr
    m = a - b
    z_w, z_l = max(0, a), max(0, b)
    loss = {
        "sigmoid": lambda: -(1 - eps) * log_s(beta * m) - eps * log_s(-beta * m),
        "robust": lambda: (-(1 - eps) * log_s(beta * m) + eps * log_s(-beta * m)) / (1 - 2 * eps),
        "ipo": lambda: (m - 1 / (2 * beta)) ** 2,
        "hinge": lambda: max(0, 1 - beta * m),
        "dpop": lambda: -log_s(beta * (m - o.dpop_lambda * max(0, -a))),
        "kto_pair": lambda: (1 - s(beta * (a - z_l)) + 1 - s(beta * (z_w - b))) / 2,
        "apo_zero": lambda: 1 - s(beta * a) + s(beta * b),
        "apo_down": lambda: s(beta * a) + 1 - s(beta * m),
        "simpo": lambda: -log_s(beta / nc * c - beta / nr * r - o.gamma),
        "orpo": lambda: -c / nc - beta * log_s(log_odds(c / nc) - log_odds(r / nr)),
    }[name]()
    return loss + o.sft_weight * -c / nc


@pytest.mark.parametrize("options", [
    LossOptions(beta=0.1, dpop_lambda=2.0),
    LossOptions(beta=0.7, label_smoothing=0.2, gamma=1.3, dpop_lambda=0.5, sft_weight=0.6),
    LossOptions(beta=2.0, label_smoothing=0.1, length_normalize=True),
])  # fmt: skip
@pytest.mark.parametrize("name", LOSSES)
def test_equals_the_formula(name, options):
    pairs = make_pairs()
    out = preference_losses(name, pairs, options)
    for i, numbers in enumerate(zip(*(t.tolist() for t in pairs), strict=True)):
        c, r, nc, nr, rc, rr = numbers
        assert out.total[i].item() == pytest.approx(by_hand(name, options, *numbers), rel=1e-9)
        assert out.sft[i].item() == pytest.approx(-c / nc)
        assert out.preference[i].item() == pytest.approx(
            by_hand(name, options._replace(sft_weight=0.0), *numbers), rel=1e-9
        )
        rewards = (c - rc, r - rr) if LOSSES[name].has_reference else (c / nc, r / nr)
        assert out.chosen_rewards[i].item() == pytest.approx(options.beta * rewards[0])
        assert out.rejected_rewards[i].item() == pytest.approx(options.beta * rewards[1])
    assert out.total.requires_grad
    assert not any(part.requires_grad for part in out[1:])


@pytest.mark.parametrize("name", sorted(set(LOSSES) - {"kto_pair"}))  # its reference points are detached
def test_gradient_equals_finite_differences(name):
    pairs = make_pairs(n=12)
    options = LossOptions(beta=0.3, label_smoothing=0.1, dpop_lambda=2.0, sft_weight=0.3)

    def loss(chosen, rejected):
        return preference_losses(name, pairs._replace(chosen=chosen, rejected=rejected), options).total

    assert torch.autograd.gradcheck(loss, (pairs.chosen, pairs.rejected))


def test_kto_learns_nothing_through_its_reference_points():
    pairs = make_pairs()
    o = LossOptions(beta=0.3)
    grads = torch.autograd.grad(preference_losses("kto_pair", pairs, o).total.sum(), (pairs.chosen, pairs.rejected))
    for i, (c, r, _, _, rc, rr) in enumerate(zip(*(t.tolist() for t in pairs), strict=True)):
        p = s(o.beta * (max(0, r - rr) - (c - rc)))
        q = s(o.beta * ((r - rr) - max(0, c - rc)))
        assert grads[0][i].item() == pytest.approx(-o.beta * p * (1 - p) / 2)
        assert grads[1][i].item() == pytest.approx(o.beta * q * (1 - q) / 2)


@pytest.mark.parametrize("length_normalize", [False, True])
@pytest.mark.parametrize("name", WITH_REFERENCE)
def test_value_where_policy_and_reference_agree(name, length_normalize):
    pairs = make_pairs()
    pairs = pairs._replace(ref_chosen=pairs.chosen.detach(), ref_rejected=pairs.rejected.detach())
    options = LossOptions(beta=0.2, label_smoothing=0.1, length_normalize=length_normalize)
    out = preference_losses(name, pairs, options)
    expected = LOSSES[name].at_zero(options)
    assert out.preference.tolist() == pytest.approx([expected] * 40)
    assert out.chosen_rewards.abs().max() == 0


def test_values_where_policy_and_reference_agree_are_the_known_ones():
    o = LossOptions(beta=0.1)
    known = {"sigmoid": 0.693147, "robust": 0.693147, "ipo": 25.0, "hinge": 1.0, "dpop": 0.693147, "kto_pair": 0.5}
    known |= {"apo_zero": 1.0, "apo_down": 1.0}
    assert {name: LOSSES[name].at_zero(o) for name in WITH_REFERENCE} == pytest.approx(known, abs=1e-6)


def test_a_pair_does_not_depend_on_the_others():
    pairs, o = make_pairs(), LossOptions(beta=0.3)
    for name in LOSSES:
        whole = preference_losses(name, pairs, o).total
        parts = [preference_losses(name, Pairs(*(t[i : i + 1] for t in pairs)), o).total for i in range(40)]
        torch.testing.assert_close(whole, torch.cat(parts))


def test_certain_answers_have_finite_gradients():
    """Losses and gradients stay finite where probability 1 has infinite odds and large margins saturate the sigmoid."""
    for extreme in (0.0, -1e-9, -1e4):
        pairs = Pairs(
            *(torch.full((1,), x, requires_grad=True) for x in (extreme, -1e4 - extreme)),
            *(torch.ones(1),) * 2,
            *(torch.zeros(1),) * 2,
        )
        for name in LOSSES:
            total = preference_losses(name, pairs, LossOptions(beta=1.0)).total
            grads = torch.autograd.grad(total.sum(), (pairs.chosen, pairs.rejected))
            assert all(torch.isfinite(t).all() for t in (total, *grads)), (name, extreme)


def test_sigmoid_without_a_reference_is_a_logistic_loss_on_the_answers_log_odds():
    pairs, options = make_pairs()._replace(ref_chosen=None, ref_rejected=None), LossOptions(beta=0.3)
    out = preference_losses("sigmoid", pairs, options)
    margin = pairs.chosen - pairs.rejected
    ones = torch.ones_like(margin)
    by_torch = torch.nn.functional.binary_cross_entropy_with_logits(0.3 * margin, ones, reduction="none")
    torch.testing.assert_close(out.total, by_torch)
    torch.testing.assert_close(out.chosen_rewards - out.rejected_rewards, 0.3 * margin.detach())


def test_a_missing_reference_is_an_error():
    pairs = make_pairs()._replace(ref_chosen=None, ref_rejected=None)
    for name, loss in LOSSES.items():
        if loss.has_reference and name not in REFERENCE_FREE:
            with pytest.raises(ValueError, match="reference"):
                preference_losses(name, pairs, LossOptions())
        else:
            assert torch.isfinite(preference_losses(name, pairs, LossOptions()).total).all()
