"""The keys of the config, read from the schema: what each affects, its constraints, its value. Imports no torch.

All code that selects keys by what they affect uses this module: the hash key of prepared data, the fingerprint of a
checkpoint, the hash key of a precomputed reference.
"""

import dataclasses
import functools
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, get_args, get_origin, get_type_hints

from lmtrain.config.constraints import (
    CLOSED,
    CODE,
    CONTENT,
    OPEN,
    Constraint,
    OneOf,
    Open,
    ReadWhere,
    Shapes,
    name_or_names,
    representable,
)


@dataclass(frozen=True)
class Key:
    """A leaf of the schema: a key that holds a value, not a section."""

    name: str  # dotted: data.seq_len
    type: Any
    shapes: Shapes
    by_content: bool
    may_be_absent: bool  # may be left out of YAML for which it has no meaning; it is None then
    constraints: tuple[Constraint, ...]
    open: Open  # to what somebody else's file may set it
    is_code: bool  # whether it lets code from outside lmtrain run

    @property
    def is_text(self) -> bool:
        """Whether all values of the key are text, or lists or mappings of text."""
        types = set(re.findall(r"\w+", str(self.type)))
        return name_or_names in self.constraints or ("str" in types and not types & {"int", "float", "bool", "Any"})


@functools.cache
def declared(section: type) -> dict[str, tuple[Any, ...]]:
    """Returns the type and annotations of each field of a config class."""
    hints = get_type_hints(section, include_extras=True).items()
    return {
        name: get_args(hint) if get_origin(hint) is Annotated else (hint,)
        for name, hint in hints
        if get_origin(hint) is not ClassVar
    }


@functools.cache
def keys_of(section: type, prefix: str = "") -> tuple[Key, ...]:
    """Returns all keys of a config class, including those of its sections.

    Raises:
        TypeError: a field is not annotated with exactly one member of Shapes.
    """
    found: list[Key] = []
    absent = {f.name for f in dataclasses.fields(section) if f.default is None}
    for name, (type_, *marks) in declared(section).items():
        key = f"{prefix}{name}"
        if dataclasses.is_dataclass(type_):
            found += keys_of(type_, f"{key}.")  # type: ignore[arg-type]
            continue
        shapes = [mark for mark in marks if isinstance(mark, Shapes)]
        if len(shapes) != 1:
            names = ", ".join(s.name for s in Shapes)
            raise TypeError(f"{key}: say in the schema what it shapes, {name}: Annotated[..., one of {names}]")
        constraints = tuple(mark for mark in marks if callable(mark))
        opened, is_code = _open(type_, marks), CODE in marks
        found.append(Key(key, type_, shapes[0], CONTENT in marks, name in absent, constraints, opened, is_code))
    return tuple(found)


def _open(type_: Any, marks: list[Any]) -> Open:
    """Returns to what somebody else's file may set a key, as constraints.py says."""
    types = set(re.findall(r"\w+", getattr(type_, "__name__", "") + str(type_)))
    is_free = types & {"Any", "dict", "list"} or ("str" in types and not any(isinstance(m, OneOf) for m in marks))
    return next((mark for mark in marks if isinstance(mark, Open)), CLOSED if is_free or CODE in marks else OPEN)


def keys_in(config: Any, prefix: str = "") -> list[Key]:
    """Returns all keys of a config object or section, including keys added by the subclasses of its sections."""
    own = {key.name: key for key in keys_of(type(config), prefix)}  # type: ignore[arg-type]
    found: list[Key] = []
    for field in dataclasses.fields(config):
        name, value = f"{prefix}{field.name}", getattr(config, field.name)
        found += keys_in(value, f"{name}.") if dataclasses.is_dataclass(value) else [own[name]]
    return found


def annotations_of(name: str, config: Any) -> list[Any]:
    """Returns the annotations of a dotted key, followed by those of its enclosing sections, innermost first."""
    found: list[Any] = []
    for part in name.split("."):
        if not dataclasses.is_dataclass(config):
            break
        found[:0] = declared(type(config)).get(part, ())[1:]  # type: ignore[arg-type]
        config = getattr(config, part, None)
    return found


def unread(name: str, config: Any) -> ReadWhere | None:
    """Returns the unmet condition under which a key would be read, or None if this config reads it."""
    rule = next((mark for mark in annotations_of(name, config) if isinstance(mark, ReadWhere)), None)
    return None if rule is None or rule.holds(config) else rule


def flat(value: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    """Yields the dotted key (list indices are numbers) and value of a container and of everything nested in it."""
    yield key, value
    pairs = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for name, inner in pairs:
        yield from flat(inner, f"{key}.{name}" if key else str(name))


def at(tree: Any, path: Iterable[str]) -> Any:
    """Returns the value at a path in plain containers, or None; list indices and YAML's keys may be numbers."""
    for name in path:
        if isinstance(tree, list):
            tree = tree[int(name)] if name.isdigit() and int(name) < len(tree) else None
        else:
            tree = next((v for k, v in tree.items() if str(k) == name), None) if isinstance(tree, dict) else None
    return tree


def value_of(config: Any, name: str) -> Any:
    """Returns the value of a dotted key."""
    return functools.reduce(getattr, name.split("."), config)


def values(config: Any, *shapes: Shapes, by_content: bool | None = None) -> dict[str, Any]:
    """Maps each dotted key of `config` (or one of its sections) that affects one of `shapes` to its value.

    by_content: selects only keys that are compared by content (True), or only the others (False); None selects all.
    """
    return {
        key.name: value_of(config, key.name)
        for key in keys_in(config)
        if key.shapes in shapes and by_content in (None, key.by_content)
    }


def check_constraints(config: Any) -> None:
    """Raises UserError for the first value, in the order of the schema, that violates a constraint."""
    for key in keys_in(config):
        value = value_of(config, key.name)
        for constraint in key.constraints:
            constraint(key.name, value)
        for _, inner in flat(value):
            representable(key.name, inner)


def freeze(config: Any) -> None:
    """Makes a config and its sections read-only, in place. Setting a key then raises AttributeError."""
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if dataclasses.is_dataclass(value):
            freeze(value)
    section: Any = type(config)
    config.__class__ = _read_only(section)


@functools.cache
def _read_only(section: type) -> type:
    """Returns a subclass of a config class with read-only instances."""

    def set_once(self: Any, name: str, value: Any) -> None:
        if name in vars(self):  # absent while dataclasses.replace constructs a copy
            raise AttributeError(f"{section.__name__}.{name} can't be set to {value!r}: the config is in use already")
        object.__setattr__(self, name, value)

    return type(section.__name__, (section,), {"__setattr__": set_once, "__module__": section.__module__})
