"""Text of overrides: quoting and writing them for Hydra's grammar; overrides.py parses them. Imports no torch."""

import json
import re
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lmtrain.config.interpolations import escaped
from lmtrain.secrets import in_shell


def as_typed(key: str, text: str) -> str:
    """Returns the override that sets a key to exactly this text; it is quoted and `${` is escaped."""
    return f"{key}={quoted(escaped(text))}"


def written(value: Any, other: Callable[[Any], str] = lambda value: quoted(escaped(str(value)))) -> str:
    """Formats a value so that Hydra's grammar parses it back: quoted text, lists, mappings, numbers, booleans, null.

    Args:
        other: formats text and every other value that is not a container, number, boolean or null.
    """
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key}: {written(inner, other)}" for key, inner in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(written(inner, other) for inner in value) + "]"
    if value is None or isinstance(value, bool):
        return json.dumps(value)
    return repr(value) if isinstance(value, int | float) else other(value)


def bare_or_quoted(text: str) -> str:
    """Returns the text as a user would type it: in quotes only if Hydra's grammar needs them."""
    return text if re.fullmatch(r"[\w/.+-]+", text, re.ASCII) else quoted(text)


def shell_word(key: str, text: str) -> str:
    """Returns the override as a word to paste into a shell: quoted for Hydra and for the shell where they need it."""
    return in_shell(f"{key}={bare_or_quoted(text)}")


def quoted(text: str) -> str:
    """Returns the text in double quotes, escaped so that Hydra's grammar parses it back."""
    return '"' + re.sub(r'(\\*)("|$)', lambda m: 2 * m[1] + ('\\"' if m[2] else ""), text) + '"'


def typed_keys(overrides: Sequence[str]) -> dict[str, str]:
    """Maps the dotted key of each override to the text of its value as typed; deletions (~key) are left out."""
    pairs = (o.lstrip("+").partition("=") for o in overrides if not o.startswith("~"))
    return {key: value for key, _, value in pairs}


@dataclass(frozen=True)
class Command:
    """What a config was composed from."""

    words: tuple[str, ...] = ()  # the command line as typed, or the overrides given in Python
    of_file: tuple[str, ...] = ()  # the overrides of the yaml file that it names
    notes: tuple[str, ...] = ()  # what lmtrain has added, and why, for the plan

    @property
    def typed(self) -> dict[str, str]:
        """The typed keys with their values as text."""
        return typed_keys(self.words)

    @property
    def given(self) -> dict[str, str]:
        """The keys that are typed or in the yaml file."""
        return typed_keys([*self.of_file, *self.words])


def leaves_of(tree: Mapping[Any, Any], known: Container[str] = (), prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yields the dotted keys and values of a config, down to keys in `known` or that hold no mapping."""
    for key, value in tree.items():
        dotted = f"{prefix}{key}"
        if isinstance(value, dict) and value and not (dotted in known and "." in dotted):
            yield from leaves_of(value, known, f"{dotted}.")
        else:
            yield dotted, value
