"""Reads a yaml file named on the command line, `train my.yaml`, as overrides; typed overrides take precedence.

The file is an experiment, with or without `# @package _global_`: its groups choose options, its keys set values. It may
do what an experiment may (config/trust.py). All keys of other programs are reported in one error message.
"""

import functools
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from lmtrain.config import safe_yaml
from lmtrain.config.aliases import SECTIONS, absent, answer, used_here
from lmtrain.config.override_text import leaves_of, quoted, written
from lmtrain.config.sections import all_keys
from lmtrain.errors import UserError

_WHOLE = ("objective", "model", "data", "optimizer", "trainer", "run")  # sections that a run's config.yaml has


def parsed(path: Path) -> dict[str, Any]:
    """Returns the keys of the file; raises UserError if it can't be read or has none."""
    tree = safe_yaml.read(path)
    if not isinstance(tree, dict) or not tree:
        raise UserError(f"{path} holds no keys: a config has lines such as `model: gpt_small`")
    return tree


def is_whole(tree: Mapping[str, Any]) -> bool:
    """Returns whether these keys are a run's complete config, as in its config.yaml, without defaults to add."""
    return all(isinstance(tree.get(section), dict) and "_self_" not in tree for section in _WHOLE) and "seed" in tree


def as_words(tree: Mapping[str, Any], path: Path, groups: Sequence[str]) -> list[str]:
    """Converts the file's keys to overrides, groups first.

    Args:
        groups: names of the config groups.

    Raises:
        UserError: the file has keys of Hydra's own or of another program.
    """
    if "hydra" in tree:
        found = f"{path} has keys of Hydra's own (hydra), which a config file given by itself may not set"
        raise UserError(f"{found}: type them on the command line")
    keys = {key: value for key, value in tree.items() if key != "defaults"}
    known = {key.name for key in all_keys()}
    _refuse_foreign(keys, known, groups, path)
    words = [*_of_defaults(tree.get("defaults"), groups, path), *_of_keys(keys, known, groups, path)]
    return sorted(words, key=lambda word: word.partition("=")[0] not in groups)


def _of_defaults(entries: Any, groups: Sequence[str], path: Path) -> Iterator[str]:
    """Yields the options that a defaults list chooses: `- override /model: gpt_small`, or without `override /`."""
    for entry in entries or ():
        if entry == "_self_":
            continue
        (name, option), *more = entry.items() if isinstance(entry, dict) else [(str(entry), None)]
        group = str(name).removeprefix("override ").removeprefix("optional ").lstrip("/").partition("@")[0]
        if more or group not in groups or not isinstance(option, str):
            found = f"{path}: a config file given by itself can't have the entry {entry!r} in its defaults"
            raise UserError(f"{found}: write `- override /group: option`, or give its folder with --config-dir")
        yield _choice(group, option, path)


def _choice(group: str, option: str, path: Path) -> str:
    """Returns group=option; raises UserError if the option is a path out of the config folders, except for a model."""
    is_name = re.fullmatch(r"[\w.-]+(/[\w.-]+)*", option, re.ASCII) and ".." not in option.split("/")
    if not is_name and (group != "model" or "$" in option):
        raise UserError(f"{path}: {group}: {option} is not a name of an option")
    return f"{group}={option if is_name else quoted(option)}"


def _of_keys(tree: Mapping[Any, Any], known: Collection[str], groups: Sequence[str], path: Path) -> Iterator[str]:
    for dotted, value in leaves_of(tree, known):
        if dotted in groups and isinstance(value, str):
            yield _choice(dotted, value, path)
        elif dotted in groups and value is None:
            continue  # an empty section
        else:
            text = functools.partial(_text, where=f"{path}: {dotted}")
            yield f"{'' if dotted in known else '++'}{dotted}={written(value, text)}"


def _text(value: Any, where: str) -> str:
    """Quotes a string so that Hydra's grammar reads it back unchanged; interpolations are kept."""
    if not isinstance(value, str):
        raise UserError(f"{where} is {type(value).__name__} {value}: put it between quotes")
    single = "${" in value and '"' in value and "'" not in value  # Hydra reads no escaped quotes inside of ${...}
    return f"'{value}'" if single else quoted(value)


def _refuse_foreign(keys: Mapping[Any, Any], known: Collection[str], groups: Collection[str], path: Path) -> None:
    """Raises UserError with what each key of another program is here, if there are any.

    It gives no command: defaults, formats of rows and prompts, and what a batch counts differ between the programs.
    """
    found = {key: value for key, value in _entries(keys, known, groups) if key not in known}
    if all(key in groups or (absent(key) or used_here(key, known)) is None for key in found):
        return
    told = {key: _answer(key, value, known, groups) for key, value in found.items()}
    width = max(map(len, told))
    lines = "\n".join(f"  {key:<{width}}  {answer}" for key, answer in told.items())
    why = "defaults that they don't name, formats of prompts, and what a batch counts are others here"
    begun = f"{path} has keys of another program, whose configs are not translated: {why}"
    begin = "Begin with a recipe (experiment=..., see --help); --cfg shows the result, lmtrain.inspect the prompts"
    raise UserError(f"{begun}. Its keys, one by one:\n\n{lines}\n\n{begin}")


def _answer(key: str, value: Any, known: Collection[str], groups: Collection[str]) -> str:
    here = key if key in groups else used_here(key, known)
    return absent(key) or (here and answer(here, value)) or "nothing here has that name"


def _entries(keys: Mapping[Any, Any], known: Collection[str], groups: Collection[str]) -> Iterator[tuple[str, Any]]:
    """Yields the settings of a file that say something, those in sections with dotted names."""
    for name, value in keys.items():
        inside = isinstance(value, dict) and (name in groups or str(name).lower() in SECTIONS)
        for key, inner in leaves_of({name: value}, known) if inside else [(str(name), value)]:
            if inner not in (None, "", [], {}):
                yield key, inner
