"""Reads a yaml file named on the command line, `train my.yaml`, as overrides; typed overrides take precedence.

The file is an experiment, with or without `# @package _global_`: its groups choose options, its keys set values. It may
do what an experiment may (config/trust.py). All keys of other programs are reported in one error message.
"""

import functools
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from lmtrain.config import environment, safe_yaml, trust
from lmtrain.config.aliases import absent, used_here, with_value
from lmtrain.config.override_text import leaves_of, quoted, written
from lmtrain.config.sections import all_keys
from lmtrain.errors import UserError

_WHOLE = ("objective", "model", "data", "optimizer", "trainer", "run")  # sections that a run's config.yaml has
_THEIRS = {  # keys that only one other program has, and its name
    "base_model": "axolotl", "micro_batch_size": "axolotl", "sequence_len": "axolotl",
    "finetuning_type": "LLaMA-Factory", "cutoff_len": "LLaMA-Factory", "stage": "LLaMA-Factory",
    "template": "LLaMA-Factory", "dataset_name": "TRL", "model_name_or_path": "transformers",
    "out_dir": "nanoGPT or litgpt", "checkpoint_dir": "litgpt",
}  # fmt: skip
_UNKNOWN = "nothing here has that name"


def parsed(path: Path) -> dict[str, Any]:
    """Returns the keys of the file; raises UserError if it can't be read or has none."""
    tree = safe_yaml.read(path)
    if not isinstance(tree, dict) or not tree:
        raise UserError(f"{path} holds no keys: a config has lines such as `model: gpt_small`")
    return tree


def is_whole(tree: Mapping[str, Any]) -> bool:
    """Returns whether these keys are a run's complete config, as in its config.yaml, without defaults to add."""
    return all(isinstance(tree.get(section), dict) and "_self_" not in tree for section in _WHOLE) and "seed" in tree


def as_words(tree: Mapping[str, Any], path: Path, groups: Sequence[str], typed: Sequence[str]) -> list[str]:
    """Converts the file's keys to overrides, groups first.

    Args:
        groups: names of the config groups.
        typed: the typed overrides, which may permit what the file asks for (config/trust.py).

    Raises:
        UserError: the file has keys of Hydra's own or of another program, or permits what only the user may permit.
    """
    if "hydra" in tree:
        raise UserError(
            f"{path} has keys of Hydra's own (hydra), which a config file given by itself may not "
            "set: type them on the command line"
        )
    keys = {key: value for key, value in tree.items() if key != "defaults"}
    known = {key.name for key in all_keys()}
    _refuse_foreign(keys, known, groups, path)
    words = [*_of_defaults(tree.get("defaults"), groups, path), *_of_keys(keys, known, groups, path)]
    if not environment.is_trusted(path):
        trust.refuse_words(words, typed, str(path))
    return sorted(words, key=lambda word: word.partition("=")[0] not in groups)


def _of_defaults(entries: Any, groups: Sequence[str], path: Path) -> Iterator[str]:
    """Yields the options that a defaults list chooses: `- override /model: gpt_small`, or without `override /`."""
    for entry in entries or ():
        if entry == "_self_":
            continue
        (name, option), *more = entry.items() if isinstance(entry, dict) else [(str(entry), None)]
        group = str(name).removeprefix("override ").removeprefix("optional ").lstrip("/").partition("@")[0]
        if more or group not in groups or not isinstance(option, str):
            raise UserError(
                f"{path}: the entry {entry!r} in its defaults is not supported in a config file given by itself: "
                "write `- override /group: option`, or give the folder of your configs with --config-dir"
            )
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


def _refuse_foreign(keys: Mapping[Any, Any], known: Collection[str], groups: Sequence[str], path: Path) -> None:
    """Raises UserError if there are keys of another program, with the equivalent here of each."""
    answers: dict[str, str] = {}
    for dotted, value in leaves_of(keys, known):
        section = dotted.partition(".")[0]
        if dotted in known or dotted in groups or (section in groups and "." in dotted and not _is_theirs(dotted)):
            continue
        if section not in keys or dotted in answers:
            continue
        here, why = used_here(dotted, known) or used_here(section, known), absent(dotted)
        if why is not None or here is not None:
            answers[dotted] = why or with_value(dotted, str(here), value)
        elif "." not in dotted:
            answers[dotted] = _UNKNOWN
    if set(answers.values()) <= {_UNKNOWN}:
        return
    program = next((theirs for name, theirs in _THEIRS.items() if name in answers), "another program")
    width = max(map(len, answers))
    lines = "\n".join(f"  {name:<{width}}  {said}" for name, said in answers.items())
    raise UserError(f"{path} has keys of {program}; what each is here (--cfg shows all keys and defaults):\n{lines}")


def _is_theirs(dotted: str) -> bool:
    """Returns whether a key in a section of ours is another program's; compose would report only one at a time."""
    here = used_here(dotted, ())
    return here is not None and here.partition(" ")[0] != dotted
