"""A tiny model of the same architecture: every width small, the pattern of its layers kept, random weights."""

from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

VOCAB, HIDDEN, HEADS, HEAD_DIM, INNER = 64, 32, 4, 8, 48
WINDOW = 4  # of a sliding window, so that it shows within a few tokens
# What families call their sizes, and the copy's: 4 heads of 8 make up the width of 32.
SIZES: tuple[tuple[int, str], ...] = (
    (VOCAB, "vocab_size vocab_size_per_layer_input unpadded_vocab_size decoder_vocab_size"),
    (HIDDEN, "hidden_size d_model n_embd embedding_dim embedding_size word_embed_proj_dim emb_dim"),
    (HIDDEN, "lru_width input_embedding_size output_embedding_size mamba_d_ssm"),
    (HEADS, "num_attention_heads n_head n_heads num_heads attention_heads decoder_attention_heads mamba_num_heads"),
    (HEADS, "encoder_attention_heads num_encoder_attention_heads num_decoder_attention_heads mamba_n_heads"),
    (HEADS, "swa_num_attention_heads linear_num_value_heads linear_num_heads index_n_heads"),
    (HEAD_DIM, "head_dim swa_head_dim linear_key_head_dim linear_value_head_dim linear_head_dim global_head_dim"),
    (HEAD_DIM, "kv_channels d_head dim_head attention_head_size mamba_d_head mamba_head_dim"),
    (HEAD_DIM, "v_head_dim qk_head_dim mamba_headdim hidden_size_per_layer_input laurel_rank d_rel swa_v_head_dim"),
    (HEAD_DIM // 2, "qk_rope_head_dim qk_nope_head_dim rotary_dim"),
    (2 * HEAD_DIM, "q_lora_rank kv_lora_rank o_lora_rank router_hidden_size hc_lowrank index_head_dim"),
    (2 * HEAD_DIM, "ssm_state_size state_size mamba_d_state time_step_rank mamba_dt_rank gated_norm_rank adapter_rank"),
    (2 * HEAD_DIM, "chunk_size mamba_chunk_size floor_scale"),
    (4, "num_experts n_routed_experts num_local_experts moe_num_experts"),
    (2, "zero_expert_num linear_num_key_heads o_groups hc_mult hc_count"),
    (1, "n_group topk_group num_expert_group n_groups mamba_n_groups mamba_ngroups expand mamba_expand n_mamba_heads"),
    (INNER, "intermediate_size n_inner decoder_ffn_dim encoder_ffn_dim ffn_dim dff dim_ff d_inner ffn_hidden_size"),
    (INNER, "moe_intermediate_size shared_expert_intermediate_size expert_ffn_hidden_size shared_intermediate_size"),
    (INNER, "shared_experts_intermediate_size intermediate_size_mlp moe_shared_expert_intermediate_size"),
    (INNER, "dense_intermediate_size feed_forward_size"),
    (256, "max_position_embeddings n_positions n_ctx max_seq_len context_length"),
)
SIZE_OF = {name: size for size, names in SIZES for name in names.split()}
CHOSEN_EXPERTS = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k", "top_k_experts")
KEY_HEADS = ("num_key_value_heads", "num_kv_heads", "swa_num_key_value_heads", "num_global_key_value_heads")
WINDOWS = (
    "sliding_window",
    "attention_window_size",
    "window_size",
    "local_attention",
    "sliding_window_size",
    "attention_chunk_size",
    "keep_window_size",
)


def shrink(config: PretrainedConfig, seq_len: int) -> PretrainedConfig:
    """`config` with small widths and as many layers; a window stays one that rows of seq_len tokens exceed, or not."""
    fields = config.to_dict()
    for name in ("quantization_config", "dtype", "torch_dtype"):
        fields.pop(name, None)
    small = _shrunk(fields, seq_len)
    try:
        return type(config).from_dict(small | {"pad_token_id": None})
    except StrictDataclassError:  # where it has to be a number
        return type(config).from_dict(small | {"pad_token_id": 0})


def _shrunk(fields: dict[str, Any], seq_len: int) -> dict[str, Any]:
    small = dict(fields)
    for name, value in fields.items():
        if isinstance(value, dict) and name.endswith("_config"):
            small[name] = _shrunk(value, seq_len)
        elif name in SIZE_OF:
            small[name] = _sized(value, SIZE_OF[name])
        elif name in CHOSEN_EXPERTS:
            small[name] = _sized(value, min(value or 2, 2))
        elif name in WINDOWS and _is_number(value):
            small[name] = WINDOW if value < seq_len else 2 * SIZE_OF["max_position_embeddings"]
        elif name in ("bos_token_id", "eos_token_id", "pad_token_id") and _is_number(value):
            small[name] = 0
    return small | _dependent(fields)


def _dependent(fields: dict[str, Any]) -> dict[str, Any]:
    """Sizes that stand in a relation to others."""
    small: dict[str, Any] = {}
    heads = next((fields[name] for name in ("num_attention_heads", "n_head") if _is_number(fields.get(name))), 0)
    for name in KEY_HEADS:
        if _is_number(fields.get(name)):
            small[name] = HEADS if fields[name] >= heads else 1 if fields[name] == 1 else HEADS // 2
    if _is_number(fields.get("attention_hidden_size")):  # of Zamba's attention: twice the width
        times = max(1, fields["attention_hidden_size"] // fields["hidden_size"])
        small |= {"attention_hidden_size": times * HIDDEN, "attention_head_dim": times * HEAD_DIM}
    if "mamba_headdim" in fields:  # Zamba 2
        small["n_mamba_heads"] = HEADS
    if _is_number(fields.get("qk_rope_head_dim")) and fields.get("head_dim") == fields["qk_rope_head_dim"]:
        small["head_dim"] = SIZE_OF["qk_rope_head_dim"]
    return small


def _sized(value: Any, size: int) -> Any:
    """The size, or a list of it where layers have their own; None stays."""
    if isinstance(value, list | tuple):
        return [_sized(item, size) for item in value]
    return size if _is_number(value) else value


def _is_number(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def tiny_copy(model: PreTrainedModel, seq_len: int) -> PreTrainedModel:
    """A model of the class and architecture of `model`, some 64 tokens and 32 wide, on the CPU in fp32, for evaluation.

    Draws nothing from the global generators. Whatever the family's code raises about the small sizes comes through.

    Args:
        seq_len: of the rows to train on; a sliding window that they never fill is not made small.
    """
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        torch.manual_seed(0)
        small = type(model)._from_config(shrink(model.config, seq_len), dtype=torch.float32)
        enlarge(small)
    return small.eval()


@torch.no_grad()
def enlarge(model: nn.Module) -> None:
    """Random matrices large enough that what a token sees shows in its output."""
    for parameter in model.parameters():
        if parameter.ndim >= 2:
            parameter.normal_(0.0, parameter.shape[-1] ** -0.5)
