"""Overrides as they are typed: their keys and values, and the quotes that Hydra's grammar wants. Imports no torch."""

import functools
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException

from lmtrain.config.interpolations import escaped
from lmtrain.config.sections import all_keys


def to_hydra(override: str) -> str:
    """An override with the quotes and plus signs that Hydra's grammar wants, where the schema tells what is meant.

    A text that doesn't parse is quoted, as are the entries of a list of texts; a mapping of a user's own keys, or one
    of these, is added to the config.
    """
    key, _, value = override.partition("=")
    if key == "reward.parts":  # of an option whose keys are those of a class, which no schema has
        return f"++{override}"
    found = next((k for k in all_keys() if key == k.name or key.startswith(f"{k.name}.")), None)
    if found is None or not value:
        return override
    type_ = str(found.type)
    if found.name in _PROSE and key == found.name and value[0] not in "'\"" and not _is_one_word(value):
        return as_typed(key, value)
    if type_.startswith("dict[") and "." in found.name:
        override = re.sub(r'([{,]\s*)(["\'])([^"\']*)\2(\s*:)', r"\1\3\4", override)  # Hydra's keys have no quotes
        return f"++{override}" if key == found.name or "dict[str, str]" in type_ else override
    if key == found.name and found.type is not str and "bool" in type_ and value.lower() in _BOOLEANS:
        return f"{key}={_BOOLEANS[value.lower()]}"
    if key != found.name or _parses(override):
        return override
    if "list[str]" in type_ and value.startswith("[") and value.endswith("]") and not re.search("[\"']", value):
        return f"{key}=[{','.join(quoted(entry.strip()) for entry in value[1:-1].split(','))}]"
    is_text = found.type in (str, str | None) or ("://" in value and value[0] not in "'\"[{")  # an address of files
    return f"{key}={quoted(value)}" if is_text else override


_PROSE = ("generate.prompt", "generate.system_prompt", "data.system_prompt")  # texts that no sweep tries


def _is_one_word(text: str) -> bool:
    return re.fullmatch(r"[\w.-]*|\$\{.*\}", text, re.ASCII) is not None


def as_typed(key: str, text: str) -> str:
    """The override that sets a key to this very text, whatever it holds."""
    return f"{key}={quoted(escaped(text))}"


_BOOLEANS = {"yes": "true", "no": "false", "on": "true", "off": "false"}


@functools.lru_cache(4096)
def _parses(override: str) -> bool:
    try:
        OverridesParser.create().parse_override(override)
    except HydraException:
        return False
    return True


def written(value: Any, other: Callable[[Any], str] = lambda value: quoted(escaped(str(value)))) -> str:
    """A value as Hydra's grammar reads it back: texts between quotes, lists and mappings of values, numbers, null.

    Args:
        other: writes texts and what else is not a number, truth value or null.
    """
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key}: {written(inner, other)}" for key, inner in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(written(inner, other) for inner in value) + "]"
    if value is None or isinstance(value, bool):
        return json.dumps(value)
    return repr(value) if isinstance(value, int | float) else other(value)


def bare_or_quoted(text: str) -> str:
    """A text as a person would type it: between quotes only where Hydra's grammar wants them."""
    return text if re.fullmatch(r"[\w/.+-]+", text, re.ASCII) else quoted(text)


def quoted(text: str) -> str:
    """A text between double quotes, as Hydra's grammar reads it back."""
    return '"' + re.sub(r'(\\*)("|$)', lambda m: 2 * m[1] + ('\\"' if m[2] else ""), text) + '"'


def typed_keys(overrides: Sequence[str]) -> dict[str, str]:
    """Dotted key to the text of its value, of overrides as they are typed."""
    pairs = (o.lstrip("+").partition("=") for o in overrides if not o.startswith("~"))
    return {key: value for key, _, value in pairs}


def leaves(overrides: Sequence[str]) -> dict[str, Any]:
    """Dotted key to value, unresolved, of what overrides set."""
    found: dict[str, Any] = {}
    for override in OverridesParser.create().parse_overrides([to_hydra(o) for o in overrides]):
        if not override.is_delete() and not override.is_sweep_override():
            found |= flat(override.value(), override.key_or_group)
    return found


def flat(value: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted key (a place in a list is a number) and value of all that stands in plain containers, themselves first."""
    yield key, value
    pairs = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for name, inner in pairs:
        yield from flat(inner, f"{key}.{name}" if key else str(name))
