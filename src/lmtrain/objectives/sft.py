"""Supervised fine-tuning: next-token prediction of the tokens that carry a label."""

import torch
from torch import Tensor

from lmtrain.config.options import SFTConfig
from lmtrain.config.schema import Config
from lmtrain.data.corpus import Corpus
from lmtrain.models import documents
from lmtrain.objectives.causal_lm import CausalLM
from lmtrain.objectives.parts import LossParts, options_of


class SFT(CausalLM):
    """Fine-tuning. A micro-batch is {input_ids, labels, seen, [position_ids, cu_seqlens]}; labels on learned tokens."""

    _batch: dict[str, Tensor]  # the current micro-batch

    Options = SFTConfig

    def prepare(self, config: Config, corpus: Corpus) -> None:
        """Adds NEFTune (Jain et al. 2023, arXiv:2310.05914): uniform noise of alpha / sqrt(T D) on training embeddings.

        T is the length of an example (of the document if rows are packed, of the row if padded), D the embedding size.
        """
        alpha = options_of(config, SFTConfig).neftune_alpha
        if not alpha:
            return

        def noisy(module: torch.nn.Module, _: object, embedded: Tensor) -> Tensor:
            return add_noise(embedded, alpha, token_lengths(self._batch)) if module.training else embedded

        self.model.model.get_input_embeddings().register_forward_hook(noisy)

    def micro_batch_loss(self, batch: dict[str, Tensor]) -> LossParts:
        self._batch = batch
        return super().micro_batch_loss(batch)


def token_lengths(batch: dict[str, Tensor]) -> Tensor:
    """Returns the length of the example that each token belongs to, int64 [B, T, 1]."""
    rows, length = batch["input_ids"].shape
    if "cu_seqlens" not in batch:
        return torch.full((rows, length, 1), length, dtype=torch.int64, device=batch["input_ids"].device)
    return documents.token_lengths(batch["cu_seqlens"], rows, length)[..., None]


def add_noise(embedded: Tensor, alpha: float, lengths: Tensor) -> Tensor:
    """Adds noise to embeddings [B, T, D], scaled by the `lengths` [B, T, 1] of their examples."""
    size = alpha / (lengths * embedded.shape[-1]).float().sqrt()
    return embedded + torch.empty_like(embedded).uniform_(-1, 1) * size.to(embedded.dtype)
