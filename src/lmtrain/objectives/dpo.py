"""Direct preference optimisation (DPO) and related losses, which make chosen answers likelier than rejected ones.

A micro-batch is what `data.examples.pair_rows.PairRows` reads: all its answers go through one forward pass, without
padding, and log-probabilities are computed for their tokens only. The loss is a mean over pairs.
"""

import torch
from torch import Tensor

from lmtrain.config.options import DPOConfig
from lmtrain.config.schema import Config
from lmtrain.data.corpus import Corpus
from lmtrain.losses.preferences import LOSSES, LossOptions, Pairs, PreferenceLosses, preference_losses
from lmtrain.objectives.parts import LossParts, of_rows, options_of, with_routers
from lmtrain.objectives.start_check import check_start
from lmtrain.objectives.with_reference import ReferenceObjective


def loss_options(cfg: DPOConfig) -> LossOptions:
    """Builds the options of the loss from the config; length_normalize=auto becomes what the loss's paper uses."""
    per_token = LOSSES[cfg.loss].per_token if cfg.length_normalize == "auto" else bool(cfg.length_normalize)
    named_alike = {name: getattr(cfg, name) for name in LossOptions._fields}
    return LossOptions(**{**named_alike, "length_normalize": per_token})


class DPO(ReferenceObjective):
    """The objective of all losses over pairs (objective.loss)."""

    Options = DPOConfig
    reported = (
        "loss", "preference_loss", "sft_loss", "rewards/chosen", "rewards/rejected", "rewards/margin",
        "rewards/accuracy", "logps/chosen", "logps/rejected", "kl",
    )  # fmt: skip
    answers = 2  # per row: chosen, rejected

    def prepare(self, config: Config, corpus: Corpus) -> None:
        """Resolves the loss and the reference, which is the model before a checkpoint is read.

        Raises:
            UserError: see `reference.choose`.
        """
        options = options_of(config, DPOConfig)
        self.keys, self.loss, self.options = options, options.loss, loss_options(options)
        self.settle_reference(options.reference_in_use(), config, corpus)
        self.fingerprint["keys"]["objective.length_normalize"] = self.options.length_normalize  # with auto resolved

    @staticmethod
    def pair_losses(options: DPOConfig, pairs: Pairs) -> PreferenceLosses:
        return preference_losses(options.loss, pairs, loss_options(options))

    def count_tokens(self, batch: dict[str, Tensor]) -> Tensor:
        return batch["pairs"]

    def validation_names(self) -> list[str]:
        absent = {"kl": self.reference == "none", "sft_loss": not self.options.sft_weight}
        return [name for name in super().validation_names() if not absent.get(name)]

    def plan_rows(self) -> list[tuple[str, str]]:
        keys = ["beta", "sft_weight", "length_normalize", *LOSSES[self.loss].options]
        shown = {k: v for k, v in self.options._asdict().items() if k in keys and v}
        words = ", ".join([self.loss, *(f"{key}={value:g}" for key, value in shown.items())])
        return [("loss", f"{words}; reference: {self.describe_reference()}")]

    def check_start(self, batch: dict[str, Tensor]) -> Tensor:
        # What a subclass's own loss should be is not known; that policy and reference agree is checked all the same.
        is_own = type(self).pair_losses is not DPO.pair_losses
        return super().check_start(batch) if is_own else check_start(self, batch)

    def micro_batch_loss(self, batch: dict[str, Tensor]) -> LossParts:
        reference = self.reference_log_probs(batch)
        policy, out = self.answer_log_probs(batch)
        tokens = batch["lengths"].view(-1, 2)
        base = (None, None) if reference is None else reference.unbind(1)
        pairs = Pairs(*policy.unbind(1), *tokens.unbind(1), *base)
        losses = self.pair_losses(self.keys, pairs)
        numbers = {
            "rewards/chosen": losses.chosen_rewards,
            "rewards/rejected": losses.rejected_rewards,
            "rewards/margin": losses.chosen_rewards - losses.rejected_rewards,
            "rewards/accuracy": (losses.chosen_rewards > losses.rejected_rewards).to(policy.dtype),
            "logps/chosen": pairs.chosen,
            "logps/rejected": pairs.rejected,
            "preference_loss": losses.preference,
        }
        if reference is not None:
            numbers["kl"] = kl_per_token(policy.detach() - reference, tokens)
        if self.options.sft_weight:
            numbers["sft_loss"] = losses.sft
        return with_routers(of_rows(losses.total, numbers, batch["pairs"]), out)


def kl_per_token(log_ratio: Tensor, tokens: Tensor) -> Tensor:
    """Estimates KL(policy || reference) per token on the two answers of each pair: [P] from [P, 2] and [P, 2].

    The estimate is `exp(-r) - 1 + r` for the mean log-ratio r of an answer's tokens (Schulman 2020, "Approximating KL
    divergence", k3): never negative, and 0 where both models agree. The answers come from the data, not from the
    policy, so it measures how far the policy has moved on these answers rather than overall.
    """
    r = log_ratio / tokens
    return (torch.expm1(-r) + r).mean(1)
