"""Masked diffusion language modelling, in LLaDA's form: tokens hidden at random are predicted from all others.

Sahoo et al. 2024 (arXiv:2406.07524), Nie et al. 2025 (arXiv:2502.09992, eq. 3): each row draws a time t in (0, 1], each
of its tokens is masked with probability t, and the cross-entropy of the masked ones is weighted by 1 / t. Its mean per
token is an upper bound on the negative log-likelihood. Attention is bidirectional.

Validation estimates the same bound with less noise: of the L tokens of a row exactly k are masked, with k evenly spread
over 1 .. L, and weighted by L / k (Nie et al., eq. 14), which has the same expectation if min_time is 0.
"""

import math
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AttentionInterface, PreTrainedModel

from lmtrain.config.constraints import OPEN, TRAJECTORY, above_zero, share
from lmtrain.config.schema import Config, ObjectiveConfig
from lmtrain.data.corpus import Corpus
from lmtrain.data.loaders import ValidationDataset
from lmtrain.data.order import mix64
from lmtrain.data.text.windows import IGNORE
from lmtrain.errors import UserError
from lmtrain.models.denoising import mask_token, set_mask_token
from lmtrain.models.documents import Inputs
from lmtrain.models.language_model import LogProbs
from lmtrain.objectives import base
from lmtrain.objectives.parts import LossParts, options_of, with_routers

ATTENTION = "lmtrain_bidirectional"
GOLDEN = 0x9E3779B97F4A7C15  # 2**64 over the golden ratio


@dataclass(kw_only=True)
class MDLMOptions(ObjectiveConfig):
    headline: ClassVar[tuple[str, ...]] = ("bits_per_byte", "loss")
    mask_token: Annotated[str | None, TRAJECTORY, OPEN] = None
    min_time: Annotated[float, TRAJECTORY, above_zero, share]


class Masked(NamedTuple):
    """A mask of hidden tokens, bool [B, T], and the times [B, 1] fp32 that were drawn for the rows."""

    where: Tensor
    times: Tensor


def draw(rows: int, length: int, min_time: float, device: torch.device) -> Masked:
    """Draws masks; times are spread evenly over rows from one random start, for less variance (MDLM, section 3.4)."""
    start = torch.rand((), dtype=torch.float32, device=device)
    spread = (start + torch.arange(rows, dtype=torch.float32, device=device) / rows) % 1.0
    times = (min_time + (1 - min_time) * spread)[:, None]
    return Masked(torch.rand(rows, length, dtype=torch.float32, device=device) < times, times)


def draw_for(places: list[int], length: int, device: torch.device) -> Masked:
    """Returns masks for the validation rows at the given places, the same for every seed and split of the rows.

    The share of hidden tokens, k / length, follows the multiples of the golden ratio (a low-discrepancy sequence, which
    spreads consecutive rows evenly; Kingma et al. 2021, arXiv:2107.00630, appendix I.1, spread those of a batch). Which
    k tokens are hidden is random.
    """
    counts = [1 + ((place * GOLDEN % 2**64) * length >> 64) for place in places]
    where = torch.zeros(len(places), length, dtype=torch.bool)
    for row, (place, count) in enumerate(zip(places, counts, strict=True)):
        generator = torch.Generator().manual_seed(mix64(0xD1FF, place) >> 1)
        where[row, torch.randperm(length, generator=generator)[:count]] = True
    return Masked(where.to(device), torch.tensor(counts, dtype=torch.float32, device=device)[:, None] / length)


class MDLM(base.Objective):
    """Masked diffusion. A micro-batch is that of causal_lm, whose labels only tell which rows train.

    The loss is an upper bound of the negative log-likelihood, in nats per token.
    """

    Options = MDLMOptions
    reported = ("loss", "loss_se")

    def prepare(self, config: Config, corpus: Corpus) -> None:
        """Reads the options, and the id of the mask token that `settle_model` has set."""
        self.min_time = options_of(config, MDLMOptions).min_time
        mask_id = mask_token(self.model.model)
        assert mask_id is not None  # set by settle_model
        self.mask_id = mask_id

    @classmethod
    def settle_model(cls, config: Config, model: PreTrainedModel, tokenizer: Any) -> None:
        """Sets mask token and bidirectional attention; raises UserError if there is no id for a mask token."""
        set_mask_token(model, _mask_id(options_of(config, MDLMOptions).mask_token, tokenizer, model))
        model.set_attn_implementation(ATTENTION)

    def plan_rows(self) -> list[tuple[str, str]]:
        return [
            ("attention", f"in both directions; a hidden token is id {self.mask_id}"),
            ("writes", "samples and lmtrain.generate uncover masked texts, which transformers' generate() can't"),
        ]

    def count_tokens(self, batch: dict[str, Tensor]) -> Tensor:
        return _real(batch).sum() * batch["input_ids"].shape[1]

    def micro_batch_loss(self, batch: dict[str, Tensor]) -> LossParts:
        ids = batch["input_ids"]
        if self.training:
            masked = draw(ids.shape[0], ids.shape[1], self.min_time, ids.device)
        else:
            masked = draw_for(list(range(len(ids))), ids.shape[1], ids.device)
        losses, out = self.row_losses(batch, masked)
        loss_sum = losses.sum()
        return with_routers(LossParts(loss_sum, self.count_tokens(batch), {"loss": loss_sum.detach()}), out)

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int, dataloader_idx: int = 0) -> None:
        ids = batch["input_ids"]
        places = self._places(batch_idx, dataloader_idx, len(ids))
        losses, out = self.row_losses(batch, draw_for(places, ids.shape[1], ids.device))
        losses = losses.double()
        per_token = losses / ids.shape[1]
        sums = {"loss": losses.sum(), "rows": _real(batch).sum().double()}
        sums |= {"row_losses": per_token.sum(), "row_squares": per_token.square().sum()}
        parts = with_routers(LossParts(losses.sum(), self.count_tokens(batch), sums), out)
        base.add_sums(self.val_sums.setdefault(dataloader_idx, {}), {**parts.sums, "n_tokens": parts.n_tokens})

    def _places(self, batch_idx: int, dataloader_idx: int, rows: int) -> list[int]:
        """Returns the places of a micro-batch's rows among all that are validated, which the draws follow from."""
        trainer: Any = self.trainer
        loaders = trainer.test_dataloaders if trainer.testing else trainer.val_dataloaders
        dataset = (loaders[dataloader_idx] if isinstance(loaders, list) else loaders).dataset
        if isinstance(dataset, ValidationDataset):
            return dataset.places(batch_idx).tolist() or [0] * rows  # a rank without rows reads an empty one
        return list(range(batch_idx * rows, (batch_idx + 1) * rows))  # a loader that the caller of `test` has passed

    def means_of(self, sums: dict[str, Any], n_tokens: Any) -> dict[str, Any]:
        """Computes the mean loss; in validation also loss_se, its standard error: its spread over rows / sqrt(rows)."""
        sums = dict(sums)
        rows, first, second = (sums.pop(name, 0.0) for name in ("rows", "row_losses", "row_squares"))
        means = super().means_of(sums, n_tokens)
        if rows > 1:
            means["loss_se"] = math.sqrt(max(second - first**2 / rows, 0.0) / (rows - 1) / rows)
        return means

    def row_losses(self, batch: dict[str, Tensor], masked: Masked) -> tuple[Tensor, LogProbs]:
        """Computes the bound of each row in nats, [B] fp32, 0 for rows that train nothing, and the forward's output."""
        ids = batch["input_ids"]
        out = self.masked_log_probs(ids, masked)
        weighted = -out.tokens / masked.times.expand_as(ids)[masked.where]
        rows = torch.zeros(len(ids), device=ids.device, dtype=weighted.dtype)
        return rows.index_add(0, masked.where.nonzero()[:, 0], weighted) * _real(batch), out

    def masked_log_probs(self, ids: Tensor, masked: Masked) -> LogProbs:
        """Returns the log-probability of each masked token of `ids` [B, T], given the unmasked: [C] fp32."""
        at = masked.where.flatten().nonzero()[:, 0]
        hidden = ids.masked_fill(masked.where, self.mask_id)
        return self.model.log_probs(Inputs(hidden), scored=at, before=at, targets=ids[masked.where])


def _real(batch: dict[str, Tensor]) -> Tensor:
    """Returns which rows of a micro-batch train something, bool [B]: those of `Rows.empty()` have no label."""
    ids, labels = batch["input_ids"], batch.get("labels")
    return torch.ones_like(ids[:, 0], dtype=torch.bool) if labels is None else (labels != IGNORE).any(1)


def _mask_id(token: str | None, tokenizer: Any, model: Any) -> int:
    """Returns the id of the mask token; if none is named, the first row of the embeddings that no token uses."""
    size, rows = len(tokenizer), model.get_input_embeddings().num_embeddings
    if token is not None:
        found = tokenizer.get_vocab().get(token)
        if found is None:
            raise UserError(f"objective.mask_token={token} is no token here: tokenizer.add_tokens adds one")
        return int(found)
    if rows <= size:
        found = f"objective.mask_token=null: all {rows} rows of the embeddings belong to tokens"
        added = "tokenizer.add_tokens=[HIDDEN] objective.mask_token=HIDDEN"
        scratch = f"from scratch by model.vocab_size={size + 1}"
        raise UserError(f"{found}; add one with {added}, or {scratch}, or name a token that the text doesn't have")
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
    """Computes attention of every token to every other, in transformers' AttentionInterface signature; [B, T, H, D].

    Raises:
        UserError: the family's attention does more, which would be left out: a cap on its scores (Gemma 2), a sink
            (gpt-oss), a position bias, or a window that is shorter than the row.
    """
    asked = [name for name in ("softcap", "s_aux", "position_bias") if kwargs.get(name) is not None]
    if (kwargs.get("sliding_window") or math.inf) < key.shape[2]:
        asked.append(f"sliding_window={kwargs['sliding_window']}")
    if asked:
        found = f"objective=mdlm: {type(module).__name__} asks its attention for {', '.join(asked)}"
        raise UserError(f"{found}, which masked diffusion doesn't have here: choose another model")
    grouped = query.shape[1] != key.shape[1]
    query, key = query.to(value.dtype), key.to(value.dtype)  # under autocast, rotary embeddings give fp32
    out = F.scaled_dot_product_attention(query, key, value, dropout_p=dropout, scale=scaling, enable_gqa=grouped)
    return out.transpose(1, 2).contiguous(), None


AttentionInterface.register(ATTENTION, bidirectional)
