"""What null means for the shape of a model from scratch: what conf/model says, or the family is refused.

To transformers an argument that is not given means the family's own value, 8,192 or 32 heads, whatever the width.
"""

from collections.abc import Callable
from typing import Any

from transformers import PretrainedConfig

from lmtrain.config.options import ScratchModelConfig
from lmtrain.errors import UserError

# What families call these keys; GPT-2's other names are in its config's own attribute_map.
ALIASES = {
    "norm_eps": ("rms_norm_eps", "layer_norm_epsilon", "layer_norm_eps"),
    "intermediate_size": (
        *("intermediate_size", "n_inner", "ffn_dim", "decoder_ffn_dim", "ffn_hidden_size", "dff", "d_inner"),
    ),
    "hidden_act": ("hidden_act", "activation_function"),
    "rope_theta": ("rope_parameters",),
}
# Settings a family's code reads though its config class doesn't declare them.
UNDECLARED = {"qwen3_moe": ("head_dim",)}
MEANING = {
    "intermediate_size": "4 x hidden_size",
    "num_key_value_heads": "as many as query heads",
    "head_dim": "hidden_size / num_attention_heads",
}


def field_name(config: PretrainedConfig, key: str) -> str | None:
    """What this family calls `key`, None where it has no such field."""
    if key in UNDECLARED.get(config.model_type, ()):
        return key
    names = (*ALIASES.get(key, ()), key)
    return next((name for name in names if hasattr(config, name)), None)


def promised(cfg: ScratchModelConfig) -> dict[str, int]:
    """The values that stand for keys which are null; a mixture's intermediate_size has none."""
    found, width, heads = dict[str, int](), cfg.hidden_size, cfg.num_attention_heads
    if width and cfg.intermediate_size is None and cfg.num_experts is None:
        found["intermediate_size"] = 4 * width
    if heads and cfg.num_key_value_heads is None:
        found["num_key_value_heads"] = heads
    if heads and width and cfg.head_dim is None:
        found["head_dim"] = width // heads
    return found


def filled(
    cfg: ScratchModelConfig,
    given: dict[str, Any],
    make: Callable[..., PretrainedConfig],
    name_of: Callable[[str], str | None],
) -> PretrainedConfig:
    """The family's config of `given`, with what null stands for given too where the family takes another value.

    Args:
        make: the config of arguments.
        name_of: what the family calls a key; None where it has no such field.

    Raises:
        UserError: the family doesn't take it; the message names the value it has.
    """
    config = make(**given)
    wanted = {key: (name_of(key), value) for key, value in promised(cfg).items()}
    missing = {name: value for name, value in wanted.values() if name is not None and _differs(config, name, value)}
    if hasattr(config, "qk_rope_head_dim"):
        missing.pop("head_dim", None)  # of latent attention, whose heads have widths of several kinds
    if missing:
        config = make(**(given | missing))
    for key, (name, value) in wanted.items():
        if name is not None and _differs(config, name, value):
            raise UserError(
                f"model.{key}=null means {MEANING[key]}, {value} here, and the family {cfg.family} has "
                f"{getattr(config, name)} of its own: set model.{key}={getattr(config, name)}, or choose another family"
            )
    if cfg.num_experts and cfg.intermediate_size is None and name_of("moe_intermediate_size") is None:
        raise UserError(
            f"model.intermediate_size=null: it is the width of {cfg.family}'s experts, so it needs a number"
        )
    return config


def _differs(config: PretrainedConfig, name: str, value: int) -> bool:
    return getattr(config, name, None) not in (None, value)
