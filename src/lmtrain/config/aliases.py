"""Aliases: maps other projects' names for settings, in any section, to lmtrain's keys. The table is aliases.yaml."""

import difflib
import functools
from collections import Counter
from collections.abc import Collection
from typing import Any

from lmtrain.config import safe_yaml
from lmtrain.config.override_text import bare_or_quoted, written
from lmtrain.config.sections import all_keys
from lmtrain.errors import UserError

_TABLES: dict[str, Any] = safe_yaml.table(__file__, "aliases.yaml")


def _by_name(table: str) -> dict[str, str]:
    """Returns {their name: what it is here} for a table of {what it is here: their names}."""
    return {name: here for here, names in _TABLES[table].items() for name in names}


NEIGHBOURS, _SWITCHES, OPTIONS, WITHOUT, HYDRA_FLAGS, VERBS = map(
    _by_name, ("keys", "switches", "options", "without", "hydra_flags", "verbs")
)
LIGHTNING, WANTED, SHARES, DEEPSPEED = (_TABLES[name] for name in ("lightning", "wanted", "shares", "deepspeed"))
SECTIONS, _AMBIGUOUS, _ALIKE = (tuple(_TABLES[name]) for name in ("sections", "ambiguous", "alike"))


@functools.cache
def _own() -> dict[str, str]:
    """Maps the last parts of lmtrain's keys to the key, where only one key ends in it: max_steps."""
    ends = Counter(key.name.rpartition(".")[2] for key in all_keys())
    return {last: key.name for key in all_keys() if ends[last := key.name.rpartition(".")[2]] == 1}


def _last_part(key: str) -> str:
    """Returns a key's last part, in lower case and without dashes; '' if its sections are not among SECTIONS."""
    *sections, last = key.lower().replace("-", "_").split(".")
    return last if all(part in SECTIONS for part in sections) else ""


def used_here(key: str, valid: Collection[str]) -> str | None:
    """Returns lmtrain's key, group or option for another project's name, ignoring case and dashes; None if unknown.

    Args:
        valid: lmtrain's keys, to resolve names of which only the section differs (datamodule.path).
    """
    key = key.lower().replace("-", "_")
    head, _, rest = key.partition(".")
    renamed = f"{NEIGHBOURS[head]}.{rest}" if rest and head in NEIGHBOURS else None
    for word in (key, renamed):
        if word in NEIGHBOURS:
            return NEIGHBOURS[word]
    if renamed in valid:
        return renamed
    last = _last_part(key)
    if rest and (last in _AMBIGUOUS or last not in NEIGHBOURS):
        return None if last in _AMBIGUOUS else _own().get(last)
    return NEIGHBOURS.get(last, _own().get(last))


def misspelt(key: str, valid: Collection[str]) -> str | None:
    """Returns another project's name that `key` nearly matches; None if one of lmtrain's keys is at least as close."""
    last = _last_part(key)
    ours = {v.rpartition(".")[2] for v in valid}
    theirs = [word for word in NEIGHBOURS if "." not in word and word not in (*ours, *_AMBIGUOUS)]
    near = difflib.get_close_matches(last, [*ours, *theirs], n=1, cutoff=0.8)
    is_typo = bool(near) and abs(len(near[0]) - len(last)) < 2  # use_lora is not use_rslora
    return near[0] if is_typo and near[0] in theirs else None


def absent(key: str) -> str | None:
    """Returns why lmtrain has no equivalent of another project's setting, or what replaces it; None if unknown."""
    last = _last_part(key)
    return WITHOUT.get(last, f"here it is {LIGHTNING[last]}" if last in LIGHTNING and last not in NEIGHBOURS else None)


def with_value(name: str, here: str, value: object) -> str:
    """Translates another project's `name: value`: overrides if the value means the same and fits, else the key alone.

    Args:
        here: lmtrain's key, as returned by `used_here`.
    """
    overrides, rest = translated(name, here, value)
    key = here.partition(" ")[0]
    if not overrides and str(value).lower() == "false" and (_last_part(name) in _SWITCHES or "=" in key):
        return f"{key.partition('=')[0]}, to be left as it is"
    return f"{' '.join(overrides)} {rest}".strip() if overrides else here


def translated(name: str, here: str, value: object) -> tuple[list[str], str]:
    """Returns the overrides that say what another project's `name: value` says, if any, and what else `here` says.

    Args:
        here: lmtrain's key, as returned by `used_here`, which may be followed by the group it needs: (with peft=lora).
    """
    key, _, rest = here.partition(" ")
    name = name.rpartition(".")[2].lower().replace("-", "_")
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if key == "model.name_or_path" and isinstance(value, str) and value:
        return [f"model={value}"], ""
    is_on = value in (True, None, "true", "True")
    said = _SWITCHES.get(f"{name}={value}".lower()) or (_SWITCHES.get(name) if is_on else None)
    if said is not None:
        return said.split(), rest
    alike = [f"{k}=*" for k in (key, *rest.split(" ")[1:2]) if k in _ALIKE]
    known = [entry for entry in (*alike, _SWITCHES.get(f"{name}=*")) if entry is not None]
    fits = next((entry for entry in known if _takes(entry.split()[-1].partition("=")[0], value)), "")
    text = written(value, bare_or_quoted) if isinstance(value, list) else bare_or_quoted(str(value))
    return [word.replace("*", text) for word in fits.split()], "" if rest.startswith("or ") else rest


def _takes(key: str, value: object) -> bool:
    """Returns whether a value, a number or the text of one, fits the type and constraints of a key."""
    found = next(k for k in all_keys() if k.name == key)
    if isinstance(value, list) or "list" in str(found.type):
        return (found.type is Any or "list[str]" in str(found.type)) and isinstance(value, list)
    if isinstance(value, bool) or not isinstance(value, int | float | str) or value == "":
        return False
    try:
        given: object = str(value) if found.is_text else float(value)
        for check in found.constraints:
            check(key, given)
    except UserError:
        return False
    except ValueError:  # a text for a number
        return "str" in str(found.type)
    return not isinstance(given, float) or given.is_integer() or "float" in str(found.type)
