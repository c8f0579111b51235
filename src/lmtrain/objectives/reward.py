"""Reward models: one number for an answer, learned from pairs of which one is preferred (Bradley and Terry 1952).

The loss is that of Ouyang et al. 2022 (arXiv:2203.02155, eq. 1), with the margin of Llama 2 (Touvron et al. 2023,
arXiv:2307.09288, eq. 2) if the data has one. A micro-batch is what `data.examples.pair_rows.PairRows` reads. The loss
is a mean over pairs.
"""

from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

import torch
from torch import Tensor
from transformers import PreTrainedModel

from lmtrain.config.constraints import TRAJECTORY, not_negative
from lmtrain.config.schema import Config, ObjectiveConfig
from lmtrain.data.corpus import Corpus
from lmtrain.losses.preferences import bradley_terry
from lmtrain.models.language_model import LogProbs
from lmtrain.models.scalar_head import last_real, padding_of, set_padding
from lmtrain.objectives.base import Objective
from lmtrain.objectives.parts import LossParts, inputs_of, of_rows, options_of, with_routers


@dataclass(kw_only=True)
class RewardOptions(ObjectiveConfig):
    rows: ClassVar[str] = "pairs"
    headline: ClassVar[tuple[str, ...]] = ("rewards/accuracy", "loss")
    scalar_head: ClassVar[bool] = True

    center_rewards_coefficient: Annotated[float, TRAJECTORY, not_negative]


class RewardModel(Objective):
    """The objective of reward models; the model is a transformers `...ForSequenceClassification` with one label."""

    Options = RewardOptions
    reported = ("loss", "rewards/chosen", "rewards/rejected", "rewards/margin", "rewards/mean", "rewards/accuracy")
    loss_is_nll = False

    def prepare(self, config: Config, corpus: Corpus) -> None:
        self.centring = options_of(config, RewardOptions).center_rewards_coefficient
        self.has_margins = getattr(corpus.train, "margins", None) is not None

    @classmethod
    def settle_model(cls, config: Config, model: PreTrainedModel, tokenizer: Any) -> None:
        super().settle_model(config, model, tokenizer)
        set_padding(model, tokenizer)

    def count_tokens(self, batch: dict[str, Tensor]) -> Tensor:
        return batch["pairs"]

    def plan_rows(self) -> list[tuple[str, str]]:
        margin = ", with the margins of the data" if self.has_margins else ""
        centred = f", centred by {self.centring:g}" if self.centring else ""
        return [("loss", f"Bradley-Terry{margin}{centred}; a scalar head at the last token that is no padding")]

    def rewards(self, batch: dict[str, Tensor]) -> tuple[Tensor, LogProbs]:
        """Returns rewards of the chosen and the rejected answers, fp64 [P, 2], and the output of the forward pass."""
        at = last_real(batch["input_ids"], batch["ends"], padding_of(self.model.model))
        out = self.model.scores(inputs_of(batch), at=at)
        return out.tokens.double().view(-1, 2), out

    def micro_batch_loss(self, batch: dict[str, Tensor]) -> LossParts:
        rewards, out = self.rewards(batch)
        chosen, rejected = rewards.unbind(1)
        margin = batch["margin"].view(torch.float64) if "margin" in batch else None
        losses = bradley_terry(chosen, rejected, margin, self.centring)
        numbers = {
            "rewards/chosen": chosen,
            "rewards/rejected": rejected,
            "rewards/margin": chosen - rejected,
            "rewards/mean": rewards.mean(1),
            "rewards/accuracy": (chosen > rejected).to(rewards.dtype),
        }
        return with_routers(of_rows(losses, numbers, batch["pairs"]), out)

    @torch.no_grad()
    def predict_step(self, batch: dict[str, Tensor], batch_idx: int, dataloader_idx: int = 0) -> dict[str, Any]:
        """Returns `rewards` of the chosen and the rejected answers, fp64 [P, 2]."""
        return {"rewards": self.rewards(batch)[0]}
