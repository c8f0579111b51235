"""Next-token prediction: summed negative log-likelihood of labels over the tokens that have one."""

from torch import Tensor

from lmtrain.data.windows import IGNORE
from lmtrain.objectives.base import LossParts, Objective


class CausalLM(Objective):
    """Pretraining. A micro-batch is {input_ids, labels, [position_ids, cu_seqlens]}, labels already shifted."""

    def count_tokens(self, batch: dict[str, Tensor]) -> Tensor:
        return (batch["labels"] != IGNORE).sum()

    def validation_names(self) -> list[str]:
        return ["loss", "aux/router_loss"] if self.model.has_router else ["loss"]

    def micro_batch_loss(self, batch: dict[str, Tensor]) -> LossParts:
        out = self.call_model(**batch)
        sums = {"loss": out.nll_sum}
        sums.update({name: value * out.n_tokens for name, value in out.aux.items()})
        return LossParts(out.loss_sum, out.n_tokens, sums)
