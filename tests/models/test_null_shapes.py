"""What conf/model says about null values holds in every family of transformers, or the family is refused."""

import pytest
import torch
from transformers import AutoModelForCausalLM, PretrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from helpers_models import COMMON, tiny, tiny_config
from lmtrain.config.options import ScratchModelConfig
from lmtrain.errors import UserError
from lmtrain.models.build import build_model

WIDTH, HEADS = 96, 3
KNOWN = (
    *("gpt2", "llama", "mistral", "nanochat", "olmo2", "phi", "gpt_neox", "qwen2", "qwen3", "gemma", "bloom"),
    *("falcon", "opt", "ctrl"),
)
MEANING = {"intermediate_size": 4 * WIDTH, "num_key_value_heads": HEADS, "head_dim": WIDTH // HEADS}


def config_of(family: str) -> PretrainedConfig:
    own = {"hidden_size": WIDTH, "num_attention_heads": HEADS, "initializer_range": None}
    cfg = ScratchModelConfig(**{**COMMON, "name": family, "family": family, "max_position_embeddings": None, **own})
    with torch.device("meta"):
        return build_model(cfg, 64, 0, seq_len=16).config


def holds(family: str) -> bool:
    """Returns whether the family uses the values that null stands for; False if lmtrain or transformers refuses it."""
    try:
        config = config_of(family)
    except Exception:  # a family's code may raise anything
        return False
    for name, value in MEANING.items():
        assert getattr(config, name, None) in (None, value), (family, name)
    config.pad_token_id = None
    with torch.device("meta"):
        shapes = {size for p in AutoModelForCausalLM.from_config(config).parameters() for size in p.shape}
    assert 4 * WIDTH in shapes, family
    return True


@pytest.mark.parametrize("family", KNOWN)
def test_nulls_are_what_their_comments_say(family: str) -> None:
    """MLPs are 4 x hidden_size wide, there are as many key-value heads as heads, and heads are hidden / heads wide."""
    assert holds(family)


@pytest.mark.parametrize(
    ("family", "key"),
    [("qwen3_moe", "intermediate_size"), ("lfm2", "intermediate_size"), ("deepseek_v3", "head_dim")],
)
def test_a_family_with_a_shape_of_its_own_is_refused(family: str, key: str) -> None:
    with pytest.raises(UserError, match=f"model.{key}=null means"):
        config_of(family)


@pytest.mark.nightly
@pytest.mark.slow
def test_nulls_hold_or_are_refused_in_every_family() -> None:
    assert sum(holds(family) for family in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES) > 80


def test_a_mixture_without_a_width_has_no_layer_of_it() -> None:
    assert tiny("qwen3_moe").config.num_experts == 4
    with pytest.raises(UserError, match=r"model\.intermediate_size=null: the family qwen3_moe has layers"):
        tiny("qwen3_moe", extra={"mlp_only_layers": [0]})
    with pytest.raises(UserError, match=r"model\.intermediate_size=null: the family olmoe has layers, or experts"):
        tiny("olmoe", num_experts=4, num_experts_per_tok=2)
    assert tiny_config("olmoe", intermediate_size=24).intermediate_size == 24
