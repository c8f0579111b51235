"""A tiny pretrained model with a tokenizer, saved as a folder: what adapters start from in tests."""

from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig, PreTrainedModel, Qwen3MoeConfig

from lmtrain.config.options import LoadedModelConfig
from lmtrain.config.schema_data import TokenizerConfig
from lmtrain.data import tokenizers
from lmtrain.models.build import build_model

SIZES: dict[str, Any] = {
    "llama": {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
    },
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64},
}
SIZES["qwen3_moe"] = SIZES["llama"] | {
    "head_dim": 8,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
}
# Overrides of a short run that fine-tunes it.
SHORT = [
    "model=pretrained",
    "model.dropout=0.0",
    "data=text",
    "data.seq_len=32",
    "data.global_batch_size=4",
    "data.micro_batch_size=2",
    "trainer.precision=32-true",
    "trainer.max_steps=4",
    "trainer.log_every_n_steps=1",
    "trainer.val_check_interval=2",
    "trainer.limit_val_batches=1",
    "optimizer.lr=0.01",
    "logger=none",
    "callbacks.samples.max_new_tokens=4",
]


def save_pretrained(folder: Path, family: str = "llama", spare_rows: int = 0, **changes: Any) -> Path:
    """Saves a model, with weights so large that each layer's effect shows in the logits, and a bytes tokenizer."""
    cfg = TokenizerConfig(kind="bytes")
    tokenizer = tokenizers.load_or_train(cfg, lambda _: iter(()), tokenizers.identity(cfg))
    config_class = {"llama": LlamaConfig, "gpt2": GPT2Config, "qwen3_moe": Qwen3MoeConfig}[family]
    fields = {"vocab_size": len(tokenizer) + spare_rows, "initializer_range": 0.2, "eos_token_id": 0, "bos_token_id": 0}
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config_class(**{**SIZES[family], **fields, **changes}))
    model.save_pretrained(folder)
    tokenizers.save(tokenizer, folder)
    return folder


def load_pretrained(folder: Path, vocab_size: int, **options: Any) -> PreTrainedModel:
    """Loads the folder's model as a run with model=pretrained does."""
    cfg = LoadedModelConfig(
        name="pretrained",
        init="pretrained",
        name_or_path=str(folder),
        trust_remote_code=False,
        attention="auto",
        learning_rate=1e-4,
        vocab_size=None,
        vocab_multiple_of=1,
        dropout=0.0,
    )
    return build_model(cfg, vocab_size, 0, seq_len=32, **options)
