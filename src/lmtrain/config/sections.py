"""Chooses the dataclass that types each section of the config, by its name or the class that `_target_` names.

The dataclasses of lmtrain's own classes are found without importing these classes; any other class is imported and
declares its own.
"""

import dataclasses
import difflib
import functools
import inspect
from collections.abc import Mapping, Sequence
from types import NoneType, UnionType
from typing import TYPE_CHECKING, Annotated, Any, TypeVar, get_args, get_origin

from omegaconf import DictConfig, ListConfig

from lmtrain.config.constraints import MODEL, NUMBERS, TRAJECTORY, choice
from lmtrain.config.keys import Key, declared, keys_of
from lmtrain.config.options import MODELS, OBJECTIVES, OPTIMIZERS, SCHEDULES, CustomModelConfig
from lmtrain.config.schema import Config, ModelConfig, ObjectiveConfig, OptimizerConfig, ScheduleConfig
from lmtrain.config.targets import check_allowed, class_named, find_class
from lmtrain.errors import UserError
from lmtrain.terminal import a_or_an

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

T = TypeVar("T")
Tree = Mapping[Any, Any]  # of OmegaConf's containers, or of plain ones

# Removed keys, which only a config.yaml of an earlier version may still have, and what those that shaped a run are now.
GONE: dict[str, Any] = {
    **dict.fromkeys(("optimizer.fused", "data.ranking", "data.batch_warmup.lr_scaling")),
    **dict.fromkeys(f"data.curriculum.{key}" for key in ("score", "buckets", "model")),
    **dict.fromkeys(f"callbacks.ema.{key}" for key in ("update_every_n_steps", "update_starting_at_step")),
    **dict.fromkeys(("callbacks.progress.plain_every_seconds", "estimate.headroom", "sweep.startup_trials")),
    **dict.fromkeys(("trainer.float32_matmul_precision", "trainer.spike_factor", "trainer.spike_window")),
    **dict.fromkeys(("tune.diverged", "tune.smoothing", "inspect.text")),
    "objective.engine": "in_process", "objective.loss_chunk_tokens": "auto",
    "objective.neftune_alpha": 0.0, "objective.z_loss": 0.0, "objective.label_smoothing": 0.0,
    "optimizer.nesterov": True, "optimizer.ns_steps": 5,
    "optimizer.beta2_decay": -0.8, "optimizer.eps": 1e-30, "optimizer.clip_threshold": 1.0,
}  # fmt: skip


def classes(tree: Tree) -> dict[str, type[Any]]:
    """Returns the dataclass of each section of `tree` that is typed by its content rather than by the schema.

    Raises:
        UserError: a `_target_` is not allowed, can't be imported, or is not of the kind that its section needs.
    """
    choose = {"objective": _objective, "model": _model, "optimizer": _optimizer, "schedule": _schedule}
    allowed = _allowed(tree)
    return {name: of(tree[name], allowed) for name, of in choose.items() if isinstance(tree.get(name), Mapping)}


@functools.cache
def _members(kind: Any) -> dict[type[Any], tuple[Any, ...]]:
    """Maps each type that the value of a key may have to the type of what it holds, if it is a list or mapping."""
    plain = (bool, int, float, str, NoneType, list[Any], dict[str, Any])
    kinds = plain if kind is Any else get_args(kind) if isinstance(kind, UnionType) else (kind,)
    return {get_origin(one) or one: get_args(one)[-1:] for one in kinds}


def typed(kind: Any, value: Any, sections: Mapping[str, type[Any]] = {}) -> Any:
    """Returns a copy of plain values of a section or key whose types are those of `kind`, a tenth of OmegaConf's time.

    Args:
        kind: the dataclass of the section, or the type of the key.
        sections: the dataclasses of sections in it that have others than `kind` says.

    Raises:
        KeyError, OverflowError, TypeError: OmegaConf has to convert a value, or to say why it is refused.
    """
    found = type(value)
    if found is dict and dataclasses.is_dataclass(kind):
        types = {**{name: type_ for name, (type_, *_) in declared(kind).items()}, **sections}  # type: ignore[arg-type]
        return kind(**{name: typed(types[name], inner) for name, inner in value.items()})  # type: ignore[operator]
    members = _members(kind)
    if found is int and found not in members:
        found, value = float, float(value)
    of = members[found]
    if value == "???":  # OmegaConf's sign for a value that has to be set
        raise KeyError(value)
    if found is list:
        return [typed(of[0], one) for one in value]
    return {typed(str, name): typed(of[0], one) for name, one in value.items()} if found is dict else value


def names_of(found: dict[str, type[Any]]) -> list[str]:
    """Returns all dotted keys, including those of sections, of a config with these dataclasses as sections."""
    leaves = [key.name for key in keys_of(Config) if key.name.split(".")[0] not in found]
    leaves += [key.name for section, options in found.items() for key in keys_of(options, f"{section}.")]  # type: ignore[arg-type]
    nodes = [".".join(name.split(".")[:n]) for name in leaves for n in range(1, name.count(".") + 1)]
    return list(dict.fromkeys([*nodes, *leaves]))


@functools.cache
def all_keys() -> tuple[Key, ...]:
    """Returns the keys of the schema and of all of lmtrain's own objectives, models, optimizers and schedules."""
    own = [key for _, options in OBJECTIVES.values() for key in keys_of(options, "objective.")]  # type: ignore[arg-type]
    sections = {"model": (*MODELS.values(), CustomModelConfig), "optimizer": OPTIMIZERS.values(),
                "schedule": SCHEDULES.values()}  # fmt: skip
    own += [key for name, classes in sections.items() for options in classes for key in keys_of(options, f"{name}.")]
    return tuple({key.name: key for key in (*own, *keys_of(Config))}.values())


@functools.cache
def text_keys() -> frozenset[str]:
    """Returns those of `all_keys` whose values are text, however much the text looks like a number."""
    return frozenset(key.name for key in all_keys() if key.is_text)


def rows_trained_on(tree: DictConfig) -> str:
    """Returns the kind of rows that the objective of a composed config trains on; see ObjectiveConfig.rows.

    Raises:
        UserError: as `classes`.
    """
    own = OBJECTIVES.get(str(tree.objective.get("name")))
    return (own[1] if own else _objective(tree.objective, _allowed(tree))).rows


def _allowed(tree: Tree) -> list[str]:
    run = tree.get("run")
    allowed = run.get("allow_target") if isinstance(run, Mapping) else None
    return [str(package) for package in allowed] if isinstance(allowed, list | ListConfig) else []


def _objective(section: Tree, allow_target: list[str]) -> type[ObjectiveConfig]:
    _check_given("objective", section)
    name, target = section.get("name"), str(section["_target_"])
    if name in OBJECTIVES and OBJECTIVES[name][0] != target:
        found = f"objective.name={name} stands for {OBJECTIVES[name][0]}, and objective._target_ is {target}"
        raise UserError(f"{found}: choose objective={name}, or objective=custom objective._target_={target}")
    own = next((options for path, options in OBJECTIVES.values() if path == target), None)
    return own or options_beside(target, "objective", ObjectiveConfig, allow_target)


def _model(section: Tree, allow_target: list[str]) -> type[ModelConfig]:
    """Returns the dataclass of `model`; with a `_target_` it has the typed arguments of the class's config as well."""
    init = section.get("init")
    if "_target_" not in section:
        choice(*MODELS)("model.init", str(init))
        return MODELS[str(init)]
    _check_given("model", section)
    if init != "scratch":
        instead = "model=pretrained model.name_or_path=<the export> model.trust_remote_code=true"
        raise UserError(f"model.init={init}: a model._target_ starts from scratch; to train its export on: {instead}")
    types = model_arguments(str(section["_target_"]), _own_arguments(section, CustomModelConfig), allow_target)
    declared = [(name, Annotated[type_, MODEL]) for name, type_ in types.items()]
    return dataclasses.make_dataclass("CustomModel", declared, bases=(CustomModelConfig,), kw_only=True)


def _optimizer(section: Tree, allow_target: list[str]) -> type[OptimizerConfig]:
    """Returns the dataclass of `optimizer`; arguments of a custom class are checked only when it is built."""
    if "_target_" not in section:
        return _named("optimizer", section, OPTIMIZERS)
    _check_given("optimizer", section)
    check_allowed("optimizer", section["_target_"], allow_target)
    arguments = _own_arguments(section, OptimizerConfig)
    wrong = [name for name in arguments if not name.isidentifier()]
    if wrong:
        raise UserError(f"optimizer.{wrong[0]}: no argument of a class can have this name")
    declared = [(name, Annotated[Any, TRAJECTORY, NUMBERS]) for name in arguments]
    return dataclasses.make_dataclass("CustomOptimizer", declared, bases=(OptimizerConfig,), kw_only=True)


def _schedule(section: Tree, allow_target: list[str]) -> type[ScheduleConfig]:
    if "_target_" not in section:
        return _named("schedule", section, SCHEDULES)
    _check_given("schedule", section)
    return options_beside(section["_target_"], "schedule", ScheduleConfig, allow_target)


def _check_given(name: str, section: Tree) -> None:
    if section.get("_target_") is None:
        raise UserError(f"{name}._target_ has no value: set {name}._target_=<package.module.Class>")


def _own_arguments(section: Tree, base: type[Any]) -> list[str]:
    """Returns the keys of a section with a `_target_` that are no keys of `base`: arguments of the class itself."""
    known = {field.name for field in dataclasses.fields(base)}
    return [str(name) for name in section if name not in known]


def _named(group: str, section: Tree, own: dict[str, type[T]]) -> type[T]:
    """Returns the dataclass for the section's `name`.

    Raises:
        UserError: the name is unknown, or only `name` was changed, so that keys of this option are missing.
    """
    name = str(section.get("name"))
    if name not in own:
        choice(*own, "custom")(f"{group}.name", name)
        raise UserError(f"{group}._target_ has no value: choose {group}=custom")
    for field in dataclasses.fields(own[name]):  # type: ignore[arg-type]
        if field.default is dataclasses.MISSING and field.name not in section:
            key = f"{group}.{field.name}"
            raise UserError(f"{group}.name={name} needs {key}: choose {group}={name}, or set {key}=...")
    return own[name]


def options_beside(target: str, section: str, base: type[Any], allow_target: list[str]) -> type[Any]:
    """Returns the `Options` of a class: a dataclass derived from `base`, with fields declared as in the schema.

    Raises:
        UserError: there is no such class, or its `Options` are missing or not such a dataclass.
    """
    options = getattr(class_named(target, section, allow_target), "Options", None)
    if not isinstance(options, type) or not issubclass(options, base):
        lacks = f"it has no Options, a dataclass derived from {base.__module__}.{base.__qualname__}"
        raise UserError(f"{section}: _target_={target} is not {a_or_an(section)}: {lacks}")
    try:
        keys_of(options, f"{section}.")
    except TypeError as error:
        raise UserError(f"{section}: the Options of {target}: {error}") from None
    return options


# Types of model arguments that are checked, by their spelling in annotations; any other type accepts every value.
PLAIN: dict[str, Any] = {
    "int": int, "float": float, "bool": bool, "str": str, "int | None": int | None, "float | None": float | None,
    "bool | None": bool | None, "str | None": str | None,
}  # fmt: skip
SET_BY_LMTRAIN = ("vocab_size", "max_position_embeddings", "dropout")  # derived from keys that every model has


def model_class(target: str, allow_target: Sequence[str]) -> "type[PreTrainedModel]":
    """Returns the model class that `target` names.

    Raises:
        UserError: it is not allowed, can't be imported, can't generate text, or lacks something that training needs.
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
    config = cls.config_class
    if config is None:
        raise UserError(f"{lacks} config_class: set it to a subclass of transformers.PretrainedConfig with its options")
    missing = [name for name in CustomModelConfig.NEEDED if name not in fields_of(config)]
    if missing:
        raise UserError(f"{lacks} {', '.join(missing)} in its config {config.__qualname__}: fields of these names")
    return cls


def fields_of(config: "type[PretrainedConfig]") -> set[str]:
    """Returns the names of a config class's fields, including the aliases in its attribute_map."""
    return {*inspect.signature(config).parameters, *config.attribute_map}


def model_arguments(target: str, names: Sequence[str], allow_target: Sequence[str]) -> dict[str, Any]:
    """Returns the type of each of these keys of `model`, arguments of its config class; Any if it is not in PLAIN.

    Raises:
        UserError: as `model_class`; or the config class has no such field.
    """
    from transformers import PretrainedConfig

    config = model_class(target, allow_target).config_class
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
