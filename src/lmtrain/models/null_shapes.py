"""What null means for the shape keys of a model from scratch: the same in every family, as conf/model documents it.

A family that can't follow it is refused. transformers would use the family's own default for an argument that is not
given, such as an inner width of 8,192 or 32 heads, whatever the hidden size.
"""

import contextlib
import copy
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PretrainedConfig

from lmtrain.config import safe_yaml
from lmtrain.config.options import ScratchModelConfig
from lmtrain.errors import UserError

_TABLES = safe_yaml.table(__file__, "null_shapes.yaml")
ALIASES, UNDECLARED, MEANING = (_TABLES[name] for name in ("aliases", "undeclared", "meaning"))


def field_name(config: PretrainedConfig, key: str) -> str | None:
    """Returns this family's name for `key`, or None if it has no such field."""
    if key in UNDECLARED.get(config.model_type, ()):
        return key
    names = (*ALIASES.get(key, ()), key)
    return next((name for name in names if hasattr(config, name)), None)


def promised(cfg: ScratchModelConfig) -> dict[str, int]:
    """Returns the values that null keys stand for; none for intermediate_size in a mixture, see `_check_width`."""
    found, width, heads = dict[str, int](), cfg.hidden_size, cfg.num_attention_heads
    if width and cfg.intermediate_size is None and cfg.num_experts is None:
        found["intermediate_size"] = 4 * width
    if heads and cfg.num_key_value_heads is None:
        found["num_key_value_heads"] = heads
    if heads and width and cfg.head_dim is None:
        found["head_dim"] = width // heads
    return found


def filled(cfg: ScratchModelConfig, given: dict[str, Any], known: PretrainedConfig) -> PretrainedConfig:
    """Builds the family's config from `given`, and sets the values that null stands for if its defaults differ.

    Args:
        given: arguments of the config's class.
        known: the family's config with all its defaults, which has the family's names of the keys.

    Raises:
        UserError: the family ignores such a value; the message names the value it uses instead.
    """
    config = type(known)(**given)
    wanted = {key: (field_name(known, key), value) for key, value in promised(cfg).items()}
    missing = {name: value for name, value in wanted.values() if name is not None and _differs(config, name, value)}
    if hasattr(config, "qk_rope_head_dim"):
        missing.pop("head_dim", None)  # latent attention has several head widths
    if missing:
        config = type(known)(**(given | missing))
    for key, (name, value) in wanted.items():
        if name is not None and _differs(config, name, value):
            own = getattr(config, name)
            found = f"model.{key}=null means {MEANING[key]}, {value} here, and the family {cfg.family} has its own"
            raise UserError(f"{found}: set model.{key}={own}, or choose another family")
    if cfg.intermediate_size is None:
        _check_width(cfg, config, field_name(known, "intermediate_size"))
    return config


def _differs(config: PretrainedConfig, name: str, value: int) -> bool:
    return getattr(config, name, None) not in (None, value)


def _check_width(cfg: ScratchModelConfig, config: PretrainedConfig, name: str | None) -> None:
    """Raises UserError if the family chooses a feed-forward width that no key of `model` determines."""
    if cfg.num_experts is not None:
        if name is not None and _dimensions(config) != _dimensions(config, **{name: getattr(config, name) + 8}):
            found = f"the family {cfg.family} has layers, or experts, of that width, by default {getattr(config, name)}"
            raise UserError(f"model.intermediate_size=null: {found}: set model.intermediate_size")
    elif cfg.family != "gpt2" and 4 * (cfg.hidden_size or 0) not in _dimensions(config):
        meant = f"means {MEANING['intermediate_size']}, and the family {cfg.family} has layers of another width"
        advice = "set model.intermediate_size; for a mixture of experts see model=moe_small"
        raise UserError(f"model.intermediate_size=null {meant}: {advice}")


def _dimensions(config: PretrainedConfig, **changes: Any) -> set[int]:
    """Returns all dimensions of the model's parameters.

    If the model can't be built, all sizes are returned, so that no check fails: its builder will report the error.
    """
    changed = copy.deepcopy(config)
    for name, value in {"pad_token_id": None, **changes}.items():
        with contextlib.suppress(Exception):  # some configs validate what is assigned
            setattr(changed, name, value)
    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(changed)
    except Exception:  # a family's code may raise anything
        return set(range(2**20))
    return {size for p in model.parameters() for size in p.shape}
