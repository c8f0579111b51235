"""Reads a yaml file named on the command line, `train my.yaml`, as overrides; typed overrides take precedence.

The file is an experiment, with or without `# @package _global_`: its groups choose options, its keys set values. It may
do what an experiment may (config/trust.py). All keys of other programs are reported in one error message.
"""

import functools
import re
import shlex
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lmtrain.config import compose, safe_yaml
from lmtrain.config.aliases import SECTIONS, absent, translated, used_here
from lmtrain.config.defaults import conf_dir, options_of
from lmtrain.config.override_text import bare_or_quoted, leaves_of, quoted, written
from lmtrain.config.sections import all_keys
from lmtrain.data.sources import files
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
        raise UserError(
            f"{path} has keys of Hydra's own (hydra), which a config file given by itself may not "
            "set: type them on the command line"
        )
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


_TABLE: dict[str, Any] = safe_yaml.table(__file__, "foreign.yaml")
_MODEL = "model=OWNER/MODEL"
_UNKNOWN = "nothing here has that name"
_NEEDS = re.compile(r"\(with (\w+)=([\w, ]+)")  # the group and the options with which a key has a meaning


@dataclass
class Translation:
    """What a file says: the overrides by their keys, its keys without one and why, and those that say nothing here."""

    overrides: dict[str, str] = field(default_factory=dict)
    answers: dict[str, str] = field(default_factory=dict)
    left_out: list[str] = field(default_factory=list)

    def set(self, words: Sequence[str]) -> None:
        self.overrides |= {word.partition("=")[0]: word for word in words}

    def chosen(self, group: str) -> str:
        return self.overrides.get(group, "=").partition("=")[2]


def _refuse_foreign(keys: Mapping[Any, Any], known: Collection[str], groups: Collection[str], path: Path) -> None:
    """Raises UserError with the command that does the same if there are keys of another program."""
    found = dict(_entries(keys, known, groups))
    foreign = {k for k in found if k not in known and k not in groups and (_here(k, known) or absent(k) is not None)}
    if not foreign:
        return
    program, made = program_of(found), Translation()
    text = any(
        entry.get("type") in _TABLE["text_types"] for entry in found.get("datasets", []) if isinstance(entry, dict)
    )
    objective = _TABLE["programs"].get(program, {}).get("objective", "causal_lm")
    made.set([f"objective={'causal_lm' if text or found.keys() & set(_TABLE['pretraining']) else objective}"])
    for name in sorted(found, key=lambda name: name not in _TABLE["first"]):
        if name not in (*_TABLE["datasets"], *_TABLE["accumulation"]):
            _add(made, name, found[name], known, groups)
    _add_batch(made, found)
    _add_data(made, found)
    _refuse_together(made)
    raise UserError(
        f"{path} has keys of {program or 'another program'}; the command that does the same:\n\n{_told(made)}"
    )


def program_of(keys: Any) -> str | None:
    """Returns the program whose config has these keys, or None."""
    names = keys.keys() if isinstance(keys, dict) else set()
    return next((program for program, its in _TABLE["programs"].items() if names & set(its["keys"])), None)


def _entries(keys: Mapping[Any, Any], known: Collection[str], groups: Collection[str]) -> Iterator[tuple[str, Any]]:
    """Yields the settings of a file that say something, those in sections with dotted names."""
    for name, value in keys.items():
        inside = isinstance(value, dict) and (name in groups or str(name).lower() in SECTIONS)
        for key, inner in leaves_of({name: value}, known) if inside else [(str(name), value)]:
            if inner not in (None, "", [], {}):
                yield key, inner


def _here(name: str, known: Collection[str]) -> str | None:
    """Returns what another project's name is here, unless it is the same."""
    here = used_here(name, known)
    return None if here is not None and here.partition(" ")[0] == name else here


def _add(made: Translation, name: str, value: Any, known: Collection[str], groups: Collection[str]) -> None:
    here, why = _here(name, known), absent(name) or _TABLE["never"].get(name)
    words, rest = translated(name, here or name, value) if why is None else ([], "")
    if words and words[0].startswith("model=") and not _is_model(str(value)):
        made.set([_MODEL])
        made.answers[name] = f"{value} is no folder here, nor a name of the hub: name the model in place of {_MODEL}"
    elif words and _has_meaning(made, rest):
        made.set(words)
    elif words:
        made.answers[name] = f"{' '.join(words)} {rest}"
    elif here is None and (name in known or (name in groups and str(value) in options_of(name, [conf_dir()]))):
        made.set([f"{name}={written(value, bare_or_quoted)}"])
    elif value is False or name in _TABLE["quiet"] or "leave it out" in (why or ""):
        made.left_out.append(name)
    else:
        unknown = f"there is no {name}={value}" if name in groups else _UNKNOWN
        made.answers[name] = why or _TABLE["answers"].get(name) or here or unknown


def _is_model(name: str) -> bool:
    return Path(name).expanduser().is_dir() or re.fullmatch(r"\w[\w.-]*/[\w.-]+", name, re.ASCII) is not None


def _has_meaning(made: Translation, rest: str) -> bool:
    """Returns whether a key whose entry ends in `rest`, such as (with peft=lora), can be set; chooses other groups."""
    needs = _NEEDS.search(rest)
    if needs is None:
        return True
    group, options = needs[1], re.split(r", | or ", needs[2])
    if group in ("objective", "peft"):
        return made.chosen(group) in options or (group == "peft" and made.chosen(group) not in ("", "none"))
    made.overrides.setdefault(group, f"{group}={options[0]}")
    return True


def _add_batch(made: Translation, found: Mapping[str, Any]) -> None:
    """Sets the rows of a step of one device, and a run's length if it is counted in epochs alone."""
    steps = next((found[name] for name in _TABLE["accumulation"] if name in found), 1)
    if isinstance(steps, int) and (micro := made.chosen("data.micro_batch_size")):
        made.set([f"data.global_batch_size={int(micro) * steps}"])
        made.answers["devices"] = "data.global_batch_size counts the rows of all: multiply it by their number"
    if "trainer.max_epochs" in made.overrides and "trainer.max_steps" not in made.overrides:
        made.set(["trainer.max_steps=null"])


def _add_data(made: Translation, found: Mapping[str, Any]) -> None:
    sources = [s for name in _TABLE["datasets"] for s in _sources(made, name, found)]
    if not sources:
        return
    option = _TABLE["data"][made.chosen("objective")]
    if len(sources) == 1:
        where = [] if "path" in sources[0] else ["data.source=hub"]
        words = [f"data.{key}={written(value, bare_or_quoted)}" for key, value in sources[0].items()]
    elif all(source.keys() == {"path"} for source in sources):
        where, words = [], [f"data.path={written([s['path'] for s in sources], bare_or_quoted)}"]
    else:
        option = "preference" if option.startswith("preference") else "mixture"
        where, words = ["data.source=mixture"], [f"data.mixture={written(sources, bare_or_quoted)}"]
    made.set([f"data={option}", *where, *words])


def _sources(made: Translation, name: str, found: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yields the data that a key names, as keys of `data`."""
    entries: Any = found.get(name, [])
    if isinstance(entries, str):
        folder = str(found.get("dataset_dir", "data"))
        entries = _registered(made, entries, folder) if name == "dataset" else [{"path": entries}]
    for entry in (one for one in (entries if isinstance(entries, list) else [entries]) if isinstance(one, dict)):
        source = {here: entry[key] for key, here in _TABLE["dataset_key"].items() if entry.get(key)}
        file = Path(str(source.get("name")))
        if "path" not in source and (file.suffix in files.FORMATS or file.expanduser().exists()):
            source["path"] = source.pop("name")
        for key in entry.keys() - _TABLE["dataset_key"].keys() - set(_TABLE["seen"]):
            made.answers[f"{name}: {key}"] = "data.columns and data.conversation_format name columns and formats"
        yield source


def _registered(made: Translation, names: str, folder: str) -> list[dict[str, Any]]:
    """Returns the entries of LLaMA-Factory's dataset_info.json, or files of these names where it has none."""
    index, wanted = Path(folder) / "dataset_info.json", [name.strip() for name in names.split(",")]
    known = safe_yaml.read(index) if index.is_file() else {}
    if not known.keys() >= set(wanted):
        made.answers["dataset"] = f"names that are not in {index}: put their files into data.path"
    entries = [known.get(name) or {"file_name": f"{name}.json"} for name in wanted]
    return [{**e, "file_name": str(index.parent / str(e["file_name"]))} if "file_name" in e else e for e in entries]


def _refuse_together(made: Translation) -> None:
    """Takes out what does not go with other settings of the file, and names what else is refused."""
    for word, with_ in _TABLE["apart"].items():
        other = next((o for o in with_ if o in made.overrides.values()), None)
        if other is not None and word in made.overrides.values():
            of_it = (word, f"{word.replace('=', '.')}.")  # trainer=deepspeed, trainer.deepspeed.config=...
            made.overrides = {key: w for key, w in made.overrides.items() if not w.startswith(of_it)}
            made.answers[word] = f"does not go with {other}"
    try:
        compose.check(compose.compose(list(made.overrides.values())))
    except UserError as error:
        made.answers["refused as it is"] = str(error)


def _told(made: Translation) -> str:
    """Formats the command, a setting per line, and what it leaves out."""
    order = {group: i for i, group in enumerate(_TABLE["order"])}
    words = sorted(made.overrides.values(), key=lambda w: order.get(re.split(r"[.=]", w)[0], len(order)))
    lines = ["  python -m lmtrain.train", *(f"    {shlex.quote(word)}" for word in words)]
    text = " \\\n".join(lines)
    if made.answers:
        width = max(map(len, made.answers))
        text += "\n\nnot in it (--cfg shows all keys and defaults):\n"
        text += "\n".join(f"  {name:<{width}}  {said}" for name, said in made.answers.items())
    return text + (f"\n\nneeds nothing here: {', '.join(made.left_out)}" if made.left_out else "")
