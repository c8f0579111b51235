"""Next-token prediction: summed negative log-likelihood of labels over the tokens that have one."""

from torch import Tensor

from lmtrain.config.objectives import CausalLMOptions
from lmtrain.data.text.windows import IGNORE
from lmtrain.objectives.base import LossParts, Objective


class CausalLM(Objective):
    """Pretraining. A micro-batch is {input_ids, labels, [position_ids, cu_seqlens, learned, seen]}, labels shifted."""

    Options = CausalLMOptions

    def count_tokens(self, batch: dict[str, Tensor]) -> Tensor:
        return (batch["labels"] != IGNORE).sum()

    def validation_names(self) -> list[str]:
        return ["loss", *self.model.router_losses.names()]

    def micro_batch_loss(self, batch: dict[str, Tensor]) -> LossParts:
        out = self.call_model(**{name: value for name, value in batch.items() if name != "seen"})
        sums = {"loss": out.nll_sum}
        sums.update({name: value * out.n_tokens for name, value in out.aux.items()})
        return LossParts(out.loss_sum, out.n_tokens, sums)
