"""Tiny random models of every family, and micro-batches of packed documents."""

from typing import Any

import pytest
import torch

from lmtrain.config.options import ScratchModelConfig
from lmtrain.models.build import build_model
from lmtrain.models.language_model import LanguageModel

VOCAB = 61
COMMON: dict[str, Any] = {
    "init": "scratch",
    "trust_remote_code": False,
    "attention": "auto",
    "learning_rate": 1e-3,
    "vocab_size": None,
    "vocab_multiple_of": 1,
    "dropout": 0.0,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    # Large weights, so that the tokens that a token attends to affect its logits visibly.
    "initializer_range": 0.3,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "gpt2": {"hidden_act": "gelu_pytorch_tanh"},
    "llama": {"num_key_value_heads": 2, "intermediate_size": 48, "tie_word_embeddings": False},
    "qwen3": {"num_key_value_heads": 2, "head_dim": 16, "intermediate_size": 48, "rope_theta": 1e4},
    "qwen3_moe": {
        "num_key_value_heads": 2,
        "head_dim": 16,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
        "router_aux_loss_coef": 0.0,
        "tie_word_embeddings": True,
    },
}


def tiny_config(family: str, **changes: Any) -> ScratchModelConfig:
    return ScratchModelConfig(**{**COMMON, "name": family, "family": family, **FAMILIES.get(family, {}), **changes})


def tiny(family: str, **changes: Any) -> Any:
    """Builds a transformers model of the family with random weights that are the same every time."""
    torch.manual_seed(0)
    return build_model(tiny_config(family, **changes), VOCAB, 0, seq_len=32)


def wrapped(family: str, **changes: Any) -> LanguageModel:
    return LanguageModel(tiny(family, **changes))


LENGTHS = [[5, 9, 2, 1, 3], [7, 7, 6], [20]]  # lengths of the documents in each of three rows of 20 tokens


def packed(lengths: list[list[int]] = LENGTHS, seed: int = 0) -> dict[str, torch.Tensor]:
    """Returns a micro-batch of packed documents: each restarts the positions, and its last token has no label."""
    generator = torch.Generator().manual_seed(seed)
    rows, length = len(lengths), sum(lengths[0])
    ids = torch.randint(0, VOCAB, (rows, length), generator=generator)
    labels = torch.full_like(ids, -100)
    labels[:, :-1] = ids[:, 1:]
    positions, starts = torch.zeros_like(ids), []
    for b, row in enumerate(lengths):
        start = 0
        for n in row:
            starts.append(b * length + start)
            positions[b, start : start + n] = torch.arange(n)
            labels[b, start + n - 1] = -100
            start += n
    cu_seqlens = torch.tensor([*starts, rows * length], dtype=torch.int32)
    return {"input_ids": ids, "labels": labels, "position_ids": positions, "cu_seqlens": cu_seqlens}


@pytest.fixture(params=list(FAMILIES))
def family(request: pytest.FixtureRequest) -> str:
    return request.param
