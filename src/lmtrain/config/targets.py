"""Objects of classes that the config names with `_target_`: which names are allowed, and how they are built.

`_target_` could name anything that can be imported, so a config from a stranger could run any code. Allowed are
classes, never functions: where a key is for a callback, subclasses of Lightning's Callback, and so on; for their
arguments modules, metrics and callbacks. run.allow_target opens a user's own packages: classes of the right kind for
the key itself, any class of those packages for an argument. Imports no torch until something is built.
"""

import contextlib
import difflib
import importlib
import inspect
from collections.abc import Iterator, Sequence
from typing import Any, TypeVar

from lmtrain.errors import RunError, UserError

KNOWN = ("lmtrain", "torch", "lightning", "transformers", "torchmetrics", "peft")  # packages open to everyone
T = TypeVar("T")
SPECIAL = ("_target_", "_args_")


def check_names(key: str, entry: Any, allow_target: Sequence[str]) -> None:
    """Raises UserError where an entry, or a node in it, is nothing that may be built by its name; imports nothing."""
    if not isinstance(entry, dict) or not entry.get("_target_"):
        raise UserError(f"{key}: {entry} names no _target_ (package.module.Class)")
    for node in _nodes(entry):
        if "_target_" not in node:
            continue
        special = [name for name in node if name.startswith("_") and name not in SPECIAL]
        if special:
            raise UserError(f"{key}: {special[0]} has no meaning here; beside _target_ stand the class's arguments")
        check_allowed(key, node["_target_"], allow_target)


def check_allowed(key: str, target: Any, allow_target: Sequence[str]) -> None:
    """Raises UserError for a name outside the packages that are open to everyone and those in `allow_target`."""
    allowed = (*KNOWN, *allow_target)
    if not _is_in(str(target), allowed):
        raise UserError(
            f"{key}: _target_={target} is outside the known packages ({', '.join(allowed)}); "
            f"if you trust it: run.allow_target=[{str(target).split('.')[0]}]"
        )


def class_named(target: str, key: str, allow_target: Sequence[str]) -> type:
    """The class that `target` names; UserError where it is not allowed or can't be imported."""
    check_allowed(key, target, allow_target)
    return _class(target, key)


def find_class(target: str, key: str, kind: type[T], allow_target: Sequence[str] = ()) -> type[T]:
    """The class that `target` names, a subclass of `kind` that has all that `kind` leaves to its subclasses.

    Raises:
        UserError: a name that is not allowed, can't be imported or is no such class; a method that is missing.
    """
    cls = class_named(target, key, allow_target)
    if not issubclass(cls, kind):
        raise UserError(f"{key}: _target_={target} is no {kind.__name__}: derive it from {_path(kind)}")
    names = [n for n in dir(cls) if getattr(inspect.getattr_static(cls, n, None), "__isabstractmethod__", False)]
    if names:
        raise UserError(f"{key}: _target_={target} lacks {', '.join(names)}: {_path(kind)} says what it returns")
    return cls


@contextlib.contextmanager
def building(key: str, target: str) -> Iterator[None]:
    """Within it, what a class that is not lmtrain's raises becomes a UserError that names it."""
    try:
        yield
    except (UserError, RunError):
        raise
    except Exception as error:
        if _is_in(target, ("lmtrain",)):
            raise
        said = " ".join(str(error).split())
        raise UserError(f"{key}: {target} raised {type(error).__name__}: {said}") from error


def _path(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"


def build_target(entry: dict[str, Any], key: str, kind: type, allow_target: Sequence[str] = ()) -> Any:
    """An object from {_target_: package.module.Class, ...arguments}; nodes in the arguments are built as well.

    Args:
        key: the key of the config, for messages.
        kind: the class that the key is for.
        allow_target: run.allow_target.

    Raises:
        UserError: a name that is not allowed, can't be imported or is no class of the right kind; arguments the class
            doesn't take; an exception of its constructor.
    """
    from hydra.errors import InstantiationException
    from hydra.utils import instantiate

    check_names(key, entry, allow_target)
    resolved = _resolve(entry, key, allow_target)  # what is checked is what is built: the class, not its name
    cls = resolved["_target_"]
    if not issubclass(cls, kind):
        raise UserError(f"{key}: _target_={entry['_target_']} is no {kind.__module__.split('.')[0]} {kind.__name__}")
    try:
        return instantiate(resolved, _convert_="all")
    except InstantiationException as error:
        cause = error.__cause__ or error
        said = " ".join(str(cause).split())
        raise UserError(f"{key}: {entry['_target_']} raised {type(cause).__name__}: {said}") from error


def _nodes(entry: Any) -> Iterator[dict[str, Any]]:
    """All mappings in an entry, itself included."""
    if isinstance(entry, dict):
        yield entry
    for value in entry.values() if isinstance(entry, dict) else entry if isinstance(entry, list) else ():
        yield from _nodes(value)


def _is_in(name: str, packages: Sequence[str]) -> bool:
    return any(name.startswith(f"{package}.") for package in packages)


def _resolve(entry: Any, key: str, allow_target: Sequence[str], *, argument: bool = False) -> Any:
    """A copy of the entry with classes in place of their names."""
    if isinstance(entry, list):
        return [_resolve(value, key, allow_target, argument=True) for value in entry]
    if not isinstance(entry, dict):
        return entry
    resolved = {k: _resolve(v, key, allow_target, argument=True) for k, v in entry.items()}
    if "_target_" in entry:
        cls = _class(str(entry["_target_"]), key)
        if argument:
            _check_argument(cls, key, allow_target)
        check_arguments(cls, str(entry["_target_"]), {k: v for k, v in resolved.items() if k not in SPECIAL}, key,
                         positional=len(entry.get("_args_", ())))  # fmt: skip
        resolved["_target_"] = cls
    return resolved


def _class(target: str, key: str) -> type:
    parts = target.split(".")
    for length in range(len(parts) - 1, 0, -1):
        module = ".".join(parts[:length])
        try:
            found: Any = importlib.import_module(module)
        except ModuleNotFoundError as error:
            if error.name is not None and (module == error.name or module.startswith(f"{error.name}.")) and length > 1:
                continue
            raise UserError(f"{key}: _target_={target} can't be imported: {error}") from error
        except Exception as error:  # a user's module may fail in any way
            raise UserError(f"{key}: _target_={target} can't be imported: {type(error).__name__}: {error}") from error
        try:
            for name in parts[length:]:
                found = getattr(found, name)
        except AttributeError as error:
            raise UserError(f"{key}: _target_={target} can't be imported: {error}") from error
        break
    if not isinstance(found, type):
        raise UserError(f"{key}: _target_={target} is no class; only classes can be named")
    return found


def _check_argument(cls: type, key: str, allow_target: Sequence[str]) -> None:
    from lightning.pytorch import Callback
    from torch import nn

    if not issubclass(cls, nn.Module | Callback) and not _is_in(f"{cls.__module__}.", allow_target):
        raise UserError(
            f"{key}: _target_={cls.__module__}.{cls.__qualname__} can't be an argument: there modules, metrics and "
            f"callbacks can be named, and classes of packages in run.allow_target"
        )


def check_arguments(cls: type, target: str, arguments: dict[str, Any], key: str, positional: int) -> None:
    """Raises UserError for the first argument that the class doesn't take, or those that it lacks."""
    try:
        parameters = inspect.signature(cls).parameters.values()
    except (TypeError, ValueError):  # some built in C tell nothing
        return
    names = [p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    takes = f"it takes {', '.join(names)}" if names else "it takes none"
    if not any(p.kind is p.VAR_KEYWORD for p in parameters):
        for name in (name for name in arguments if name not in names):
            near = difflib.get_close_matches(name, names, n=1)
            hint = f"did you mean {near[0]}? " if near else ""
            raise UserError(f"{key}: {target} got an unexpected keyword argument '{name}'; {hint}{takes}")
    needed = [
        p.name for p in parameters if p.default is p.empty and p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)
    ]
    missing = [name for name in needed[positional:] if name not in arguments]
    if missing:
        raise UserError(f"{key}: {target} lacks the argument{'s' * (len(missing) > 1)} {', '.join(missing)}; {takes}")
