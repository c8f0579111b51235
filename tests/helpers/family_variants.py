"""Tiny models of every causal language model family in transformers, and variants of their attention settings."""

import copy
from typing import Any, NamedTuple

import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PretrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from lmtrain.models.probe import enlarge, shrink

LAYERS = 6  # the longest period of a pattern of layer kinds in any family of transformers
ALWAYS = 10**6  # a row length longer than every attention window
# Families that read more than tokens, or can't be built here, by reason.
_EXCLUDED = {
    "it reads images; its text part is another": "aria_text emu3 fuyu gemma3 gemma3n gemma4 gemma4_assistant "
    "gemma4_unified gemma4_unified_assistant git got_ocr2 llama4 mllama moss_transcribe_diarize qwen3_5 qwen3_5_moe "
    "qwen4_exp dots3_note trocr",
    "it reads or writes sound": "moshi musicgen musicgen_melody whisper phi4_multimodal",
    "it is the decoder of an encoder-decoder": "bart bigbird_pegasus blenderbot blenderbot-small marian mbart mvp "
    "pegasus plbart prophetnet",
    "it reads more than tokens and positions": "blt cpmant xlm xmod reformer",
    "its default config isn't valid": "cohere_compass_text dbrx qwen4_exp_text dots3_note_text",
}
EXCLUDED = {name: why for why, names in _EXCLUDED.items() for name in names.split()}
# Families whose rows can't always hold several documents, or which can't be trained: probed at the start of every run.
_PROBED = (
    "apertus1p5_text axk2 bailing_hybrid bamba bert bert-generation big_bird biogpt bloom camembert codegen "
    "data2vec-text deepseek_v32 deepseek_v4 doge dory electra ernie exaone falcon falcon_h1 falcon_mamba glm_moe_dsa "
    "gpt_neo gpt_neox_japanese gptj granitemoehybrid hy_v4 inkling2_loop_text inkling2_text inkling_text jamba "
    "kimi_linear lara_mini lfm2 lfm2_moe lfm3 llama4_text mamba mamba2 megatron-bert minimax minimax_m3_vl_text "
    "modernbert-decoder mpt nemotron nemotron_h olmo_hybrid openai-gpt phimoe qwen2_moe qwen3_5_moe_text qwen3_5_text "
    "qwen3_next recurrent_gemma rembert roberta roberta-prelayernorm roc_bert roformer rwkv sarvam_mla sarvam_moe "
    "stablelm xglm xlm-roberta xlm-roberta-xl xlnet xlstm zamba zamba2 zaya"
)
PROBED = tuple(_PROBED.split())
# Settings that a family's default config lacks.
NEEDED: dict[str, dict[str, Any]] = {
    "gemma3n_text": {
        **{"num_kv_shared_layers": 2, "activation_sparsity_pattern": None},
        "layer_types": ["sliding_attention", "full_attention"] * 3,
    },
    "nemotron": {"num_key_value_heads": 8},
    "deepseek_v2": {"num_experts_per_tok": 2, "n_group": 1, "topk_group": 1},
    "dots1": {"n_routed_experts": 8, "num_experts_per_tok": 2, "n_shared_experts": 1, "n_group": 1, "topk_group": 1},
    "hunyuan_v1_dense": {"head_dim": 128},
    "hunyuan_v1_moe": {"head_dim": 128},
    "ministral": {"head_dim": 128},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 3},
    # Without attention, transformers can't generate with a cache.
    "bamba": {"attn_layer_indices": [1, 3, 5]},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"] * 3},
}
AS_DEEP_AS_THEY_ARE = ("gpt_neo", "zamba", "zamba2")  # their other defaults fit only their own number of layers
_ENCODERS = (
    "bert bert-generation big_bird camembert data2vec-text electra ernie megatron-bert rembert roberta "
    "roberta-prelayernorm roc_bert roformer xlm-roberta xlm-roberta-xl"
)
SLIDING, FULL = "sliding_attention", "full_attention"
WINDOW, NO_WINDOW = {"sliding_window": 64}, {"sliding_window": None}
KEY_HEADS = [{"num_key_value_heads": 1}, {"num_key_value_heads": 8}]
CHANGES: dict[str, list[dict[str, Any]]] = {
    **{name: [{"is_decoder": True}] for name in _ENCODERS.split()},
    "gpt2": [
        {"scale_attn_by_inverse_layer_idx": True},
        {"reorder_and_upcast_attn": True},
        {"tie_word_embeddings": False},
    ],
    "gpt_bigcode": [{"multi_query": False}],
    "llama": [*KEY_HEADS, {"tie_word_embeddings": True}, {"attention_bias": True, "mlp_bias": True}],
    "mistral": [WINDOW, NO_WINDOW, *KEY_HEADS],
    "mixtral": [WINDOW, NO_WINDOW, *KEY_HEADS],
    "qwen2": [{"use_sliding_window": True, "max_window_layers": 2, **WINDOW}, *KEY_HEADS],
    "qwen2_moe": [{"use_sliding_window": True, "max_window_layers": 2, **WINDOW}, {"mlp_only_layers": [0]}],
    "qwen3": [{"use_sliding_window": True, "max_window_layers": 2, **WINDOW}, *KEY_HEADS],
    "qwen3_moe": [{"use_sliding_window": True, **WINDOW}, {"mlp_only_layers": [1]}, {"norm_topk_prob": True}],
    "phi": [{"qk_layernorm": True}, *KEY_HEADS],
    "phi3": [WINDOW, NO_WINDOW, {"partial_rotary_factor": 0.5}],
    "phimoe": [WINDOW, NO_WINDOW],
    "starcoder2": [WINDOW, NO_WINDOW],
    "gemma": KEY_HEADS,
    "gemma2": [
        {"attn_logit_softcapping": None},
        {"final_logit_softcapping": None},
        {"layer_types": [FULL] * LAYERS},
        {"layer_types": [SLIDING] * LAYERS},
    ],
    "gemma3_text": [{"layer_types": [FULL] * LAYERS}, {"layer_types": [SLIDING, FULL] * 3}],
    "gpt_oss": [{"layer_types": [FULL] * LAYERS}, {"layer_types": [SLIDING] * LAYERS}],
    "cohere": [{"use_qk_norm": True}],
    "cohere2": [{"layer_types": [FULL] * LAYERS}, {"layer_types": [SLIDING] * LAYERS}],
    "olmo": [{"clip_qkv": 1.0}],
    "olmo3": [{"layer_types": [FULL, SLIDING] * 3}],
    "exaone4": [{"layer_types": [SLIDING, FULL] * 3}],
    "smollm3": [{"use_sliding_window": True, **WINDOW}, {"no_rope_layers": [1, 0] * 3}],
    "deepseek_v3": [{"q_lora_rank": None}, {"first_k_dense_replace": LAYERS}],
    "deepseek_v2": [{"q_lora_rank": None}],
    "gpt_neox": [{"use_parallel_residual": False}, {"rotary_pct": 1.0}],
    "falcon": [{"alibi": True}, {"new_decoder_architecture": True}, {"multi_query": False}, {"parallel_attn": False}],
    "stablelm": [{"qk_layernorm": True}, {"use_parallel_residual": True}],
    "persimmon": [{"qk_layernorm": False}],
    "opt": [{"do_layer_norm_before": False}],
    "mpt": [{"attn_config": {"alibi": False}}],
    "granite": [{"logits_scaling": 8.0}, {"residual_multiplier": 0.5, "attention_multiplier": 0.2}],
    "granitemoehybrid": [{"layer_types": ["mamba", "attention"] * 3}, {"layer_types": ["attention"] * LAYERS}],
    "lfm2": [{"layer_types": ["conv", FULL] * 3}],
    "minimax": [{"layer_types": [FULL] * LAYERS}],
    "llama4_text": [{"attention_chunk_size": 64}],
    "dots1": [{"max_window_layers": 2, **WINDOW}],
    "olmoe": [{"norm_topk_prob": True}, {"clip_qkv": 1.0}],
    "apertus": KEY_HEADS,
    "glm4": KEY_HEADS,
    "ernie4_5": [{"tie_word_embeddings": False}],
    "hunyuan_v1_dense": KEY_HEADS,
    "seed_oss": KEY_HEADS,
    "nemotron": [{"num_key_value_heads": 1}],
    "bloom": [{"apply_residual_connection_post_layernorm": True}],
}


class Variant(NamedTuple):
    family: str
    changes: dict[str, Any]

    def __str__(self) -> str:
        return "-".join([self.family, *(f"{name}={value}" for name, value in self.changes.items())])


def variants() -> list[Variant]:
    """Returns every family with its default config, and its variants from CHANGES."""
    families = [name for name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES if name not in EXCLUDED]
    return [Variant(name, changes) for name in families for changes in ({}, *CHANGES.get(name, []))]


def config_of(variant: Variant) -> PretrainedConfig:
    """Returns a config with small widths, windows of 4 tokens, and LAYERS layers if the depth can be changed."""
    fields = {**NEEDED.get(variant.family, {}), **variant.changes}
    make = CONFIG_MAPPING[variant.family]
    if variant.family not in AS_DEEP_AS_THEY_ARE:
        fields["num_hidden_layers"] = LAYERS
    return shrink(make(**fields), ALWAYS)


def build(config: PretrainedConfig) -> Any:
    """Builds the model without dropout, with random weights large enough that every visible token matters."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(copy.deepcopy(config), dtype=torch.float32)
    enlarge(model)
    return model.eval()
