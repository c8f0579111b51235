"""Kahneman-Tversky optimisation (Ethayarajh et al. 2024, arXiv:2402.01306): learns from answers marked good or bad.

A micro-batch is what `data.examples.unpaired_rows.UnpairedRows` reads. The unit of weight is the answer.
"""

from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from torch import Tensor

from lmtrain.config.constraints import MACHINE, TRAJECTORY, above_zero, choice, not_negative
from lmtrain.config.schema import Config, Objective
from lmtrain.data.corpus import Corpus
from lmtrain.models.language_model import LogProbs
from lmtrain.objectives.base import LossParts
from lmtrain.objectives.start_check import check_agreement
from lmtrain.objectives.with_reference import ReferenceObjective


@dataclass(kw_only=True)
class KTOOptions(Objective):
    rows: ClassVar[str] = "lmtrain.data.examples.unpaired_rows.UnpairedRowEncoder"

    beta: Annotated[float, TRAJECTORY, above_zero]
    desirable_weight: Annotated[float, TRAJECTORY, not_negative]
    undesirable_weight: Annotated[float, TRAJECTORY, not_negative]
    reference: Annotated[str, MACHINE, choice("auto", "frozen_copy", "adapter_off")]


def kto_losses(log_ratios: Tensor, desirable: Tensor, reference_point: Tensor, options: KTOOptions) -> Tensor:
    """Equation 8: `w_d (1 - s(beta (r - z)))` for desirable answers, `w_u (1 - s(beta (z - r)))` for the others.

    Args:
        log_ratios: [A], log pi(y|x) - log pi_ref(y|x).
        desirable: bool [A].
        reference_point: 0-dim, z; nothing is learned through it.

    Returns:
        [A], in the dtype of `log_ratios`.
    """
    sign = torch.where(desirable, 1.0, -1.0).to(log_ratios.dtype)
    weight = torch.where(desirable, options.desirable_weight, options.undesirable_weight).to(log_ratios.dtype)
    return weight * torch.sigmoid(-options.beta * sign * (log_ratios - reference_point))


class KTO(ReferenceObjective):
    """The reference point z is estimated over the micro-batch, so data.micro_batch_size shapes what is learned."""

    Options = KTOOptions
    answers = 1  # of a row

    def prepare(self, config: Config, corpus: Corpus) -> None:
        assert isinstance(config.objective, KTOOptions)
        self.options = config.objective
        self.settle_reference(self.options.reference, config)
        self.fingerprint["keys"]["data.micro_batch_size"] = config.data.micro_batch_size

    def count_tokens(self, batch: dict[str, Tensor]) -> Tensor:
        return batch["answers"]

    def validation_names(self) -> list[str]:
        return ["loss", "rewards/margin", "logps/mean", "kl"]

    def plan_rows(self) -> list[tuple[str, str]]:
        return [("loss", f"KTO, beta={self.options.beta:g}; reference: {self.reference_words()}")]

    def check_start(self, batch: dict[str, Tensor]) -> None:
        check_agreement(self, batch, ("answer",))

    @torch.no_grad()
    def reference_point(self, batch: dict[str, Tensor]) -> Tensor:
        """z: KL(pi || ref) over prompts with other rows' completions, their mean log-ratio, at least 0; 0-dim fp64."""
        mismatched = {name.removeprefix("kl_"): value for name, value in batch.items() if name.startswith("kl_")}
        return self._log_ratios(mismatched)[0].mean().clamp(min=0)

    def _log_ratios(self, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor, LogProbs]:
        """log pi - log pi_ref of each answer, [A] fp64; log pi, [A]; and what the model's forward gave."""
        reference = self.reference_log_probs(batch)
        assert reference is not None
        policy, out = self.answer_log_probs(batch)
        return (policy - reference)[:, 0], policy.detach()[:, 0], out

    def micro_batch_loss(self, batch: dict[str, Tensor]) -> LossParts:
        z = self.reference_point(batch)
        log_ratios, log_probs, out = self._log_ratios(batch)
        n = batch["answers"]
        real = (n > 0).to(log_ratios.dtype)  # the answer of an empty micro-batch weighs nothing
        losses = kto_losses(log_ratios, batch["label"], z, self.options)
        loss_sum = losses.sum() * real
        rewards = self.options.beta * log_ratios.detach()
        means = {
            # Of desirable answers less that of the others, as sums over all answers.
            "rewards/margin": torch.where(batch["label"], rewards, -rewards),
            "logps/mean": log_probs,
            "kl": z.expand_as(rewards),
        }
        sums = {"loss": loss_sum.detach(), **{name: value.sum() * real for name, value in means.items()}}
        sums |= {name: value * n for name, value in out.aux.items()}
        if out.router_loss is not None:
            loss_sum = loss_sum + out.router_loss * n
        return LossParts(loss_sum, n, sums)
