"""Masked diffusion language modelling, in LLaDA's form: tokens hidden at random are predicted from all others.

Sahoo et al. 2024 (arXiv:2406.07524), Nie et al. 2025 (arXiv:2502.09992, eq. 3): each row draws a time t in (0, 1], each
of its tokens is masked with probability t, and the cross-entropy of the masked ones is weighted by 1 / t. Its mean per
token is an upper bound on the negative log-likelihood. Attention is bidirectional.
"""

from dataclasses import dataclass
from typing import Annotated, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AttentionInterface

from lmtrain.config.constraints import TRAJECTORY, above_zero, share
from lmtrain.config.schema import Config, Objective
from lmtrain.data.corpus import Corpus
from lmtrain.errors import UserError
from lmtrain.objectives import base
from lmtrain.objectives.base import LossParts

ATTENTION = "lmtrain_bidirectional"


@dataclass(kw_only=True)
class MDLMOptions(Objective):
    mask_token: Annotated[str | None, TRAJECTORY] = None
    min_time: Annotated[float, TRAJECTORY, above_zero, share]

    def check(self, config: Config) -> None:
        needed = {
            "data.isolate_documents": (config.data.isolate_documents, False),
            "data.packing": (config.data.packing, None),  # rows without padding
            "export.enabled": (config.export.enabled, False),  # readers of the folder would attend causally
            "callbacks.samples.every_n_validations": (config.callbacks.samples.every_n_validations, 0),
        }
        due_now = {key: due for key, (found, due) in needed.items() if found != due}
        wrong = [f"{key}={'null' if due is None else str(due).lower()}" for key, due in due_now.items()]
        if wrong:
            raise UserError(
                f"objective=mdlm trains a model that doesn't write from left to right: set {' '.join(wrong)}"
            )


class Masked(NamedTuple):
    """Which tokens are hidden, bool [B, T], and the times [B, 1] fp32 that their rows have drawn."""

    where: Tensor
    times: Tensor


def draw(rows: int, length: int, min_time: float, device: torch.device, generator: torch.Generator | None) -> Masked:
    """Times evenly spread over the rows from one random start, which lowers the variance (MDLM, section 3.4)."""
    start = torch.rand((), device=device, generator=generator)
    spread = (start + torch.arange(rows, device=device) / rows) % 1.0
    times = (min_time + (1 - min_time) * spread)[:, None]
    return Masked(torch.rand(rows, length, device=device, generator=generator) < times, times)


class MDLM(base.Objective):
    """A micro-batch is that of causal_lm; its labels are not read. loss: a bound on nats per token."""

    Options = MDLMOptions

    def prepare(self, config: Config, corpus: Corpus) -> None:
        """Raises UserError where there is nothing that can stand for a hidden token."""
        assert isinstance(config.objective, MDLMOptions)
        self.min_time = config.objective.min_time
        self.mask_id = _mask_id(config.objective.mask_token, corpus.tokenizer, self.model.model)
        hf_model: Any = self.model.model
        hf_model.set_attn_implementation(ATTENTION)

    def count_tokens(self, batch: dict[str, Tensor]) -> Tensor:
        return torch.tensor(batch["input_ids"].numel(), device=batch["input_ids"].device)

    def micro_batch_loss(self, batch: dict[str, Tensor]) -> LossParts:
        ids = batch["input_ids"]
        # Validation hides the same tokens every time, so that its losses can be compared.
        fixed = None if self.training else torch.Generator(ids.device).manual_seed(self.seed)
        masked = draw(ids.shape[0], ids.shape[1], self.min_time, ids.device, fixed)
        nll = self.masked_nll(ids, masked)
        loss_sum = (nll / masked.times.expand_as(ids)[masked.where]).sum()
        return LossParts(loss_sum, self.count_tokens(batch), {"loss": loss_sum.detach()})

    def masked_nll(self, ids: Tensor, masked: Masked) -> Tensor:
        """Negative log-likelihood of each masked token of `ids` [B, T], given those that are not masked: [C] fp32."""
        at = masked.where.flatten().nonzero()[:, 0]
        hidden = ids.masked_fill(masked.where, self.mask_id)
        out = self.model.log_probs(hidden, None, None, None, scored=at, before=at, targets=ids[masked.where])
        return -out.tokens


def _mask_id(token: str | None, tokenizer: Any, model: Any) -> int:
    """The id of the mask token; without one the first row of the embeddings that no token has."""
    size, rows = len(tokenizer), model.get_input_embeddings().num_embeddings
    if token is not None:
        found = tokenizer.get_vocab().get(token)
        if found is None:
            raise UserError(f"objective.mask_token={token} is no token here: tokenizer.add_tokens adds one")
        return int(found)
    if rows <= size:
        raise UserError(
            f"objective.mask_token=null: all {rows} rows of the embeddings belong to tokens; set "
            f"model.vocab_size={size + 1}, or name a token that doesn't occur in the text"
        )
    return size


def bidirectional(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Every token attends to every other, with transformers' AttentionInterface signature; [B, T, H, D]."""
    grouped = query.shape[1] != key.shape[1]
    query, key = query.to(value.dtype), key.to(value.dtype)  # rotary embeddings leave fp32 under autocast
    out = F.scaled_dot_product_attention(query, key, value, dropout_p=dropout, scale=scaling, enable_gqa=grouped)
    return out.transpose(1, 2).contiguous(), None


AttentionInterface.register(ATTENTION, bidirectional)
