"""What a model family can do, found on a tiny copy before a run: does lmtrain's attention give transformers' results,
does it keep packed documents apart, does a token see only what comes before it.

Reading the config doesn't tell. A decoder layer may drop the keyword that says where documents lie; a family may mix
tokens by something other than softmax attention (Mamba, linear or lightning attention, convolutions), or ask its
attention for what lmtrain's doesn't do. Each would train on, silently, with a wrong loss.
"""

from itertools import pairwise
from typing import Any, NamedTuple

import torch
from huggingface_hub.errors import StrictDataclassError
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

from lmtrain.errors import UserError
from lmtrain.models import attention
from lmtrain.models.documents import Documents

# Two rows of one length, the first of two documents; each longer than the window of the copy.
FIRST, LENGTH = 7, 18
# Settings of families that choose the keys a query sees by an index of their own; it shows in long rows only.
SPARSE = ("index_topk", "index_topk_blocks")
# Of the largest value in the hidden states. One token too many or too few moves them by 1e-2 or more of it, another
# order of sums in fp32 by 1e-6 in most families and by 3e-4 in the deepest.
TOLERANCE = 2e-3


class Support(NamedTuple):
    """What works is None, what doesn't is why: words that can follow a colon."""

    causal: str | None = None  # a token sees only those before it
    attention: str | None = None  # lmtrain's attention gives the results of the model's own
    documents: str | None = None  # and keeps packed documents apart


def set_attention(choice: str, model: PreTrainedModel, seq_len: int) -> None:
    """Puts lmtrain's attention into the model, or leaves it its own where the family needs that.

    Sets what LanguageModel and the plan read: `documents_attention`, the way to keep packed documents apart, or
    "transformers"; `own_attention_because` and `unpacked_because`, None or a reason.

    Args:
        choice: model.attention.
        seq_len: tokens per training row.

    Raises:
        UserError: tokens see those that come after them; an explicit choice that the family can't take.
    """
    name, found = type(model).__name__, support(model, seq_len)
    if found.causal is not None:
        raise UserError(
            f"{name} can't be trained to predict the next token: {found.causal} (in rows of data.seq_len={seq_len})"
        )
    if found.attention is not None and choice not in ("auto", "transformers"):
        raise UserError(f"model.attention={choice} doesn't go with {name}: {found.attention}; set it to auto")
    used = "transformers" if found.attention is not None else choice
    if used != "transformers":
        model.set_attn_implementation(attention.NAME)
        attention.mark_sliding(model)
    model.documents_attention = used
    model.own_attention_because = found.attention
    plain_rows = f"model.attention={used}" if used in ("sdpa", "transformers") else None
    model.unpacked_because = found.documents or plain_rows


def support(model: PreTrainedModel, seq_len: int) -> Support:
    """What the family of `model` can do in the layer pattern of its config: known of tested families, else tried.

    Takes half a second for a model of 48 layers; nothing is drawn from the global generators.

    Args:
        model: may be on the meta device, its weights are not looked at.
        seq_len: of the rows to train on: a window that they never fill can't go wrong.
    """
    # Code that comes with a hub model may call itself by a family's name.
    if model.config.model_type in TESTED and type(model).__module__.startswith("transformers."):
        return Support()
    try:
        with torch.no_grad(), torch.device("cpu"):
            return _try(tiny_copy(model, seq_len))
    except Exception as error:  # whatever the family's code raises about small sizes
        reason = f"a tiny copy of it could not be tried ({_words(error)})"
        return Support(attention=reason, documents=reason)


def _try(copy: PreTrainedModel) -> Support:
    ids = torch.randint(0, VOCAB, (2, LENGTH), generator=torch.Generator().manual_seed(0))
    copy.set_attn_implementation("eager")
    rows = _states(copy, ids)
    reason: str | None
    first, second = _states(copy, ids[:1, :FIRST]), _states(copy, ids[:1, FIRST:])
    if not _close(rows[:1, :FIRST], first):
        reason = "tokens see those that come after them"
        return Support(causal=reason, attention=reason, documents=reason)
    reason = _own_only(copy)
    if reason is not None:
        return Support(attention=reason, documents=reason)
    copy.set_attn_implementation(attention.NAME)
    attention.mark_sliding(copy)
    reason = _differs(copy, rows, ids)
    if reason is not None:
        return Support(attention=reason, documents=reason)
    alone = torch.cat([torch.cat([first, second], dim=1), rows[1:]])
    return Support(documents=_differs(copy, alone, ids, **packed_documents(ids)))


def _own_only(copy: PreTrainedModel) -> str | None:
    """Why lmtrain's attention isn't even tried."""
    if not copy._supports_attention_backend:
        return "transformers lets it have no attention but its own"
    config = copy.config.get_text_config()
    return "it chooses the keys to look at itself" if any(getattr(config, name, None) for name in SPARSE) else None


def packed_documents(ids: Tensor) -> dict[str, Any]:
    """position_ids and documents of the rows [2, LENGTH], the first of which holds two."""
    borders = [0, FIRST, LENGTH, 2 * LENGTH]
    positions = torch.cat([torch.arange(stop - start) for start, stop in pairwise(borders)]).view_as(ids)
    documents = Documents(torch.tensor(borders, dtype=torch.int32), len(ids), LENGTH, "slices")
    return {"position_ids": positions, "documents": documents}


def _differs(copy: PreTrainedModel, expected: Tensor, ids: Tensor, **options: Any) -> str | None:
    """Why lmtrain's attention doesn't give the `expected` hidden states [2, T, D]."""
    try:
        found = _states(copy, ids, **options)
    except UserError as error:  # of attention.py, which says what was asked for
        return str(error).split(":")[0]
    except Exception as error:
        return _words(error)
    if _close(found, expected):
        return None
    if options:
        return "it mixes tokens past its attention, or doesn't hand on where documents end"
    return "lmtrain's attention gives other results than its own: it doesn't hand on a window or a bias"


def _states(copy: PreTrainedModel, ids: Tensor, **options: Any) -> Tensor:
    return copy.base_model(input_ids=ids, use_cache=False, **options).last_hidden_state


def _close(found: Tensor, expected: Tensor) -> bool:
    return bool((found - expected).abs().max() <= TOLERANCE * expected.abs().max())


def _words(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[-1][:120]}" if lines else type(error).__name__


_NAMES = (
    "afmoe apertus arcee axk1 beam bitnet cohere cohere2 cohere2_moe ctrl cwm deepseek_v2 deepseek_v3 diffllama "
    "dots1 ernie4_5 ernie4_5_moe exaone4 exaone_moe flex_olmo flint gemma gemma2 gemma3_text gemma3n_text "
    "gemma4_text gemma4_unified_text glm glm4 glm4_moe glm4_moe_lite gpt-sw3 gpt2 gpt_bigcode gpt_neox gpt_oss "
    "granite granite_swa granitemoe granitemoe_swa granitemoeshared helium hrm_text hunyuan_v1_dense "
    "hunyuan_v1_moe hy_v3 hyperclovax internlm3 iquestcoder jais2 jetmoe kolibri1 laguna llama longcat_flash "
    "mellum mimo_v2_flash minicpm3 minimax_m2 ministral ministral3 mistral mixtral nanochat olmo olmo2 olmo3 "
    "olmoe opt persimmon phi phi3 qwen2 qwen3 qwen3_moe seed_oss smollm3 solar_open starcoder2 vaultgemma youtu"
)
TESTED = tuple(_NAMES.split())


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
