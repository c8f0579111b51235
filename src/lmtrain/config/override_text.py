"""Parsing and quoting of overrides as users type them, for Hydra's override grammar. Imports no torch."""

import functools
import json
import re
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException

from lmtrain.config.interpolations import escaped
from lmtrain.config.keys import flat
from lmtrain.config.sections import all_keys, text_keys
from lmtrain.secrets import in_shell


def to_hydra(override: str) -> str:
    """Returns an override with the quotes and plus signs that Hydra's grammar needs, inferred from the schema.

    Text that doesn't parse is quoted, as are the words in a list or mapping, and text that looks like a number or
    boolean. A mapping with keys chosen by the user, or a key of such a mapping, gets the prefix ++, which adds it to
    the config.
    """
    return as_text(_parsable(override))


def _parsable(override: str) -> str:
    key, _, value = override.partition("=")
    if key == "reward.parts":  # the option's keys are arguments of a class and so not in the schema
        return f"++{override}"
    found = next((k for k in all_keys() if key == k.name or key.startswith(f"{k.name}.")), None)
    if not value:
        return override
    if found is None:
        return _with_quoted_words(override)
    type_ = str(found.type)
    if found.name in _PROSE and key == found.name and value[0] not in "'\"" and not _ONE_WORD.fullmatch(value):
        return as_typed(key, value)
    if type_.startswith("dict[") and "." in found.name:
        override = re.sub(r'([{,]\s*)(["\'])([^"\']*)\2(\s*:)', r"\1\3\4", override)  # Hydra's keys have no quotes
        return f"++{override}" if key == found.name or "dict[str, str]" in type_ else override
    if key == found.name and "bool" in type_ and value.lower() in _BOOLEANS:
        return f"{key}={_BOOLEANS[value.lower()]}"
    if key != found.name or _parses(override):
        return override
    if "list[str]" in type_ and value.startswith("[") and value.endswith("]") and not re.search("[\"']", value):
        return f"{key}=[{','.join(quoted(entry.strip()) for entry in value[1:-1].split(','))}]"
    is_text = found.type in (str, str | None) or ("://" in value and value[0] not in "'\"[{")  # a URL of files
    return f"{key}={quoted(value)}" if is_text else _with_quoted_words(override)


def _with_quoted_words(override: str) -> str:
    """Returns an override with words quoted that have no bare form in Hydra's grammar (~/x, tëxt), if that helps."""
    if _parses(override):
        return override
    key, _, value = override.partition("=")

    def in_quotes(match: re.Match[str]) -> str:
        as_it_is, name, word = match.groups()
        return match[0] if as_it_is or _parses(f"key={word}") else f"{name or ''}{quoted(word)}"

    found = f"{key}={_BARE.sub(in_quotes, value)}"
    return found if _parses(found) else override


_PROSE = ("generate.prompt", "generate.system_prompt", "data.system_prompt")  # text whose commas are not a sweep
_ONE_WORD = re.compile(r"[\w.-]*|\$\{.*\}", re.ASCII)


def as_typed(key: str, text: str) -> str:
    """Returns the override that sets a key to exactly this text; it is quoted and `${` is escaped."""
    return f"{key}={quoted(escaped(text))}"


_AS_IT_IS = r""""(?:\\.|[^"\\])*"|'(?:\\.|[^'\\])*'|\$\{[^}]*\}"""  # quoted text and interpolations
_BARE = re.compile(rf"({_AS_IT_IS})|([\w.]+:(?!//)\s*)?([^\s\[\]{{}},'\"=](?:[^\[\]{{}},'\"=]*[^\s\[\]{{}},'\"=])?)")
_WORD = r"[+-]?(?:\.?\d[\w.+-]*|inf|nan|true|false)"  # read by Hydra as a number or boolean
_NUMBER = re.compile(rf"({_AS_IT_IS})|(^|[\[,({{:])(\s*)({_WORD})(?=\s*(?:$|[\],)}}]))", re.IGNORECASE | re.ASCII)


def as_text(override: str) -> str:
    """Returns an override whose key takes text with each number or boolean in quotes, so that it stays as typed.

    This applies to all values of a sweep, and to those in a list or mapping of texts. A null stays null.
    """
    key, equals, value = override.partition("=")
    name = key.lstrip("+")
    if name not in text_keys() and name.rpartition(".")[0] not in text_keys():
        return override

    def in_quotes(match: re.Match[str]) -> str:
        quoted_, before, space, word = match.groups()
        is_part = quoted_ is not None or (before == ":" and not value.startswith("{"))  # of 11:50:00
        return match[0] if is_part else f"{before}{space}{quoted(word)}"

    return key + equals + _NUMBER.sub(in_quotes, value)


_BOOLEANS = {"yes": "true", "no": "false", "on": "true", "off": "false"}


@functools.lru_cache(4096)
def _parses(override: str) -> bool:
    try:
        OverridesParser.create().parse_override(override)
    except HydraException:
        return False
    return True


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


def leaves(overrides: Sequence[str]) -> dict[str, Any]:
    """Maps dotted keys to the unresolved values that overrides set, with nested containers flattened by `flat`."""
    found: dict[str, Any] = {}
    for override in OverridesParser.create().parse_overrides([to_hydra(o) for o in overrides]):
        if not override.is_delete() and not override.is_sweep_override():
            found |= flat(override.value(), override.key_or_group)
    return found


def leaves_of(tree: Mapping[Any, Any], known: Container[str] = (), prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yields the dotted keys and values of a config, down to keys in `known` or that hold no mapping."""
    for key, value in tree.items():
        dotted = f"{prefix}{key}"
        if isinstance(value, dict) and value and not (dotted in known and "." in dotted):
            yield from leaves_of(value, known, f"{dotted}.")
        else:
            yield dotted, value
