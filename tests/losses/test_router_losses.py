"""Router losses against their closed forms, and their gradients against finite differences."""

import pytest
import torch
from torch import Tensor
from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func

from lmtrain.losses.router import Totals, over_layers, router_terms, totals


def load_balance(logits: Tensor, top_k: int) -> Tensor:
    return router_terms(logits, top_k).load_balance


def deviation(logits: Tensor) -> Tensor:
    return router_terms(logits, 1).deviation


def z_loss(logits: Tensor) -> Tensor:
    return router_terms(logits, 1).z_loss


def random_logits(rows: int = 50, choices: int = 6) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(rows, choices, generator=generator, dtype=torch.float64, requires_grad=True)


def test_load_balance_of_a_layer_equals_transformers() -> None:
    logits = random_logits().detach().float().requires_grad_()
    ours, theirs = load_balance(logits, 2), load_balancing_loss_func((logits,), 6, 2)
    torch.testing.assert_close(ours, theirs)
    torch.testing.assert_close(torch.autograd.grad(ours, logits), torch.autograd.grad(theirs, logits))


def test_load_balance_is_k_when_even_and_grows_when_not() -> None:
    even = torch.eye(4, dtype=torch.float64).repeat(8, 1) * 1e-9  # ties are broken evenly, probabilities are uniform
    assert load_balance(even, 1).item() == pytest.approx(1.0, abs=1e-8)
    collapsed = torch.tensor([[40.0, 0.0, 0.0, 0.0]], dtype=torch.float64).repeat(32, 1)
    assert load_balance(collapsed, 1).item() == pytest.approx(4.0, abs=1e-8)
    found = router_terms(collapsed, 1)
    assert (found.entropy.item(), found.dead.item()) == (0.0, 0.75)
    found = router_terms(even, 1)
    assert found.entropy.item() == pytest.approx(1.0)
    assert found.dead.item() == 0.0


def test_z_loss_is_st_moes() -> None:
    """The z-loss equals Zoph et al. 2022, eq. 5: 1 / B sum_i (log sum_j exp x_ij)^2, computed token by token."""
    logits = random_logits(5, 3)
    expected = sum(torch.log(torch.exp(row).sum()) ** 2 for row in logits) / 5
    torch.testing.assert_close(z_loss(logits), expected, rtol=1e-12, atol=0)


def test_deviation_is_its_closed_form() -> None:
    logits = random_logits(5, 3)
    mean = sum(torch.exp(row) / torch.exp(row).sum() for row in logits) / 5
    expected = sum((share - 1 / 3) ** 2 for share in mean)
    torch.testing.assert_close(deviation(logits), expected, rtol=1e-12, atol=1e-16)
    assert deviation(torch.zeros(4, 3, dtype=torch.float64)).item() == 0.0


@pytest.mark.parametrize("loss", [deviation, z_loss, lambda x: load_balance(x, 2)])
def test_gradients_are_those_of_finite_differences(loss: object) -> None:
    assert torch.autograd.gradcheck(loss, random_logits(7, 4))  # type: ignore[arg-type]


def test_layers_are_summed_or_averaged() -> None:
    logits = [random_logits().detach() * scale for scale in (1.0, 3.0)]
    wholes = [totals(x, 2) for x in logits]
    summed, mean = (over_layers(logits, 2, wholes, how) for how in ("sum", "mean"))
    torch.testing.assert_close(summed.z_loss, z_loss(logits[0]) + z_loss(logits[1]))
    torch.testing.assert_close(mean.z_loss, summed.z_loss / 2)
    torch.testing.assert_close(summed.dead, mean.dead, msg="a share is no sum")


@pytest.mark.parametrize("layers", [2, 6])
def test_joint_layers_are_transformers(layers: int) -> None:
    """The joint load-balancing loss over all layers' tokens equals transformers', also summed over micro-batches."""
    generator = torch.Generator().manual_seed(1)
    logits = [
        (torch.randn(50, 6, generator=generator) * (1 + i) + torch.randn(6, generator=generator)).requires_grad_()
        for i in range(layers)
    ]
    theirs = load_balancing_loss_func(tuple(logits), 6, 2)
    wholes = [totals(x, 2) for x in logits]
    ours = over_layers(logits, 2, wholes, "joint").load_balance
    parts = [over_layers([x[at] for x in logits], 2, wholes, "joint").load_balance for at in (slice(20), slice(20, 50))]
    expected = torch.autograd.grad(theirs, logits)
    for found in (ours, sum(parts)):
        torch.testing.assert_close(found, theirs, rtol=1e-6, atol=0)
        torch.testing.assert_close(torch.autograd.grad(found, logits), expected, rtol=1e-5, atol=1e-9)
    joined = torch.cat(logits)
    torch.testing.assert_close(over_layers(logits, 2, wholes, "joint").z_loss, z_loss(joined))


def test_parts_add_up_to_the_whole() -> None:
    """The terms and gradients of uneven parts, computed with the totals of all parts, add up to those of the whole."""
    logits = random_logits()
    parts = logits.split([3, 20, 27])
    whole = Totals(*(sum(values) for values in zip(*(totals(part, 2) for part in parts), strict=True)))
    summed = [sum(values) for values in zip(*(router_terms(part, 2, whole) for part in parts), strict=True)]
    for found, expected in zip(summed, router_terms(logits, 2), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=0)
        if expected.requires_grad:
            gradients = [torch.autograd.grad(term, logits, retain_graph=True)[0] for term in (found, expected)]
            torch.testing.assert_close(*gradients, rtol=1e-12, atol=1e-16)
    alone = sum(router_terms(part, 2).load_balance * len(part) / 50 for part in parts)
    assert not torch.isclose(alone, summed[0]), "each part balanced by itself is another loss"


def test_a_step_without_tokens_has_finite_losses_and_no_gradient() -> None:
    logits = random_logits()
    nothing = Totals(torch.zeros(6).double(), torch.zeros(6).double(), torch.tensor(0.0, dtype=torch.float64))
    terms = router_terms(logits, 2, nothing)
    assert all(torch.isfinite(value) for value in terms)
    (gradient,) = torch.autograd.grad(0 * (terms.load_balance + terms.deviation + terms.z_loss), logits)
    assert gradient.count_nonzero() == 0
