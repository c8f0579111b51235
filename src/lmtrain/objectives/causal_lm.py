"""Next-token prediction: the summed negative log-likelihood of the labels, over the tokens that have one."""

from typing import Any

import torch
from torch import Tensor

from lmtrain.config.options import CausalLMConfig
from lmtrain.data.text.windows import IGNORE
from lmtrain.objectives.base import Objective
from lmtrain.objectives.parts import LossParts, inputs_of


class CausalLM(Objective):
    """Pretraining. A micro-batch is {input_ids, labels, [position_ids, cu_seqlens, learned, seen]}, labels shifted."""

    Options = CausalLMConfig
    reported = ("loss",)

    def count_tokens(self, batch: dict[str, Tensor]) -> Tensor:
        return (batch["labels"] != IGNORE).sum()

    def micro_batch_loss(self, batch: dict[str, Tensor]) -> LossParts:
        out = self.call_model(**{name: value for name, value in batch.items() if name != "seen"})
        routers = {name: value * out.n_tokens for name, value in out.aux.items()}
        return LossParts(out.loss_sum, out.n_tokens, {"loss": out.nll_sum, **routers})

    @torch.no_grad()
    def predict_step(self, batch: dict[str, Tensor], batch_idx: int, dataloader_idx: int = 0) -> dict[str, Any]:
        """Returns `log_probs` of the labels in nats, fp32 [B, T], 0 without one, and the `labels`, int64 [B, T]."""
        labels = batch["labels"]
        at = (labels.flatten() != IGNORE).nonzero()[:, 0]
        out = self.model.log_probs(inputs_of(batch), scored=at, before=at, targets=labels.flatten()[at])
        found = torch.zeros(labels.numel(), dtype=torch.float32, device=labels.device)
        return {"log_probs": found.index_put((at,), out.tokens.float()).view_as(labels), "labels": labels}
