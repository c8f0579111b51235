"""The loss of a micro-batch of GRPO and its numbers, from log-probabilities that are given, by hand."""

import contextlib
import math
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from lmtrain.losses.policy import VARIANTS, LossSettings, Sampled
from lmtrain.objectives.grpo import GRPO

POLICY, OLD, SAMPLER, REFERENCE = (
    torch.tensor(values, dtype=torch.float64)
    for values in ([-1.0, -2.0, -0.5], [-1.1, -1.8, -0.5], [-1.3, -2.8, -0.6], [-0.9, -2.5, -0.7])
)
REPORT = ["reward", "cut_off"]


def as_bits(values: list[float]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64).view(torch.int64)


def batch_of(sampled: int = 2) -> dict[str, torch.Tensor]:
    """Two completions of two tokens and one; the second group member's tokens come last."""
    return {
        "answer": torch.tensor([0, 0, 1]),
        "lengths": torch.tensor([2, 1]),
        "sampled": torch.tensor(sampled),
        "weight": torch.tensor([1.0, 1.0]),
        "advantages": as_bits([1.0, -1.0]),
        "rewards": as_bits([3.0, 1.0]),
        "entropy": as_bits([0.25, 0.5, 0.5]),
        "report": as_bits([4.0, 1.0]),
        "old": OLD.view(torch.int64),
        "sampler": SAMPLER.view(torch.int64),
    }


class Given:
    """What micro_batch_loss reads of an objective, with log-probabilities that need no model."""

    def __init__(self, loss: str, reference: str = "frozen_copy", **options: Any) -> None:
        self.reference, self.model, self.in_reference = reference, nn.Dropout(), False
        self.options = SimpleNamespace(
            temperature=0.7, **{"importance_cap": None, "kl_coef": 0.2, "group_size": 2} | options
        )
        self.variant, self.completions_per_token = VARIANTS[loss], torch.tensor(2 / 3, dtype=torch.float64)
        self.loss_settings = LossSettings(9.0, 9.0, 4, self.options.kl_coef, "k1")
        self._with_kl = lambda *given: GRPO._with_kl(self, *given)  # type: ignore[arg-type]

    @contextlib.contextmanager
    def _reference_weights(self) -> Iterator[None]:
        self.in_reference = True
        yield
        self.in_reference = False

    def token_log_probs(self, batch: Any, temperature: float) -> tuple[torch.Tensor, Any]:
        assert temperature == 0.7
        assert self.model.training != self.in_reference, "the reference has no dropout"
        return REFERENCE if self.in_reference else POLICY, SimpleNamespace(router_loss=None, aux={})

    def report_of(self, groups: list[Any]) -> list[str]:
        return REPORT


def loss_of(given: Given, batch: dict[str, torch.Tensor]) -> Any:
    return GRPO.micro_batch_loss(given, batch)  # type: ignore[arg-type]


RATIO = (POLICY - OLD).exp().tolist()


@pytest.mark.parametrize("reference", ["none", "frozen_copy"])
def test_a_micro_batch_is_its_formula(reference: str) -> None:
    """Dr. GRPO: the sum of a token's terms over the longest completion's length, 4 here."""
    found = loss_of(Given("dr_grpo", reference), batch_of())
    kl = (POLICY - REFERENCE).tolist() if reference != "none" else [0.0, 0.0, 0.0]
    terms = [-a * r + 0.2 * k for a, r, k in zip([1, 1, -1], RATIO, kl, strict=True)]
    assert found.loss_sum.item() == pytest.approx(sum(terms) / 4)
    numbers = {name: value.item() for name, value in found.sums.items()}
    expected = {"loss": sum(terms) / 4, "clip_fraction": 0.0, "entropy": 1.25, "logps/sampler": -4.7,
                "logps/trainer": -3.4, "sampler_difference": 0.2 + 1.0 + 0.1, "tokens": 3.0, "reward": 4.0,
                "cut_off": 1.0} | ({"kl": sum(kl)} if reference != "none" else {})  # fmt: skip
    assert numbers == pytest.approx(expected)
    assert found.n_tokens == 2


def test_the_correction_for_the_samplers_rounding_is_capped() -> None:
    found = loss_of(Given("dr_grpo", "none", importance_cap=2.0), batch_of())
    factors = [min(math.exp(o - s), 2.0) for o, s in zip(OLD.tolist(), SAMPLER.tolist(), strict=True)]
    assert factors[1] == 2.0
    terms = [-a * r * c for a, r, c in zip([1, 1, -1], RATIO, factors, strict=True)]
    assert found.loss_sum.item() == pytest.approx(sum(terms) / 4)


def test_an_empty_micro_batch_counts_nothing() -> None:
    found = loss_of(Given("dr_grpo"), batch_of(sampled=0))
    own = {name: value.item() for name, value in found.sums.items() if name not in ("entropy", *REPORT)}
    assert own == dict.fromkeys(own, 0.0)
    assert found.loss_sum.item() == 0


def test_without_what_was_stored_the_policy_is_its_own_sampler() -> None:
    batch = {name: value for name, value in batch_of().items() if name not in ("old", "sampler")}
    found = loss_of(Given("dr_grpo", "none"), batch)
    assert found.loss_sum.item() == pytest.approx((-1 - 1 + 1) / 4)
    assert found.sums["logps/sampler"].item() == found.sums["logps/trainer"].item() == -3.5


def test_where_a_completion_is_one_action_the_kl_is_part_of_its_reward() -> None:
    """Leave-one-out: of two rewards, each one's advantage is the difference to the other."""
    given = Given("rloo")
    found = loss_of(given, batch_of())
    kl = (OLD - REFERENCE).tolist()
    rewards = [3.0 - 0.2 * (kl[0] + kl[1]), 1.0 - 0.2 * kl[2]]
    gap = rewards[0] - rewards[1]
    ratios = [RATIO[0] * RATIO[1], RATIO[2]]
    assert found.loss_sum.item() == pytest.approx(-gap * ratios[0] + gap * ratios[1])
    sampled = Sampled(OLD, torch.tensor([0, 0, 1]), torch.tensor([2, 1]), torch.tensor([5.0, 6.0]), torch.ones(2))
    assert given._with_kl(batch_of(sampled=0), sampled, REFERENCE) is sampled.advantages
