"""What a model class that `model._target_` names must have, and the arguments of its config. Imports it, and torch."""

import difflib
import inspect
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from lmtrain.config.models import CustomModelConfig
from lmtrain.config.targets import find_class
from lmtrain.errors import UserError

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

# Types of arguments that are checked, by how they are written.
PLAIN: dict[str, Any] = {
    "int": int, "float": float, "bool": bool, "str": str, "int | None": int | None, "float | None": float | None,
    "bool | None": bool | None, "str | None": str | None,
}  # fmt: skip
SET_BY_LMTRAIN = ("vocab_size", "max_position_embeddings", "dropout")  # from keys that every model has


def find(target: str, allow_target: Sequence[str]) -> "type[PreTrainedModel]":
    """The class that `target` names.

    Raises:
        UserError: it is not allowed, can't be imported, is no model that generates, or lacks what training needs.
    """
    from torch import nn
    from transformers import GenerationMixin, PreTrainedModel

    cls = find_class(target, "model", PreTrainedModel, allow_target)
    lacks = f"model: _target_={target} lacks"
    if cls.forward is nn.Module.forward:
        raise UserError(f"{lacks} forward(input_ids, attention_mask, position_ids, ...), which returns its logits")
    if not issubclass(cls, GenerationMixin):
        raise UserError(f"{lacks} generate, by which samples are written: derive it from GenerationMixin too")
    if not cls._no_split_modules:
        raise UserError(f'{lacks} _no_split_modules, its block classes: _no_split_modules = ["Block"]')
    config = config_class(cls)
    if config is None:
        raise UserError(f"{lacks} config_class: set it to a subclass of transformers.PretrainedConfig with its options")
    missing = [name for name in CustomModelConfig.NEEDED if name not in fields_of(config)]
    if missing:
        raise UserError(f"{lacks} {', '.join(missing)} in its config {config.__qualname__}: fields of these names")
    return cls


def config_class(cls: "type[PreTrainedModel]") -> "type[PretrainedConfig] | None":
    return getattr(cls, "config_class", None)


def fields_of(config: "type[PretrainedConfig]") -> set[str]:
    """The fields of a config class, by all the names it has for them."""
    return {*inspect.signature(config).parameters, *config.attribute_map}


def arguments_of(target: str, names: Sequence[str], allow_target: Sequence[str]) -> dict[str, Any]:
    """The type of each of these keys under `model`, which are arguments of the config class; Any where it says none.

    Raises:
        UserError: as of `find`; a key that the config class doesn't have.
    """
    from transformers import PretrainedConfig

    config = config_class(find(target, allow_target))
    assert config is not None
    general, takes = inspect.signature(PretrainedConfig).parameters, inspect.signature(config).parameters
    fields = [name for name in takes if name not in (*general, *SET_BY_LMTRAIN, "kwargs")]
    for name in names:
        if name not in fields:
            near = difflib.get_close_matches(name, fields, n=1)
            hint = f"did you mean model.{near[0]}? " if near else ""
            raise UserError(f"model.{name}: {config.__qualname__} of {target} has no such field; {hint}"
                            f"it has {', '.join(fields)}")  # fmt: skip
    types = {name: takes[name].annotation for name in names}
    return {name: PLAIN.get(getattr(type_, "__name__", str(type_)), Any) for name, type_ in types.items()}
