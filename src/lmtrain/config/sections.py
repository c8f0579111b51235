"""Which dataclass types a section of the config: the options of the class that its `_target_` names.

Those of lmtrain's own classes are found without importing them; of any other class, the class itself says.
"""

import dataclasses
import functools
from typing import Annotated, Any, TypeVar

from omegaconf import DictConfig, OmegaConf

from lmtrain.config import model_class, models, optimizers, schedule
from lmtrain.config.constraints import MODEL, TRAJECTORY, choice
from lmtrain.config.keys import Key, keys_of
from lmtrain.config.objectives import OWN
from lmtrain.config.schema import Config, ModelConfig, ObjectiveConfig, OptimizerConfig, ScheduleConfig
from lmtrain.config.targets import check_allowed, class_named
from lmtrain.errors import UserError

T = TypeVar("T")

# Keys that only a config.yaml of an earlier version may still have.
GONE = ("optimizer.fused", "data.curriculum.score", "data.curriculum.buckets", "data.curriculum.model")


def classes(tree: DictConfig) -> dict[str, type[Any]]:
    """The class of each section of `tree` that is not the schema's own.

    Raises:
        UserError: a `_target_` that is not allowed, can't be imported, or is nothing of its section's kind.
    """
    choose = {"objective": _objective, "model": _model, "optimizer": _optimizer, "schedule": _schedule}
    present = {name: tree.get(name) for name in choose}
    return {
        name: choose[name](section, _allowed(tree)) for name, section in present.items()
        if isinstance(section, DictConfig)
    }  # fmt: skip


def schema_of(found: dict[str, type[Any]]) -> DictConfig:
    """The structured config with these classes of sections."""
    schema = OmegaConf.structured(Config)
    for section, options in found.items():
        schema[section] = OmegaConf.structured(options)
    return schema


def names_of(found: dict[str, type[Any]]) -> list[str]:
    """All dotted keys of a config with these classes of sections, sections included."""
    leaves = [key.name for key in keys_of(Config) if key.name.split(".")[0] not in found]
    leaves += [key.name for section, options in found.items() for key in keys_of(options, f"{section}.")]  # type: ignore[arg-type]
    nodes = [".".join(name.split(".")[:n]) for name in leaves for n in range(1, name.count(".") + 1)]
    return list(dict.fromkeys([*nodes, *leaves]))


@functools.cache
def all_keys() -> tuple[Key, ...]:
    """The keys of the schema with those of all of lmtrain's own classes."""
    own = [key for _, options in OWN.values() for key in keys_of(options, "objective.")]  # type: ignore[arg-type]
    sections = {"model": (*models.OWN.values(), models.CustomModelConfig), "optimizer": optimizers.OWN.values(),
                "schedule": schedule.OWN.values()}  # fmt: skip
    own += [key for name, classes in sections.items() for options in classes for key in keys_of(options, f"{name}.")]
    return tuple({key.name: key for key in (*own, *keys_of(Config))}.values())


def _allowed(tree: DictConfig) -> list[str]:
    allowed = OmegaConf.select(tree, "run.allow_target")
    return [str(package) for package in allowed] if OmegaConf.is_list(allowed) else []


def _objective(section: DictConfig, allow_target: list[str]) -> type[ObjectiveConfig]:
    _check_given("objective", section)
    name, target = section.get("name"), str(section["_target_"])
    if name in OWN and OWN[name][0] != target:
        raise UserError(
            f"objective.name={name} stands for {OWN[name][0]}, and objective._target_ is {target}: choose "
            f"objective={name}, or objective=custom objective._target_={target}"
        )
    own = next((options for path, options in OWN.values() if path == target), None)
    return own or options_beside(str(target), "objective", ObjectiveConfig, allow_target)


def _model(section: DictConfig, allow_target: list[str]) -> type[ModelConfig]:
    """The keys of any model and, of a class that `_target_` names, those of its config class."""
    init = section.get("init")
    if "_target_" not in section:
        choice(*models.OWN)("model.init", str(init))
        return models.OWN[str(init)]
    _check_given("model", section)
    if init != "scratch":
        raise UserError(
            f"model.init={init}: a class that model._target_ names starts from scratch; to train its export on: "
            f"model=pretrained model.name_or_path=<the export> model.trust_remote_code=true"
        )
    known = {field.name for field in dataclasses.fields(models.CustomModelConfig)}
    arguments = [str(name) for name in section if name not in known]
    types = model_class.arguments_of(str(section["_target_"]), arguments, allow_target)
    declared = [(name, Annotated[type_, MODEL]) for name, type_ in types.items()]
    return dataclasses.make_dataclass("CustomModel", declared, bases=(models.CustomModelConfig,), kw_only=True)


def _optimizer(section: DictConfig, allow_target: list[str]) -> type[OptimizerConfig]:
    """The keys of any optimizer and the arguments of this one, which its class checks when it is built."""
    if "_target_" not in section:
        return _named("optimizer", section, optimizers.OWN)
    _check_given("optimizer", section)
    check_allowed("optimizer", section["_target_"], allow_target)
    known = {field.name for field in dataclasses.fields(OptimizerConfig)}
    arguments = [str(name) for name in section if name not in known]
    wrong = [name for name in arguments if not name.isidentifier()]
    if wrong:
        raise UserError(f"optimizer.{wrong[0]}: no argument of a class can have this name")
    declared = [(name, Annotated[Any, TRAJECTORY]) for name in arguments]
    return dataclasses.make_dataclass("CustomOptimizer", declared, bases=(OptimizerConfig,), kw_only=True)


def _schedule(section: DictConfig, allow_target: list[str]) -> type[ScheduleConfig]:
    if "_target_" not in section:
        return _named("schedule", section, schedule.OWN)
    _check_given("schedule", section)
    return options_beside(section["_target_"], "schedule", ScheduleConfig, allow_target)


def _check_given(name: str, section: DictConfig) -> None:
    if section.get("_target_") is None:
        raise UserError(f"{name}._target_ has no value: set {name}._target_=<package.module.Class>")


def _named(group: str, section: DictConfig, own: dict[str, type[T]]) -> type[T]:
    """The class that `name` stands for; UserError where the section has another's keys, as `name` alone was changed."""
    name = str(section.get("name"))
    if name not in own:
        choice(*own, "custom")(f"{group}.name", name)
        raise UserError(f"{group}._target_ has no value: choose {group}=custom")
    takes = {options: {f.name for f in dataclasses.fields(options)} for options in own.values()}  # type: ignore[arg-type]
    for key in map(str, section):
        having = [f"{group}={other}" for other, options in own.items() if key in takes[options]]
        if having and key not in takes[own[name]]:
            raise UserError(f"{group}.{key} has no meaning with {group}={name}; it belongs to {', '.join(having)}")
    needed = [f.name for f in dataclasses.fields(own[name]) if f.default is dataclasses.MISSING]  # type: ignore[arg-type]
    for key in needed:
        if key not in section:
            raise UserError(f"{group}.name={name} needs {group}.{key}: choose {group}={name}, or set {group}.{key}=...")
    return own[name]


def options_beside(target: str, section: str, base: type[Any], allow_target: list[str]) -> type[Any]:
    """The `Options` of a class: a dataclass derived from `base`, whose fields are declared as those of the schema.

    Raises:
        UserError: there is no such class, or what it has is none.
    """
    options = getattr(class_named(target, section, allow_target), "Options", None)
    if not isinstance(options, type) or not issubclass(options, base):
        raise UserError(
            f"{section}: _target_={target} is no {section}: it has no Options, a dataclass derived from "
            f"{base.__module__}.{base.__qualname__}"
        )
    try:
        keys_of(options, f"{section}.")
    except TypeError as error:
        raise UserError(f"{section}: the Options of {target}: {error}") from None
    return options


def complete(tree: DictConfig) -> None:
    """Adds the keys that a config.yaml of an earlier version doesn't have and others tell; takes out those it had."""
    objective, data = tree.get("objective"), tree.get("data")
    if isinstance(objective, DictConfig) and "_target_" not in objective and objective.get("name") in OWN:
        objective["_target_"] = OWN[objective.name][0]
    for key in GONE:
        section, _, name = key.rpartition(".")
        holder = OmegaConf.select(tree, section)
        if isinstance(holder, DictConfig) and "_target_" not in holder:
            holder.pop(name, None)
    if isinstance(data, DictConfig) and "rows" not in data:
        is_text, is_chat = data.get("conversation_format") is None, data.get("ranking") is None
        data["rows"] = "text" if is_text else "conversations" if is_chat else "pairs"
