"""A model of a user's own class, with the config that the class names, from scratch."""

import contextlib
import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from transformers import PretrainedConfig, PreTrainedModel

from lmtrain.config.options import CustomModelConfig
from lmtrain.config.sections import config_class_of, fields_of, model_class
from lmtrain.config.targets import building
from lmtrain.errors import UserError


def custom_config(cfg: CustomModelConfig, fields: dict[str, Any], allow_target: Sequence[str]) -> PretrainedConfig:
    """The class's config: of its own options, those of `cfg` beside `_target_`.

    Args:
        fields: what lmtrain says: vocab_size and the tokens that begin and end a document.

    Raises:
        UserError: see `model_class.find`; the config class raises; it has no positions, where the config names some.
    """
    config_class = config_class_of(model_class(cfg._target_, allow_target))
    assert config_class is not None
    positions = cfg.max_position_embeddings
    if positions is not None and "max_position_embeddings" not in fields_of(config_class):
        raise UserError(
            f"model.max_position_embeddings={positions}: {config_class.__qualname__} has no such field; make it null"
        )
    general = {field.name for field in dataclasses.fields(CustomModelConfig)}
    options = {f.name: getattr(cfg, f.name) for f in dataclasses.fields(cfg) if f.name not in general}
    if positions is not None:
        options["max_position_embeddings"] = positions
    with building("model", cfg._target_):
        return config_class(**fields, **options)


def custom_model(cfg: CustomModelConfig, config: PretrainedConfig, allow_target: Sequence[str]) -> PreTrainedModel:
    """The model in fp32, as its class draws its weights; saving it writes the source of its module beside them.

    Raises:
        UserError: its class raises, or it has no body, embeddings or output layer.
    """
    cls = model_class(cfg._target_, allow_target)
    if not cls.__module__.startswith("transformers."):
        type(config).register_for_auto_class()
        cls.register_for_auto_class("AutoModelForCausalLM")
    with building("model", cfg._target_):
        model = cls._from_config(config, dtype=torch.float32)
    with contextlib.suppress(NotImplementedError):  # where transformers finds no embeddings by their usual names
        if model.base_model is not model and model.get_input_embeddings() and model.get_output_embeddings():
            return model
    raise UserError(
        f"model: {cfg._target_} needs a body, the attribute that its base_model_prefix names, with embed_tokens in it "
        f"(or get_input_embeddings), and lm_head (or get_output_embeddings), by which the loss is computed"
    )
