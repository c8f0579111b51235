"""Freezes a resolved config: from then on it says what runs, and nothing may change it."""

import dataclasses
import functools
from typing import Any


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
