"""The keys of the config, read from the schema: what each shapes, its constraints, its value. Imports no torch.

Whatever has to know which keys shape something (the key of prepared data, the fingerprint of a checkpoint, the key of a
precomputed reference) asks here.
"""

import dataclasses
import functools
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, get_args, get_origin, get_type_hints

from lmtrain.config.constraints import CONTENT, Constraint, ReadWhere, Shapes, representable


@dataclass(frozen=True)
class Key:
    """A leaf of the schema."""

    name: str  # dotted: data.seq_len
    type: Any
    shapes: Shapes
    by_content: bool
    may_be_absent: bool  # from a yaml it has no meaning for: then it is None
    constraints: tuple[Constraint, ...]


@functools.cache
def _declared(section: type) -> dict[str, tuple[Any, ...]]:
    """Type and annotations of each field of a config class."""
    hints = get_type_hints(section, include_extras=True).items()
    return {
        name: get_args(hint) if get_origin(hint) is Annotated else (hint,)
        for name, hint in hints
        if get_origin(hint) is not ClassVar
    }


@functools.cache
def keys_of(section: type, prefix: str = "") -> tuple[Key, ...]:
    """All keys of a config class, those of its sections included.

    Raises:
        TypeError: a field doesn't say what it shapes.
    """
    found: list[Key] = []
    absent = {f.name for f in dataclasses.fields(section) if f.default is None}
    for name, (type_, *marks) in _declared(section).items():
        key = f"{prefix}{name}"
        if dataclasses.is_dataclass(type_):
            found += keys_of(type_, f"{key}.")  # type: ignore[arg-type]
            continue
        shapes = [mark for mark in marks if isinstance(mark, Shapes)]
        if len(shapes) != 1:
            raise TypeError(
                f"{key}: say in the schema what it shapes, {name}: Annotated[..., TRAJECTORY] say, one of "
                f"{', '.join(s.name for s in Shapes)} (constraints.py)"
            )
        constraints = tuple(mark for mark in marks if callable(mark))
        found.append(Key(key, type_, shapes[0], CONTENT in marks, name in absent, constraints))
    return tuple(found)


def keys_in(config: Any, prefix: str = "") -> list[Key]:
    """All keys of a config (or one of its sections) as it is: sections may be of subclasses with more keys."""
    own = {key.name: key for key in keys_of(type(config), prefix)}  # type: ignore[arg-type]
    found: list[Key] = []
    for field in dataclasses.fields(config):
        name, value = f"{prefix}{field.name}", getattr(config, field.name)
        found += keys_in(value, f"{name}.") if dataclasses.is_dataclass(value) else [own[name]]
    return found


def annotations_of(name: str, config: Any) -> list[Any]:
    """The annotations of a dotted key and of the sections that it stands in; its own come first."""
    found: list[Any] = []
    for part in name.split("."):
        if not dataclasses.is_dataclass(config):
            break
        found[:0] = _declared(type(config)).get(part, ())[1:]  # type: ignore[arg-type]
        config = getattr(config, part, None)
    return found


def unread(name: str, config: Any) -> ReadWhere | None:
    """What a key waits for where nothing reads it with this config; None where it is read."""
    rule = next((mark for mark in annotations_of(name, config) if isinstance(mark, ReadWhere)), None)
    return None if rule is None or rule.holds(config) else rule


def value_of(config: Any, name: str) -> Any:
    """The value of a dotted key."""
    return functools.reduce(getattr, name.split("."), config)


def values(config: Any, *shapes: Shapes, by_content: bool | None = None) -> dict[str, Any]:
    """Dotted key to value of the keys of `config` (or one of its sections) that shape one of these.

    by_content: only those that are compared by what they name (True), or only the others (False).
    """
    return {
        key.name: value_of(config, key.name)
        for key in keys_in(config)
        if key.shapes in shapes and by_content in (None, key.by_content)
    }


def check_constraints(config: Any) -> None:
    """Raises UserError for the first value that a constraint refuses, in the order of the schema."""
    for key in keys_in(config):
        value = value_of(config, key.name)
        for constraint in key.constraints:
            constraint(key.name, value)
        representable(key.name, value)


def freeze(config: Any) -> None:
    """Makes every section of a config read-only, in place. Setting a key then raises AttributeError."""
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if dataclasses.is_dataclass(value):
            freeze(value)
    section: Any = type(config)
    config.__class__ = _read_only(section)


@functools.cache
def _read_only(section: type) -> type:
    """A subclass of a config class whose instances can't be changed."""

    def set_once(self: Any, name: str, value: Any) -> None:
        if name in vars(self):  # not yet where dataclasses.replace makes another
            raise AttributeError(
                f"{section.__name__}.{name} can't become {value!r}: the config was resolved and is what runs"
            )
        object.__setattr__(self, name, value)

    return type(section.__name__, (section,), {"__setattr__": set_once, "__module__": section.__module__})
