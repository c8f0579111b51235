"""Overrides as users type them, each parsed once by Hydra's own grammar into its Override object. Imports no torch.

The schema says what a value may be, so that fewer quotes are needed than in Hydra: a text stays as it was typed,
however much it looks like a number (1.10, 007); yes and no are booleans; a text that the grammar has no bare form for
(~/x, tëxt) is that text, and a list or mapping that it can't read is read as YAML. Whatever else it can't read is
refused with the form to type. After `parse`, nothing looks at the text of an override again.
"""

import functools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import yaml
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import ChoiceSweep, Override, Quote, QuotedString, Sweep
from hydra.errors import HydraException

from lmtrain.config import safe_yaml
from lmtrain.config.constraints import representable
from lmtrain.config.interpolations import escaped
from lmtrain.config.keys import Key, flat
from lmtrain.config.override_text import quoted, written
from lmtrain.config.sections import all_keys, text_keys
from lmtrain.errors import UserError
from lmtrain.secrets import in_shell

PROSE = ("generate.prompt", "generate.system_prompt", "data.system_prompt")  # text whose commas are not a sweep
_BOOLEANS = {"yes": "true", "no": "false", "on": "true", "off": "false"}


@dataclass(frozen=True)
class Word:
    """One override."""

    typed: str
    override: Override

    @property
    def key(self) -> str:
        """The dotted key or the group, without the signs in front of it."""
        return str(self.override.key_or_group)

    @property
    def value(self) -> Any:
        """The plain value, with interpolations unresolved; a Sweep if there are several."""
        return self.override.value()

    @property
    def text(self) -> str:
        """The override in Hydra's grammar."""
        return str(self.override.input_line)

    @property
    def sets(self) -> bool:
        """Whether it sets a value, and neither deletes a key nor tries several values."""
        return not (self.override.is_delete() or self.override.is_sweep_override())


@functools.lru_cache(4096)
def parse(typed: str, sweep: bool = False) -> Word:
    """Parses one override; raises UserError with the form to type if it can't be read.

    Args:
        sweep: whether commas separate the values of a sweep in prose, too.
    """
    key, equals, value = typed.partition("=")
    name = key.lstrip("+")
    found = _declared(name)
    if equals and not typed.startswith("~"):
        is_whole = found is not None and name == found.name
        if name == "reward.parts" or (found is not None and _takes_any_key(found, is_whole)):
            key = f"++{name}"
        if not sweep and name in PROSE and value != "null" and not value.startswith(("'", '"', "${")):
            value = quoted(escaped(value))
        elif found is not None and "bool" in str(found.type):
            value = _BOOLEANS.get(value.lower(), value)
        override = _grammar(f"{key}={value}") or _grammar(f"{key}={_readable(value, found if is_whole else None)}")
        if override is not None and (name in text_keys() or name.rpartition(".")[0] in text_keys()):
            override = _with_texts(override, key, value)
    else:
        override = _grammar(typed)
    if override is None:
        representable(name, value)
        raise UserError(unreadable(typed))
    return Word(typed, override)


def parse_all(words: Iterable[str], sweep: bool = False) -> list[Word]:
    return [parse(word, sweep) for word in words]


def _declared(name: str) -> Key | None:
    """Returns the key of the schema that this is, or that it is a part of."""
    return next((key for key in all_keys() if name == key.name or name.startswith(f"{key.name}.")), None)


def _takes_any_key(found: Key, is_whole: bool) -> bool:
    """Returns whether this is a mapping with keys chosen by the user, or a key of one, which ++ adds to the config."""
    type_ = str(found.type)
    return type_.startswith("dict[") and "." in found.name and (is_whole or "dict[str, str]" in type_)


def _grammar(text: str) -> Override | None:
    """Returns the override as Hydra reads it; None if its grammar doesn't."""
    try:
        return OverridesParser.create().parse_override(text)
    except HydraException:
        return None


def _readable(value: str, found: Key | None) -> str:
    """Returns a value that the grammar rejects in a form that it may read: a text in quotes, a container from YAML.

    Args:
        found: the key, if it is one of the schema.
    """
    is_text = found is not None and found.type in (str, str | None)
    if is_text or ("://" in value and value[0] not in "'\"[{"):
        return quoted(value)
    safe_yaml.check_text(value, value)
    try:
        if value[:1] in ("[", "{"):
            return _from_yaml(yaml.compose(value, yaml.SafeLoader))
        if not set(value) & set("[]{}'\"="):  # one text, or those of a sweep
            return ",".join(map(_from_yaml, yaml.compose(f"[{value}]", yaml.SafeLoader).value))
    except yaml.YAMLError:
        pass  # refused
    return value


def _from_yaml(node: Any) -> str:
    """Returns a YAML container in Hydra's grammar; its bare words are read by that grammar if it can, else as text."""
    if isinstance(node, yaml.MappingNode):
        return "{" + ", ".join(f"{key.value}: {_from_yaml(value)}" for key, value in node.value) + "}"
    if isinstance(node, yaml.SequenceNode):
        return "[" + ", ".join(map(_from_yaml, node.value)) + "]"
    return str(node.value) if node.style is None and _grammar(f"key={node.value}") else quoted(node.value)


def _with_texts(override: Override, key: str, value: str) -> Override | None:
    """Returns the override of a key whose type is text with each number or boolean as the text that was typed."""
    parsed: Any = override._value
    sweep = isinstance(parsed, ChoiceSweep) and parsed.simple_form
    if isinstance(parsed, Sweep) and not sweep:
        return override
    parsed = parsed.list if sweep else parsed
    if all(inner is None or isinstance(inner, str | QuotedString | list | dict) for _, inner in flat(parsed)):
        return override
    if not isinstance(parsed, list | dict):
        return _grammar(f"{key}={quoted(value.strip())}")
    try:
        found = _texts(parsed, yaml.compose(f"[{value}]" if sweep else value, yaml.SafeLoader))
    except (yaml.YAMLError, ValueError):
        return None
    return _grammar(f"{key}={','.join(map(_written, found)) if sweep else _written(found)}")


def _texts(parsed: Any, node: Any) -> Any:
    """Returns a value of Hydra's with the texts of YAML in place of numbers and booleans."""
    if isinstance(parsed, list):
        return [_texts(*pair) for pair in zip(parsed, node.value, strict=True)]
    if isinstance(parsed, dict):
        return {key: _texts(value, of) for (key, value), (_, of) in zip(parsed.items(), node.value, strict=True)}
    is_text = parsed is None or isinstance(parsed, str | QuotedString)
    return parsed if is_text else QuotedString(node.value, Quote.double)


def _written(value: Any) -> str:
    return written(value, lambda text: quoted(text.text if isinstance(text, QuotedString) else text))


def leaves(overrides: Sequence[str]) -> dict[str, Any]:
    """Maps dotted keys to the unresolved values that overrides set, with nested containers flattened by `flat`."""
    found: dict[str, Any] = {}
    for word in parse_all(overrides):
        if word.sets:
            found |= flat(word.value, word.key)
    return found


def unreadable(override: str) -> str:
    """Returns the message for an argument that can't be read."""
    key, equals, value = override.partition("=")
    if not equals:
        return f"cannot read {override!r}: write key=value or group=option; a value that holds spaces needs quotes"
    holds = "spaces, commas, brackets, quotes or ="
    if value.startswith(("[", "{")):
        inside = f"put each text in it that contains {holds} in double quotes, and all of it in single quotes"
        return f"cannot read {override!r}: {inside}: 'optimizer.groups=[{{pattern: \"a|(b)\", lr: 1e-4}}]'"
    twice = f"a value that holds {holds} needs quotes twice, for the shell and for Hydra"
    in_quotes = f'{key}="{value}"'
    return f"cannot read {override!r}: {twice}: {in_shell(in_quotes)}"
