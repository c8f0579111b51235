"""A tiny pretrained model with a tokenizer, saved as a folder: what adapters start from in tests."""

from pathlib import Path
from typing import Any

import torch
from transformers import (
    CONFIG_MAPPING,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    GPT2Config,
    LlamaConfig,
    PreTrainedModel,
    Qwen3MoeConfig,
)

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


_TEXT = {
    **SIZES["llama"],
    **{"head_dim": 8, "vocab_size": 270, "sliding_window": 16, "initializer_range": 0.2},
    **{"pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 0},
}
_VISION = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
_VISION |= {"num_channels": 3, "image_size": 28, "patch_size": 14}
_LINEAR = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8}
_IMAGES = {"image_token_index": 265, "boi_token_index": 266, "eoi_token_index": 267}
WRAPPERS: dict[str, dict[str, Any]] = {
    "gemma3": {"text_config": _TEXT, "vision_config": _VISION, "mm_tokens_per_image": 1, **_IMAGES},
    "qwen3_5": {
        "text_config": {**_TEXT, **_LINEAR, "layer_types": ["linear_attention", "full_attention"]},
        "vision_config": {"depth": 1, "hidden_size": 16, "intermediate_size": 24, "num_heads": 2,
                          "out_hidden_size": 32, "num_position_embeddings": 16, "patch_size": 14},
        **{"image_token_id": 265, "video_token_id": 266, "vision_start_token_id": 267, "vision_end_token_id": 268},
    },
    "llama4": {
        "text_config": {**_TEXT, "intermediate_size_mlp": 48, "num_local_experts": 2, "num_experts_per_tok": 1},
        "vision_config": {**_VISION, "intermediate_size": 64, "vision_output_dim": 16, "projector_input_dim": 16,
                          "projector_output_dim": 16},
        **_IMAGES,
    },
    "mistral3": {
        "text_config": {"model_type": "mistral", **_TEXT},
        "vision_config": {"model_type": "pixtral", **_VISION, "head_dim": 8},
        "image_token_index": 265,
    },
    "gemma4": {
        "text_config": {**_TEXT, "vocab_size_per_layer_input": 260, "hidden_size_per_layer_input": 8,
                        "global_head_dim": 16, "layer_types": ["sliding_attention", "full_attention"]},
        "vision_config": {**_VISION, "head_dim": 8, "num_key_value_heads": 2},
        "audio_config": None,
        **{"image_token_id": 265, "boi_token_id": 266, "eoi_token_id": 267},
    },
}  # fmt: skip
WRAPPERS["qwen3_5_moe"] = {
    **WRAPPERS["qwen3_5"],
    "text_config": {**WRAPPERS["qwen3_5"]["text_config"], "num_experts": 4, "num_experts_per_tok": 2,
                    "moe_intermediate_size": 24, "shared_expert_intermediate_size": 24},
}  # fmt: skip


def save_wrapper(folder: Path, family: str) -> Path:
    """Saves a multimodal model around a tiny language model, in bf16 and as its family's files name the tensors."""
    torch.manual_seed(0)
    config = CONFIG_MAPPING[family](**WRAPPERS[family])
    AutoModelForImageTextToText.from_config(config).bfloat16().save_pretrained(folder)
    cfg = TokenizerConfig(kind="bytes")
    tokenizers.save(tokenizers.load_or_train(cfg, lambda _: iter(()), tokenizers.identity(cfg)), folder)
    (folder / "preprocessor_config.json").write_text('{"image_mean": [0.5, 0.5, 0.5]}', encoding="utf-8")
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
