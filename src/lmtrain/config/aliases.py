"""Aliases: maps other projects' names for settings, in any section, to lmtrain's keys. The table is aliases.yaml."""

import functools
import re
from collections import Counter
from collections.abc import Collection
from typing import Any

from lmtrain.config import safe_yaml
from lmtrain.config.override_text import bare_or_quoted, written
from lmtrain.config.sections import all_keys

_TABLES: dict[str, Any] = safe_yaml.table(__file__, "aliases.yaml")


def _by_name(table: str) -> dict[str, str]:
    """Returns {their name: what it is here} for a table of {what it is here: their names}."""
    return {name: here for here, names in _TABLES[table].items() for name in names}


NEIGHBOURS, OPTIONS, WITHOUT, VERBS, DEEPSPEED = map(_by_name, ("keys", "options", "without", "verbs", "deepspeed"))
WANTED, SHARES = _TABLES["wanted"], _TABLES["shares"]
SECTIONS, _AMBIGUOUS = (tuple(_TABLES[name]) for name in ("sections", "ambiguous"))


@functools.cache
def _own() -> dict[str, str]:
    """Maps the last parts of lmtrain's keys to the answer `key=*`, where only one key ends in it: max_steps."""
    ends = Counter(key.name.rpartition(".")[2] for key in all_keys())
    return {last: f"{key.name}=*" for key in all_keys() if ends[last := key.name.rpartition(".")[2]] == 1}


def _last_part(key: str) -> str:
    """Returns a key's last part, in lower case and without dashes; '' if its sections are not among SECTIONS."""
    *sections, last = key.lower().replace("-", "_").split(".")
    return last if all(part in SECTIONS for part in sections) else ""


def used_here(key: str, valid: Collection[str]) -> str | None:
    """Returns lmtrain's key, group or option for another project's name, ignoring case and dashes; None if unknown.

    A `*` in it stands for the value, as in aliases.yaml.

    Args:
        valid: lmtrain's keys, to resolve names of which only the section differs (datamodule.path).
    """
    key = key.lower().replace("-", "_")
    head, _, rest = key.partition(".")
    if key in NEIGHBOURS:
        return NEIGHBOURS[key]
    renamed = f"{re.split('[ =]', NEIGHBOURS[head])[0]}.{rest}" if rest and head in NEIGHBOURS else None
    if renamed in valid:
        return f"{renamed}=*"
    last = _last_part(key)
    if rest and (last in _AMBIGUOUS or last not in NEIGHBOURS):
        return None if last in _AMBIGUOUS else _own().get(last)
    return NEIGHBOURS.get(last, _own().get(last))


def absent(key: str) -> str | None:
    """Returns why lmtrain has no equivalent of another project's setting, or what replaces it; None if unknown."""
    return WITHOUT.get(_last_part(key))


LEFT = "to be left as it is"


def answer(here: str, value: object = None) -> str:
    """Returns what to type for a setting of another project.

    Args:
        here: as returned by `used_here`; its `*` is replaced by the value.
        value: None if it is not known, which leaves the keys alone.
    """
    setting = here.partition(" ")[0]
    if value is None:
        return here.replace("=*", "")
    if str(value).lower() == "false" and "=" in setting and "*" not in here:  # load_in_8bit=false
        return f"{setting.partition('=')[0]}, {LEFT}"
    return here.replace("*", written(value, lambda text: bare_or_quoted(str(text))))
