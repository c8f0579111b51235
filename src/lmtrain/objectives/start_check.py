"""Checks before the first step that policy and reference give the same log-probabilities."""

from collections.abc import Sequence
from typing import Any, Protocol

import lightning.pytorch as pl
import torch
from torch import Tensor

from lmtrain.errors import RunError
from lmtrain.losses.preferences import LOSSES, LossOptions, Pairs, Ratios, preference_losses
from lmtrain.models.language_model import LanguageModel
from lmtrain.objectives.reference import FrozenCopy, Precomputed, evaluating

FULL = (1e-4, 1e-6)  # how far log-probabilities may differ, absolutely and relative to them, in fp32
HALF = (5e-2, 2e-3)  # the same where matrices are multiplied in half precision


class Compared(Protocol):
    """What is needed of an objective with a reference."""

    model: LanguageModel
    precomputed: Precomputed | None
    frozen_copy: FrozenCopy | None

    @property
    def trainer(self) -> pl.Trainer: ...

    def answer_log_probs(self, batch: dict[str, Tensor]) -> tuple[Tensor, Any]: ...

    def reference_log_probs(self, batch: dict[str, Tensor]) -> Tensor | None: ...


class ComparedPairs(Compared, Protocol):
    """The same of one with a loss over pairs."""

    loss: str
    options: LossOptions


@torch.no_grad()
def check_agreement(objective: Compared, batch: dict[str, Tensor], answers: Sequence[str]) -> tuple[Tensor, ...]:
    """Log-probabilities [rows, answers] under policy and reference, and by how much they may differ.

    Both are computed without dropout, as the reference always is.

    Args:
        batch: the first micro-batch of the run.
        answers: what the answers of a row are called.

    Raises:
        RunError: they differ by more.
    """
    with evaluating(objective.model):
        policy, _ = objective.answer_log_probs(batch)
    reference = objective.reference_log_probs(batch)
    assert reference is not None
    absolute, relative = FULL if objective.trainer.precision in ("32-true", "64-true") else HALF
    difference = (policy - reference).abs()
    allowed = absolute + relative * reference.abs()
    if not bool((difference <= allowed).all()):
        raise RunError(_what_differs(objective, policy, reference, difference > allowed, answers))
    return policy, reference, allowed


def check_start(objective: ComparedPairs, batch: dict[str, Tensor]) -> None:
    """Raises RunError unless the policy's log-probabilities are the reference's and the loss is its known value."""
    policy, reference, allowed = check_agreement(objective, batch, ("chosen answer of pair", "rejected answer of pair"))
    tokens = batch["lengths"].view(-1, 2)
    pairs = Pairs(policy[:, 0], policy[:, 1], tokens[:, 0], tokens[:, 1], reference[:, 0], reference[:, 1])
    loss = preference_losses(objective.loss, pairs, objective.options).preference
    at_zero = LOSSES[objective.loss].at_zero
    assert at_zero is not None
    expected = at_zero(objective.options)
    off = (loss - expected).abs().max().item()
    if not off <= loss_slack(objective.loss, objective.options, allowed.max().item()):
        raise RunError(
            f"at the first step objective.loss={objective.loss} is {loss[0].item():.6g} where policy and reference "
            f"agree, instead of {expected:.6g}: please report this"
        )


def loss_slack(name: str, options: LossOptions, ratio: float) -> float:
    """How far a loss may be from its value at zero where log-ratios are up to `ratio` instead."""
    options = options._replace(sft_weight=0.0)
    at_zero = LOSSES[name].at_zero
    assert at_zero is not None
    corners = torch.tensor([[ratio, ratio], [ratio, -ratio], [-ratio, ratio], [-ratio, -ratio]], dtype=torch.float64)
    losses = LOSSES[name].function(Ratios(corners[:, 0], corners[:, 1]), options)
    return (losses - at_zero(options)).abs().max().item() + 1e-6 * max(1.0, at_zero(options))


def _what_differs(objective: Compared, policy: Tensor, reference: Tensor, wrong: Tensor, answers: Sequence[str]) -> str:
    row, which = wrong.nonzero()[0].tolist()
    found = (
        f"policy and reference differ before the first step, so the reference is not the model this run starts from: "
        f"the {answers[which]} {row + 1} of the first micro-batch has log-probability "
        f"{policy[row, which].item():.6g} under the policy and {reference[row, which].item():.6g} under the reference "
        f"({int(wrong.sum())} of {wrong.numel()} answers differ). "
    )
    if objective.precomputed is not None:
        return found + (
            f"The precomputed log-probabilities are of another model or other rows: remove "
            f"{objective.precomputed.folder}"
        )
    changed = objective.frozen_copy.changed() if objective.frozen_copy is not None else []
    if changed:
        return found + f"Trained weights differ from their first values: {changed[0]} ({len(changed)} in all)"
    if objective.frozen_copy is None:
        return found + (
            "The adapter changes the model before it is trained, or the base was changed when it was put in: "
            "set objective.reference=frozen_copy"
        )
    return found + (
        "The weights are the same, so the forwards differ: something random is left on outside training, or "
        "trainer.precision is too coarse; please report this"
    )
