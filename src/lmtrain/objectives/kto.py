"""KTO, Kahneman-Tversky optimisation (Ethayarajh et al. 2024, arXiv:2402.01306), on answers labelled good or bad.

A micro-batch is what `data.examples.unpaired_rows.UnpairedRows` reads. The loss is a mean over answers.
"""

from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from lmtrain.config.constraints import MACHINE, TRAJECTORY, above_zero, choice, not_negative
from lmtrain.config.schema import Config, ObjectiveConfig
from lmtrain.data.corpus import Corpus
from lmtrain.distributed.devices import total
from lmtrain.errors import UserError
from lmtrain.models.blocks import evaluating
from lmtrain.models.language_model import LogProbs
from lmtrain.objectives.parts import LossParts, add_sums, means_over, of_rows, options_of, with_routers
from lmtrain.objectives.with_reference import ReferenceObjective


@dataclass(kw_only=True)
class KTOOptions(ObjectiveConfig):
    rows: ClassVar[str] = "lmtrain.data.examples.unpaired_rows.UnpairedRowEncoder"
    headline: ClassVar[tuple[str, ...]] = ("rewards/margin", "loss")

    beta: Annotated[float, TRAJECTORY, above_zero]
    desirable_weight: Annotated[float, TRAJECTORY, not_negative]
    undesirable_weight: Annotated[float, TRAJECTORY, not_negative]
    reference: Annotated[str, MACHINE, choice("auto", "frozen_copy", "adapter_off")]

    def reference_in_use(self) -> str:
        return self.reference


def kto_losses(log_ratios: Tensor, desirable: Tensor, reference_point: Tensor, options: KTOOptions) -> Tensor:
    """Computes equation 8: `w_d (1 - s(beta (r - z)))` for desirable answers, `w_u (1 - s(beta (z - r)))` for others.

    Args:
        log_ratios: [A], log pi(y|x) - log pi_ref(y|x).
        desirable: bool [A].
        reference_point: 0-dim, z; it carries no gradient.

    Returns:
        [A], in the dtype of `log_ratios`.
    """
    good = desirable.to(log_ratios.dtype)
    weight = good * options.desirable_weight + (1 - good) * options.undesirable_weight
    return weight * torch.sigmoid(-options.beta * (2 * good - 1) * (log_ratios - reference_point))


class Answers(NamedTuple):
    """The answers of a micro-batch, as the loss needs them; only the log-ratios carry a gradient."""

    log_ratios: Tensor  # [A] fp64, log pi - log pi_ref
    log_probs: Tensor  # [A] fp64, log pi
    desirable: Tensor  # bool [A]
    number: Tensor  # int64 [], A; 0 for an empty micro-batch, which holds one dummy answer


def check_labels(rows: Any, options: KTOOptions) -> None:
    """Raises UserError if all answers have one label, as nothing then shows what sets a good answer apart.

    Over answers of one kind, the loss can be lowered by shifting the log-ratios of all texts, good or bad: the model
    drifts, while the rewards look as if it learned. A weight of 0 for the missing kind confirms that this is intended.
    """
    labels = getattr(getattr(rows, "examples", None), "labels", None)
    if labels is None or not len(labels):
        return
    good, bad = bool((labels == 1).any()), bool((labels != 1).any())
    there, absent, label = ("desirable", "undesirable", "false") if good else ("undesirable", "desirable", "true")
    if (good and bad) or getattr(options, f"{absent}_weight") == 0:
        return
    instead = "train on them as answers with objective=sft" if good else "pair them with better ones for objective=dpo"
    found = f"all {len(labels):,} answers are {there}, and KTO learns from how {absent} ones differ from them"
    none = f"objective.{absent}_weight=0 says that there are none on purpose"
    raise UserError(f"{found}: add rows with label: {label}, or {instead}; {none}")


class KTO(ReferenceObjective):
    """The KTO objective; the reference point z is estimated over all answers of a step, or of a validation."""

    Options = KTOOptions
    reported = ("loss", "rewards/chosen", "rewards/rejected", "rewards/margin", "logps/mean", "kl")
    answers = 1  # per row

    def prepare(self, config: Config, corpus: Corpus) -> None:
        """Resolves the reference; raises UserError if there is only one answer, or all answers have one label."""
        self.options = options_of(config, KTOOptions)
        if len(corpus.train) < 2:
            raise UserError(f"data.path={config.data.path} has one answer to train on: at least 2 are needed")
        check_labels(corpus.train, self.options)
        self.settle_reference(self.options.reference, config)
        self.reference_point = torch.zeros((), dtype=torch.float32)  # z of the current step
        # Per loader, for each micro-batch: (answers, sum of mismatched log-ratios, mean router losses).
        self.validated: dict[int, list[tuple[Answers, Tensor, dict[str, Tensor]]]] = {}

    def count_tokens(self, batch: dict[str, Tensor]) -> Tensor:
        return batch["answers"]

    def plan_rows(self) -> list[tuple[str, str]]:
        return [("loss", f"KTO, beta={self.options.beta:g}; reference: {self.describe_reference()}")]

    def look_ahead(self, micro_batches: list[dict[str, Tensor]], n_tokens: Tensor) -> None:
        """Sets z for the step: max(0, mean log-ratio of its prompts with other rows' completions), 0-dim fp64."""
        summed = torch.stack([self.mismatched(batch) for batch in micro_batches]).sum()
        self.reference_point = (total(self.trainer, summed) / n_tokens).clamp(min=0)

    @torch.no_grad()
    def mismatched(self, batch: dict[str, Tensor]) -> Tensor:
        """Returns the sum of log-ratios of the prompts with other rows' completions, without dropout; 0-dim."""
        others = {name.removeprefix("kl_"): value for name, value in batch.items() if name.startswith("kl_")}
        with evaluating(self.model):
            ratios, _, _ = self._log_ratios(others)
        return ratios.sum() * (batch["answers"] > 0)

    def _log_ratios(self, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor, LogProbs]:
        """Returns log pi - log pi_ref of each answer, [A] fp64; log pi, [A]; and the output of the forward pass."""
        reference = self.reference_log_probs(batch)
        assert reference is not None
        policy, out = self.answer_log_probs(batch)
        return (policy - reference)[:, 0], policy.detach()[:, 0], out

    def micro_batch_loss(self, batch: dict[str, Tensor]) -> LossParts:
        log_ratios, log_probs, out = self._log_ratios(batch)
        parts = self.parts(Answers(log_ratios, log_probs, batch["label"], batch["answers"]), self.reference_point)
        return with_routers(parts, out)

    def parts(self, answers: Answers, z: Tensor) -> LossParts:
        """Computes loss and sums of some answers, given the reference point z of the whole step or validation."""
        losses = kto_losses(answers.log_ratios, answers.desirable, z, self.options)
        rewards = self.options.beta * answers.log_ratios.detach()
        numbers = {
            "rewards/chosen": rewards * answers.desirable,
            "rewards/rejected": rewards * ~answers.desirable,
            "desirable": answers.desirable.to(rewards.dtype),
            "logps/mean": answers.log_probs,
            "kl": z.expand_as(rewards),
        }
        return of_rows(losses, numbers, answers.number)

    def means_of(self, sums: dict[str, Any], n_tokens: Any) -> dict[str, Any]:
        """Computes the means; rewards are averaged over answers of their kind, left out (tensors: NaN) without any."""
        sums = dict(sums)
        good = sums.pop("desirable")
        means = means_over(sums, n_tokens, {"rewards/chosen": good, "rewards/rejected": n_tokens - good})
        if "rewards/chosen" in means and "rewards/rejected" in means:
            means["rewards/margin"] = means["rewards/chosen"] - means["rewards/rejected"]
        return means

    def on_validation_epoch_start(self) -> None:
        super().on_validation_epoch_start()
        self.validated = {}

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int, dataloader_idx: int = 0) -> None:
        """Stores the quantities the loss needs: z, and so the loss, is known only at the end of the validation."""
        mismatched = self.mismatched(batch)
        log_ratios, log_probs, out = self._log_ratios(batch)
        answers = Answers(log_ratios, log_probs, batch["label"], batch["answers"])
        self.validated.setdefault(dataloader_idx, []).append((answers, mismatched, out.aux))
        self.val_sums[dataloader_idx] = {}

    def validation_means(self, loader: int = 0) -> dict[str, float]:
        found = self.validated[loader]
        counted = [torch.stack([mismatched, answers.number.double()]) for answers, mismatched, _ in found]
        summed, count = total(self.trainer, torch.stack(counted).sum(0))
        z = (summed / count.clamp(min=1)).clamp(min=0)
        sums = self.val_sums[loader] = {}
        for answers, _, aux in found:
            parts = self.parts(answers, z)
            routers = {name: value * parts.n_tokens for name, value in aux.items()}
            add_sums(sums, {**parts.sums, **routers, "n_tokens": parts.n_tokens})
        return super().validation_means(loader)
