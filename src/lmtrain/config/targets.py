"""Builds every object that the config names by `_target_`: finds the class, checks it, and only then calls it.

`_target_` could name anything that can be imported, so a config from an untrusted source could run any code. A target
may be built only if, after all interpolations have been resolved:

- its module is in one of PLACES or in a package listed in run.allow_target; no other module is imported to find it;
- it is a class defined there, not one imported from elsewhere, and not a function; only a reward may be a function, one
  that is defined at the top of a module of a package in run.allow_target;
- it is of the kind that the key needs: a Callback, a Metric, an Optimizer, a class with a source's members, ...;
- its arguments are plain values, passed on unchanged, or nested targets: modules, metrics and callbacks by the same
  rules, and any class of a package in run.allow_target.

Nothing is constructed before everything has passed these checks. Imports no torch until a target is looked up.
"""

import contextlib
import importlib
import importlib.machinery
import importlib.util
import inspect
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import FunctionType, ModuleType
from typing import Any, TypeVar

from lmtrain.config.keys import flat
from lmtrain.errors import RunError, UserError, did_you_mean
from lmtrain.terminal import a_or_an

KNOWN = ("lmtrain", "torch", "lightning", "transformers", "torchmetrics", "peft")  # allowed without run.allow_target
# The modules of these packages whose classes may be named; other modules of them are not even imported.
PLACES = (
    "lmtrain.callbacks", "lmtrain.data", "lmtrain.objectives", "lmtrain.optim", "lmtrain.generation", "lmtrain.rewards",
    "lightning.pytorch.callbacks", "peft.optimizers", "torch.nn", "torch.optim", "torchmetrics.text",
    "torchmetrics.wrappers", "transformers.models", "transformers.optimization",
)  # fmt: skip
_NO_HOLDERS = ("_", "convert_", "test")  # prefixes of module names that mark private modules, scripts and tests
SPECIAL = ("_target_", "_args_")
T = TypeVar("T")


def check_names(key: str, entry: Any, allow_target: Sequence[str]) -> None:
    """Raises UserError if an entry, or a mapping nested in it, names a target that is not allowed; imports nothing."""
    if not isinstance(entry, dict) or not entry.get("_target_"):
        raise UserError(f"{key}: {entry} names no _target_ (package.module.Class)")
    for _, node in flat(entry):
        if not isinstance(node, dict) or "_target_" not in node:
            continue
        special = [str(name) for name in node if str(name).startswith("_") and name not in SPECIAL]
        if special:
            raise UserError(f"{key}: {special[0]} has no meaning here; beside _target_ are only the class's arguments")
        if not isinstance(node.get("_args_", []), list):
            raise UserError(f"{key}: _args_={node['_args_']}: a list of arguments is needed")
        check_allowed(key, node["_target_"], allow_target)


def check_allowed(key: str, target: Any, allow_target: Sequence[str]) -> None:
    """Raises UserError for a target that is not in KNOWN or `allow_target`, or is not a valid dotted path."""
    allowed, parts = (*KNOWN, *allow_target), str(target).split(".")
    if not _is_in(str(target), allowed):
        found = f"{key}: _target_={target} is outside the known packages ({', '.join(allowed)})"
        raise UserError(f"{found}; if you trust it: run.allow_target=[{parts[0]}]")
    if not all(part.isidentifier() and not part.startswith("__") for part in parts):
        raise UserError(f"{key}: _target_={target} is not a class's path, package.module.Class")


def find_class(target: str, key: str, kind: type[T], allow_target: Sequence[str] = ()) -> type[T]:
    """Returns the class that `target` names, a subclass of `kind` without abstract methods.

    Raises:
        UserError: the target is not allowed, can't be imported, is no such class, or lacks an abstract method.
    """
    cls = class_named(target, key, allow_target)
    if not issubclass(cls, kind):
        is_module = any(base.__name__ == "LightningModule" for base in cls.__mro__)
        own = "; as it is, it trains on lmtrain's data with your own Trainer: docs/lightning.md" if is_module else ""
        raise UserError(f"{key}: _target_={target} is not {a_or_an(kind.__name__)}: derive it from {_path(kind)}{own}")
    members = {name: value for base in reversed(cls.__mro__) for name, value in vars(base).items()}
    names = sorted(name for name, value in members.items() if getattr(value, "__isabstractmethod__", False))
    if names:
        raise UserError(f"{key}: _target_={target} lacks {', '.join(names)}: {_path(kind)} says what it returns")
    return cls


def lacking(cls: type, members: Sequence[str]) -> list[str]:
    """Returns the members that a class neither has nor annotates (`label: str`, if __init__ sets the attribute)."""
    declared = {name for base in cls.__mro__ for name in inspect.get_annotations(base)}
    return [name for name in members if not hasattr(cls, name) and name not in declared]


def class_named(target: str, key: str, allow_target: Sequence[str]) -> type:
    """Returns the class that `target` names, imported but not called.

    Raises:
        UserError: it is not allowed, can't be imported, is not a class, or is defined in a module that is not allowed.
    """
    found, name = _named(target, key, allow_target)
    if not isinstance(found, type):
        raise UserError(f"{key}: _target_={target} is not a class; only classes can be named")
    if not _is_in(f"{found.__module__}.", (*PLACES, *allow_target)):
        where = f"{_path(found)}, which {name} only imports, so a config may not name it there"
        trusted = f"_target_={_path(found)} run.allow_target=[{found.__module__.split('.')[0]}]"
        raise UserError(f"{key}: _target_={target} is {where}; if you trust it: {trusted}")
    return found


def function_named(target: str, key: str, allow_target: Sequence[str]) -> Callable[..., Any] | None:
    """Returns the function that `target` names if it is defined in `allow_target`, at the top of a module; else None.

    Raises:
        UserError: the target is not allowed or can't be imported.
    """
    found, name = _named(target, key, allow_target)
    is_plain = isinstance(found, FunctionType) and target.rpartition(".")[0] == name
    allowed = is_plain and all(_is_in(f"{module}.", allow_target) for module in (name, found.__module__))
    return found if allowed else None


def _named(target: str, key: str, allow_target: Sequence[str]) -> tuple[Any, str]:
    """Returns what `target` names, imported but not called, and its module; raises UserError as `class_named` does."""
    check_allowed(key, target, allow_target)
    name, attributes = _module_of(target, key, allow_target)
    try:
        found: Any = importlib.import_module(name)
        for attribute in attributes:
            # Attributes of a class are looked up without running descriptors or metaclass code.
            found = inspect.getattr_static(found, attribute) if isinstance(found, type) else getattr(found, attribute)
            if not isinstance(found, type):
                break
    except (Exception, SystemExit) as error:  # a user's module may fail in any way, or parse the command line
        said = str(error) if isinstance(error, ImportError | AttributeError) else f"{type(error).__name__}: {error}"
        raise UserError(f"{key}: _target_={target} can't be imported: {' '.join(said.split())}") from error
    return found, name


def _module_of(target: str, key: str, allow_target: Sequence[str]) -> tuple[str, list[str]]:
    """Returns the longest prefix of `target` that is a module, located without importing it, and the remaining names.

    Raises:
        UserError: there is no such package, `target` is itself a module, or its module is not allowed.
    """
    parts = target.split(".")
    try:
        spec = None if parts[0] in sys.modules else importlib.util.find_spec(parts[0])
    except (ImportError, ValueError) as error:
        raise UserError(f"{key}: _target_={target} can't be imported: {error}") from None
    if spec is None and parts[0] not in sys.modules:
        looked = "modules are looked for in the folder where python -m is started and on PYTHONPATH"
        raise UserError(f"{key}: _target_={target} can't be imported: No module named '{parts[0]}'; {looked}")
    inside = _folders(sys.modules.get(parts[0], spec))
    for length in range(1, len(parts)):
        name = ".".join(parts[: length + 1])
        below = sys.modules.get(name) or _found_in(inside, name)
        if below is None:
            break
        inside = _folders(below)
    else:
        raise UserError(f"{key}: _target_={target} is not a class but a module; only classes can be named")
    name, attributes = ".".join(parts[:length]), parts[length:]
    _check_place(name, target, key, allow_target)
    return name, attributes


def _found_in(folders: list[str], name: str) -> importlib.machinery.ModuleSpec | None:
    """Returns the spec of a module or package below one whose `folders` are given, which needn't be imported."""
    try:
        return importlib.machinery.PathFinder.find_spec(name, folders)
    except KeyError:  # a folder without __init__.py, for which Python looks up the package above it in sys.modules
        spec = importlib.machinery.ModuleSpec(name, None, is_package=True)
        spec.submodule_search_locations = [os.path.join(folder, name.rpartition(".")[2]) for folder in folders]
        return spec


def _folders(found: ModuleType | importlib.machinery.ModuleSpec | None) -> list[str]:
    """Returns the folders that hold a package's modules; empty for anything that is not a package."""
    folders = getattr(found, "__path__", None) or getattr(found, "submodule_search_locations", None)
    return list(folders) if isinstance(folders, Iterable) else []  # torch.classes invents any attribute


def _check_place(module: str, target: str, key: str, allow_target: Sequence[str]) -> None:
    """Raises UserError for a module of a known package that a config may not import."""
    if _is_in(f"{module}.", allow_target) or any(f"{place}.".startswith(f"{module}.") for place in PLACES):
        return  # parent packages of PLACES are imported with them anyway
    private = any(part.startswith(_NO_HOLDERS) for part in module.split("."))
    if private or not _is_in(f"{module}.", PLACES):
        places = ", ".join(place for place in PLACES if place.split(".")[0] == module.split(".")[0])
        raise UserError(f"{key}: _target_={target}: a config can't name what {module} holds, only classes of {places}")


@contextlib.contextmanager
def building(key: str, target: str) -> Iterator[None]:
    """Converts exceptions raised in the context by a class outside lmtrain into a UserError that names the class."""
    try:
        yield
    except (UserError, RunError):
        raise
    except (Exception, SystemExit) as error:
        if _is_in(target, ("lmtrain",)):
            raise
        said = " ".join(str(error).split())
        raise UserError(f"{key}: {target} raised {type(error).__name__}: {said}") from error


def _path(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"


@dataclass(frozen=True)
class _Node:
    """A class that has passed all checks, with its arguments; nested nodes are objects still to be built."""

    cls: type
    target: str
    first: Sequence[Any]  # positional arguments that lmtrain adds
    positional: list[Any]
    named: dict[str, Any]


def build_target(
    entry: dict[str, Any],
    key: str,
    kind: type,
    allow_target: Sequence[str] = (),
    *,
    first: Sequence[Any] = (),
    refused: Mapping[type, str] | None = None,
) -> Any:
    """Builds an object from {_target_: package.module.Class, ...arguments}, including targets nested in the arguments.

    Args:
        entry: plain, resolved values; text that contains `${` is passed on unchanged.
        key: the config key, for messages.
        kind: the class that the object must be an instance of.
        allow_target: run.allow_target.
        first: positional arguments that lmtrain passes before those of the entry.
        refused: classes that can't be used here, with the reasons.

    Raises:
        UserError: a target is not allowed, can't be imported or is not a class of the right kind; the class doesn't
            accept the arguments; or its constructor raised an exception.
    """
    check_names(key, entry, allow_target)
    cls: type[Any] = find_class(str(entry["_target_"]), key, kind, allow_target)
    for base, reason in (refused or {}).items():
        if issubclass(cls, base):
            raise UserError(f"{key}: {cls.__name__} can't be used here: {reason}")
    return _made(_node(entry, cls, key, allow_target, first), key)


def _checked(value: Any, key: str, allow_target: Sequence[str]) -> Any:
    """Returns an argument in which each mapping with a `_target_` is checked and replaced by a _Node."""
    if isinstance(value, list):
        return [_checked(inner, key, allow_target) for inner in value]
    if not isinstance(value, dict):
        return value
    if "_target_" not in value:
        return {name: _checked(inner, key, allow_target) for name, inner in value.items()}
    cls = class_named(str(value["_target_"]), key, allow_target)
    _check_argument(cls, key, allow_target)
    return _node(value, cls, key, allow_target)


def _node(
    entry: dict[str, Any], cls: type[Any], key: str, allow_target: Sequence[str], first: Sequence[Any] = ()
) -> _Node:
    positional = _checked(entry.get("_args_", []), key, allow_target)
    named = {str(name): _checked(v, key, allow_target) for name, v in entry.items() if name not in SPECIAL}
    check_arguments(cls, str(entry["_target_"]), named, key, positional=len(first) + len(positional))
    return _Node(cls, str(entry["_target_"]), first, positional, named)


def _made(value: Any, key: str) -> Any:
    """Builds a checked argument: replaces each _Node by its object, the innermost first."""
    if isinstance(value, list):
        return [_made(inner, key) for inner in value]
    if isinstance(value, dict):
        return {name: _made(inner, key) for name, inner in value.items()}
    if not isinstance(value, _Node):
        return value
    positional, named = _made(value.positional, key), _made(value.named, key)
    with building(key, value.target):
        return value.cls(*value.first, *positional, **named)


def _is_in(name: str, packages: Sequence[str]) -> bool:
    return any(name.startswith(f"{package}.") for package in packages)


def _check_argument(cls: type, key: str, allow_target: Sequence[str]) -> None:
    from lightning.pytorch import Callback
    from torch import nn

    if not issubclass(cls, nn.Module | Callback) and not _is_in(f"{cls.__module__}.", allow_target):
        fits = "modules, metrics and callbacks can, and classes of packages in run.allow_target"
        raise UserError(f"{key}: _target_={_path(cls)} can't be an argument: {fits}")


def check_arguments(cls: type, target: str, arguments: dict[str, Any], key: str, positional: int) -> None:
    """Raises UserError for the first argument that the class doesn't accept, or for required ones that are missing."""
    try:
        parameters = inspect.signature(cls).parameters.values()
    except (TypeError, ValueError):  # some classes written in C have no signature
        return
    names = [p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    takes = f"it takes {', '.join(names)}" if names else "it takes none"
    if not any(p.kind is p.VAR_KEYWORD for p in parameters):
        for name in (name for name in arguments if name not in names):
            hint = did_you_mean(name, names) or ";"
            raise UserError(f"{key}: {target} got an unexpected keyword argument '{name}'{hint} {takes}")
    needed = [p.name for p in parameters if p.default is p.empty and p.name in names]
    missing = [name for name in needed[positional:] if name not in arguments]
    if missing:
        raise UserError(f"{key}: {target} lacks the argument{'s' * (len(missing) > 1)} {', '.join(missing)}; {takes}")
