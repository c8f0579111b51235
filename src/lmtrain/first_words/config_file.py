"""A yaml that is named on the command line, `train my.yaml`: its keys as overrides, below those that are typed.

The file is an experiment, with or without `# @package _global_`: its groups choose options, its keys set values. It may
do what an experiment may (config/trust.py). Keys of other programs are all answered in one message.
"""

import functools
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from lmtrain.config import environment, places, safe_yaml, trust
from lmtrain.config.aliases import absent, used_here, with_value
from lmtrain.config.override_text import quoted, written
from lmtrain.config.sections import all_keys
from lmtrain.errors import UserError
from lmtrain.files import read_regular

_WHOLE = ("objective", "model", "data", "optimizer", "trainer", "run")  # sections that a run's config.yaml has
_THEIRS = {  # a key that only one program has, and its name
    "base_model": "axolotl", "micro_batch_size": "axolotl", "sequence_len": "axolotl",
    "finetuning_type": "LLaMA-Factory", "cutoff_len": "LLaMA-Factory", "stage": "LLaMA-Factory",
    "template": "LLaMA-Factory", "dataset_name": "TRL", "model_name_or_path": "transformers",
    "out_dir": "nanoGPT or litgpt", "checkpoint_dir": "litgpt",
}  # fmt: skip


def parsed(path: Path) -> dict[str, Any]:
    """The keys of the file; UserError where it can't be read or holds none."""
    try:
        text = read_regular(path)
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path} can't be read: {error}") from None
    tree = safe_yaml.parse(text, str(path))
    if not isinstance(tree, dict) or not tree:
        raise UserError(f"{path} holds no keys: a config has lines such as `model: gpt_small`")
    return tree


def is_whole(tree: Mapping[str, Any]) -> bool:
    """Whether these are all keys of a run, as its config.yaml has them, to which nothing is added."""
    return all(isinstance(tree.get(section), dict) and "_self_" not in tree for section in _WHOLE) and "seed" in tree


def as_words(tree: Mapping[str, Any], path: Path, groups: Sequence[str], typed: Sequence[str]) -> list[str]:
    """The file's keys as overrides, groups first.

    Args:
        groups: names of the groups of options.
        typed: what the user typed, which may open what the file says.

    Raises:
        UserError: keys are those of another program, or it opens what only the user may.
    """
    if "hydra" in tree:
        raise UserError(f"{path} has keys of Hydra's own (hydra), which a file that is named alone may not: type them")
    keys = {key: value for key, value in tree.items() if key != "defaults"}
    known = {key.name: str(key.type) for key in all_keys()}
    _refuse_foreign(keys, known, groups, path)
    words = [*_of_defaults(tree.get("defaults"), groups, path), *_of_keys(keys, known, groups, path)]
    if not environment.is_trusted(path):
        trust.refuse_words(words, typed, str(path))
    return sorted(words, key=lambda word: word.partition("=")[0] not in groups)


def refuse(composed: DictConfig, words: Sequence[str], typed: Sequence[str], path: Path) -> None:
    """Raises UserError where the file reads the environment, or says where to write outside, and nobody vouches."""
    environment.refuse_words(composed, words, typed, path)
    places.refuse_words(composed, words, typed, path)


def _of_defaults(entries: Any, groups: Sequence[str], path: Path) -> Iterator[str]:
    """Options that a defaults list chooses: `- override /model: gpt_small`, or without the first words."""
    for entry in entries or ():
        if entry == "_self_":
            continue
        (name, option), *more = entry.items() if isinstance(entry, dict) else [(str(entry), None)]
        group = str(name).removeprefix("override ").removeprefix("optional ").lstrip("/").partition("@")[0]
        if more or group not in groups or not isinstance(option, str):
            raise UserError(
                f"{path}: the entry {entry!r} of its defaults is not understood in a file that is named alone: write "
                f"`- override /group: option`, or give the folder of your configs with --config-dir"
            )
        yield _choice(group, option, path)


def _choice(group: str, option: str, path: Path) -> str:
    """group=option, where the option is a name; a path would lead out of the folders of configs."""
    is_name = re.fullmatch(r"[\w.-]+(/[\w.-]+)*", option, re.ASCII) and ".." not in option.split("/")
    if not is_name and (group != "model" or "$" in option):
        raise UserError(f"{path}: {group}: {option} is not a name of an option")
    return f"{group}={option if is_name else quoted(option)}"


def _of_keys(tree: Mapping[Any, Any], known: Mapping[str, str], groups: Sequence[str], path: Path) -> Iterator[str]:
    for dotted, value in _leaves(tree, known):
        if dotted in groups and isinstance(value, str):
            yield _choice(dotted, value, path)
        elif dotted in groups and value is None:
            continue  # an empty section
        else:
            text = functools.partial(_text, where=f"{path}: {dotted}")
            yield f"{'' if dotted in known else '++'}{dotted}={written(value, text)}"


def _leaves(tree: Mapping[Any, Any], known: Mapping[str, str], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted keys down to those that the schema knows, or that hold no mapping."""
    for key, value in tree.items():
        dotted = f"{prefix}{key}"
        is_section = isinstance(value, dict) and value and not (dotted in known and "." in dotted)
        if is_section:
            yield from _leaves(value, known, f"{dotted}.")
        else:
            yield dotted, value


def _text(value: Any, where: str) -> str:
    """A text as Hydra's grammar reads it back; interpolations stay what they are."""
    if not isinstance(value, str):
        raise UserError(f"{where} is {type(value).__name__} {value}: put it between quotes")
    single = "${" in value and '"' in value and "'" not in value  # quotes inside are not read through escapes there
    return f"'{value}'" if single else quoted(value)


def _refuse_foreign(keys: Mapping[Any, Any], known: Mapping[str, str], groups: Sequence[str], path: Path) -> None:
    """Raises UserError that lists what each key of another program is called here."""
    answers, ours = list[tuple[str, str]](), set[str]()
    for dotted, value in _leaves(keys, known):
        section = dotted.partition(".")[0]
        if dotted in known or dotted in groups or (section in groups and "." in dotted and not _is_theirs(dotted)):
            ours.add(dotted)
            continue
        if section not in keys or any(name == dotted for name, _ in answers):
            continue
        here, why = used_here(dotted, known) or used_here(section, known), absent(dotted)
        if why is not None or here is not None:
            answers.append((dotted, why or with_value(dotted, str(here), value)))
        elif "." not in dotted:
            answers.append((dotted, "nothing here has that name"))
    if not any(said != "nothing here has that name" for _, said in answers):
        return
    program = next((theirs for name, theirs in _THEIRS.items() if name in dict(answers)), "another program")
    width = max(len(name) for name, _ in answers)
    lines = "\n".join(f"  {name:<{width}}  {said}" for name, said in answers)
    raise UserError(f"{path} has keys of {program}; what each is here (--cfg shows all keys and defaults):\n{lines}")


def _is_theirs(dotted: str) -> bool:
    """Whether a key in a section of ours is a word of others that compose would refuse one at a time."""
    here = used_here(dotted, ())
    return here is not None and here.partition(" ")[0] != dotted
