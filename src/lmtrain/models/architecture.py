"""The transformers config of a model, from the config section `model`: a family's shape, a custom class, or pretrained.

What `model` sets goes into the config under the family's own names; a key that it doesn't know is refused.
"""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from transformers import CONFIG_MAPPING, AutoConfig, PretrainedConfig
from transformers.activations import ACT2FN
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from lmtrain.config.batch import nearest_divisor
from lmtrain.config.checks import check_pretrained_name
from lmtrain.config.options import CustomModelConfig, LoadedModelConfig, ScratchModelConfig
from lmtrain.config.schema import ModelConfig
from lmtrain.config.sections import fields_of, model_class
from lmtrain.config.targets import building
from lmtrain.errors import UserError, did_you_mean
from lmtrain.models.folder import base_config, is_exported
from lmtrain.models.loading import from_hub
from lmtrain.models.null_shapes import field_name, filled
from lmtrain.models.probe import DROPOUTS, last_line
from lmtrain.models.wrapper import is_wrapper, outermost, text_config

MAX_POSITIONS = "max_position_embeddings"
# Keys of `model` that are handled separately, and those that go into the transformers config by the family's name.
_GENERAL = {"family", "depth", *(f.name for f in dataclasses.fields(ModelConfig))}
SHAPE_KEYS = (*(f.name for f in dataclasses.fields(ScratchModelConfig) if f.name not in _GENERAL), MAX_POSITIONS)


def architecture(
    cfg: ModelConfig, vocab_size: int, eos_token_id: int | None, allow_target: Sequence[str]
) -> PretrainedConfig:
    """Returns the transformers config of the model that `cfg` describes; arguments and errors as of `build_model`."""
    if isinstance(cfg, LoadedModelConfig):
        return _pretrained_config(cfg)
    rows = cfg.vocab_size or vocab_size
    given: dict[str, Any] = {
        "vocab_size": -(-rows // cfg.vocab_multiple_of) * cfg.vocab_multiple_of,
        "bos_token_id": eos_token_id,
        "eos_token_id": eos_token_id,
        "use_cache": True,  # for generation with the export; training passes False
    }
    if isinstance(cfg, ScratchModelConfig):
        return _scratch_config(cfg, given)
    assert isinstance(cfg, CustomModelConfig)
    config = _custom_config(cfg, given, allow_target)
    if cfg.dropout and not any(hasattr(config, name) for name in DROPOUTS):
        raise UserError(f"model.dropout={cfg.dropout}: {type(config).__qualname__} has no field dropout")
    config.update(_free_fields(cfg, config))
    return config


def _scratch_config(cfg: ScratchModelConfig, given: dict[str, Any]) -> PretrainedConfig:
    family = str(cfg.family)
    if family not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        hint = did_you_mean(family, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, most=3)
        raise UserError(f"model.family={family} is no causal language model of transformers{hint} (gpt2, llama, ...)")
    _check_shape(cfg)
    known = CONFIG_MAPPING[family]()
    if is_wrapper(known):
        text = text_config(known).model_type
        raise UserError(f"model.family={family} reads more than text: its language model is model.family={text}")
    for key in SHAPE_KEYS:
        value = getattr(cfg, key)
        if value is not None:
            name = field_name(known, key)
            if name is None:
                raise UserError(f"model.{key}={value}: the family {family} has no such setting; make it null")
            given[name] = {"rope_type": "default", "rope_theta": value} if key == "rope_theta" else value
    given |= _free_fields(cfg, known)
    pattern = given.get("layer_types")
    if isinstance(pattern, list) and pattern and cfg.num_hidden_layers:
        first = max(0, len(pattern) - cfg.num_hidden_layers)  # a single layer takes the last entry, which attends
        given["layer_types"] = [pattern[(first + i) % len(pattern)] for i in range(cfg.num_hidden_layers)]
    try:
        return filled(cfg, given, known)
    except UserError:
        raise
    except Exception as error:  # transformers' configs validate themselves, with various exceptions
        raise UserError(f"model.family={family} refuses this shape: {last_line(error)}") from error


def _custom_config(cfg: CustomModelConfig, fields: dict[str, Any], allow_target: Sequence[str]) -> PretrainedConfig:
    """Builds the config of the class `_target_` from the class's own options in `cfg`.

    Args:
        fields: values set by lmtrain: vocab_size, use_cache and the tokens that begin and end a document.

    Raises:
        UserError: see `model_class`; the config class raises an error, or `cfg` sets max_position_embeddings and the
            class has no such field.
    """
    config_class = model_class(cfg._target_, allow_target).config_class
    positions = cfg.max_position_embeddings
    if positions is not None and MAX_POSITIONS not in fields_of(config_class):
        name = config_class.__qualname__
        raise UserError(f"model.{MAX_POSITIONS}={positions}: {name} has no such field; make it null")
    general = {field.name for field in dataclasses.fields(CustomModelConfig)}
    options = {f.name: getattr(cfg, f.name) for f in dataclasses.fields(cfg) if f.name not in general}
    if positions is not None:
        options[MAX_POSITIONS] = positions
    with building("model", cfg._target_):
        return config_class(**fields, **options)


def _free_fields(cfg: ModelConfig, config: PretrainedConfig) -> dict[str, Any]:
    """Returns values for those fields of `config` that are dropouts, and for those that model.extra names."""
    for name in cfg.extra:
        if name.startswith("_") or not hasattr(config, name):  # a private one may name a kernel to download
            hint = did_you_mean(name, config.to_dict())
            raise UserError(f"model.extra.{name}: {type(config).__name__} of transformers has no such field{hint}")
    return {name: cfg.dropout for name in DROPOUTS if hasattr(config, name)} | cfg.extra


def _check_shape(cfg: ScratchModelConfig) -> None:
    for key in (*SHAPE_KEYS, "vocab_size"):
        value = getattr(cfg, key)
        if isinstance(value, int) and not isinstance(value, bool) and value < 1:
            raise UserError(f"model.{key}={value}: at least 1 is needed")
    if cfg.hidden_act is not None and cfg.hidden_act not in ACT2FN:
        hint = did_you_mean(cfg.hidden_act, ACT2FN, most=3) or "; did you mean gelu?"
        raise UserError(f"model.hidden_act={cfg.hidden_act} is not known{hint}")
    width, heads, groups = cfg.hidden_size, cfg.num_attention_heads, cfg.num_key_value_heads
    if width and heads and cfg.head_dim is None and width % heads:
        fits = f"model.num_attention_heads={nearest_divisor(width, heads)}"
        found = f"model.hidden_size={width} does not divide into model.num_attention_heads={heads}"
        raise UserError(f"{found}: set {fits} or model.hidden_size={heads * max(1, round(width / heads))}")
    if heads and groups and heads % groups:
        found = f"model.num_attention_heads={heads} is not a multiple of model.num_key_value_heads={groups}"
        raise UserError(f"{found}: set model.num_key_value_heads to a divisor of {heads}")
    experts, chosen = cfg.num_experts, cfg.num_experts_per_tok
    if experts and chosen and chosen > experts:
        raise UserError(f"model.num_experts_per_tok={chosen} of model.num_experts={experts}: lower the first")


def _pretrained_config(cfg: LoadedModelConfig) -> PretrainedConfig:
    check_pretrained_name(cfg.init, cfg.name_or_path)
    if cfg.max_position_embeddings is not None:
        own = f"{cfg.name_or_path} has its own; make it null"
        raise UserError(f"model.{MAX_POSITIONS}={cfg.max_position_embeddings}: {own}")
    here = Path(str(cfg.name_or_path))
    config = base_config(here) if is_exported(here) else from_hub(AutoConfig.from_pretrained, cfg)
    outermost(config, scalar_head=False)
    text = text_config(config)
    text.update(_free_fields(cfg, text))
    if cfg.router_aux_loss_coef is not None:
        text.router_aux_loss_coef = cfg.router_aux_loss_coef
    return config
