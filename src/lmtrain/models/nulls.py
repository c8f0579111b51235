"""What null means for the shape of a model from scratch: what conf/model says, in every family, or it is refused.

To transformers an argument that is not given means the family's own value, 8,192 or 32 heads, whatever the width.
"""

import contextlib
import copy
from collections.abc import Callable
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PretrainedConfig

from lmtrain.config.options import ScratchModelConfig
from lmtrain.errors import UserError

# What families call these keys; GPT-2's other names are in its config's own attribute_map.
ALIASES = {
    "norm_eps": ("rms_norm_eps", "layer_norm_epsilon", "layer_norm_eps"),
    "intermediate_size": (
        "intermediate_size",
        "n_inner",
        "ffn_dim",
        "decoder_ffn_dim",
        "ffn_hidden_size",
        "dff",
        "d_inner",
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
    """The values that stand for keys which are null; a mixture's intermediate_size has none: see `check_mixture`."""
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
    if cfg.intermediate_size is None:
        _check_width(cfg, config, name_of("intermediate_size"))
    return config


def _differs(config: PretrainedConfig, name: str, value: int) -> bool:
    return getattr(config, name, None) not in (None, value)


def _check_width(cfg: ScratchModelConfig, config: PretrainedConfig, name: str | None) -> None:
    """Raises UserError where the feed-forward layers' width is one that no key of `model` says."""
    if cfg.num_experts is not None:
        if name is not None and _dimensions(config) != _dimensions(config, **{name: getattr(config, name) + 8}):
            raise UserError(
                f"model.intermediate_size=null: the family {cfg.family} has layers, or experts, of that width, which "
                f"it would make {getattr(config, name)}: set model.intermediate_size"
            )
    elif cfg.family != "gpt2" and 4 * (cfg.hidden_size or 0) not in _dimensions(config):
        raise UserError(
            f"model.intermediate_size=null means {MEANING['intermediate_size']}, and the family {cfg.family} has "
            f"layers of another width: set model.intermediate_size; for a mixture of experts see model=moe_small"
        )


def _dimensions(config: PretrainedConfig, **changes: Any) -> set[int]:
    """Of all parameters of the model; of one that can't be built, as its builder will say, all there are."""
    changed = copy.deepcopy(config)
    for name, value in {"pad_token_id": None, **changes}.items():
        with contextlib.suppress(Exception):  # some check what they are given
            setattr(changed, name, value)
    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(changed)
    except Exception:  # whatever a family's code raises
        return set(range(2**20))
    return {size for p in model.parameters() for size in p.shape}
