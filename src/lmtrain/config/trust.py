"""What somebody else's file may set: an experiment of --config-dir, a named yaml, a run's config.yaml, a pipeline.

Such a file may set what the schema opens to it (constraints.py). Anything else counts only where the user types it: on
the command line, in Python to `lmtrain.compose`, or by naming the file with `--trust FILE`. The same holds for values
that read the environment, since they could be sent elsewhere. An option of conf/ that such a file chooses is judged as
if the file had the option's content.

Keys marked CODE let code run that is not lmtrain's. For them the user is asked again by each command that reads a run;
processes that lmtrain starts itself get what was typed on their command line. Imports no torch.
"""

import functools
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hydra import compose as hydra_compose
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from lmtrain.config import environment, interpolations, safe_yaml
from lmtrain.config.config_files import ConfigFile, file_of, hydra_over
from lmtrain.config.constraints import CLOSED, SOURCE, Theirs
from lmtrain.config.defaults import conf_dir, options_of
from lmtrain.config.keys import Key, at, flat, keys_of, value_of
from lmtrain.config.override_text import bare_or_quoted, written
from lmtrain.config.overrides import leaves, parse_all
from lmtrain.config.schema_data import DataConfig
from lmtrain.config.sections import all_keys, classes
from lmtrain.errors import UserError, naming

CODE = tuple(key.name for key in all_keys() if key.is_code)
Grants = Mapping[str, Any]  # what the user has granted: keys of CODE, with their values

Value = tuple[Key, str, Any]  # a value that is no container, its key, and the dotted name that it has in the config


@dataclass(frozen=True)
class Foreign:
    """A file that gives overrides, such as a pipeline or a named yaml, and the overrides that the user typed."""

    file: Path
    typed: Sequence[str]


JUDGED = Foreign(conf_dir(), ())  # says that a config with more overrides has passed `refuse`, so that these need not


def refuse(
    tree: DictConfig, plain: Mapping[str, Any], typed: Sequence[str], where: Path, files: Callable[[], list[ConfigFile]]
) -> None:
    """Raises UserError if a composed config has what somebody else's file may not set, and the user has not typed.

    Args:
        tree, plain: the config, and the same resolved.
        typed: the overrides that the user typed.
        where: the file or folder of somebody else.
        files: returns the files that the config is composed of.
    """
    judge = _Judge(tree, plain, typed, where, files)
    for key, reading in environment.readings(tree).items():
        if not judge.is_ours(key):
            raise UserError(environment.refusal(key, reading, str(judge.source(key) or where)))
    of_schema = _values(plain, {key.name: key for key in all_keys()})
    for found in (of_schema, _of_classes(plain)):  # classes are imported when all else is in order
        files_of = {name: judge.source(name) for name in judge.wrong(found)}
        if files_of:
            words = {name: _typed(name, at(plain, name.split("."))) for name in files_of}
            # An option of ours that their file has chosen is typed as a whole.
            ours = {name: file for name, file in files_of.items() if file is not None and environment.is_trusted(file)}
            words |= {name: f"{file.parent.name}={file.stem}" for name, file in ours.items()}
            theirs = next((file for name, file in files_of.items() if name not in ours and file is not None), where)
            raise UserError(_refusal(words, theirs))


class _Judge:
    """Says which values of a composed config are somebody else's; the arguments are those of `refuse`."""

    def __init__(
        self, tree: DictConfig, plain: Mapping[str, Any], typed: Sequence[str], where: Path,
        files: Callable[[], list[ConfigFile]],
    ) -> None:  # fmt: skip
        folder = where if where.is_dir() else where.parent
        given = {key for key, value in leaves(typed).items() if not isinstance(value, dict)}
        # A typed option of a group is not a value: it is part of `usual`.
        self.given = {key for key in given if not any((place / key).is_dir() for place in (conf_dir(), folder))}
        self.raw, self.files = OmegaConf.to_container(tree, resolve=False), files
        packages = at(plain, ("run", "allow_target")) if self.is_ours("run.allow_target") else ()
        self.theirs = Theirs(folder, tuple(map(str, packages or ())))
        self.usual = functools.cache(lambda: _without_theirs((*typed, *_chosen_by_trusted(files))))

    def source(self, name: str) -> Path | None:
        """Returns the file that sets a value, or None if it is not known."""
        return file_of(*_written(self.raw, name), self.files())

    def is_ours(self, name: str) -> bool:
        """Returns whether the user has typed a value, or it is in a file named with --trust."""
        return not self.given.isdisjoint(_with_sections(name)) or environment.trusts(self.source(name))

    def wrong(self, values: Iterable[Value]) -> list[str]:
        """Returns the names, as they can be typed, of the values that only the user may set and has not."""
        found = [
            _asked(key.name, name)
            for key, name, value in values
            if not (_is_open(key, name, value, self.theirs) or at(self.usual(), name.split(".")) == value)
            and not self.is_ours(name)
        ]
        return list(dict.fromkeys(found))


def _of_classes(plain: Mapping[str, Any]) -> Iterator[Value]:
    """Yields the values of options that only the classes of objective, model, optimizer and schedule declare."""
    known = {key.name for key in all_keys()}
    named = [name for name, _ in flat(dict(plain)) if name.count(".") == 1 and name not in known]
    if any(name.startswith(("objective.", "model.", "optimizer.", "schedule.")) for name in named):
        keys = [key for section, of in classes(plain).items() for key in keys_of(of, f"{section}.")]  # type: ignore[arg-type]
        yield from _values(plain, {key.name: key for key in keys if key.name not in known})


def _values(plain: Mapping[str, Any], keys: Mapping[str, Key]) -> Iterator[Value]:
    """Yields the values of these keys; nothing is asked by null and empty containers."""
    for name, value in flat(dict(plain)):
        key = next((keys[part] for part in _with_sections(name) if part in keys), None)
        if key is not None and value is not None and not isinstance(value, dict | list):
            yield key, name, value


def _is_open(key: Key, name: str, value: Any, theirs: Theirs) -> bool:
    inside = [part for part in name.removeprefix(key.name).split(".") if part and not part.isdigit()]
    return key.open.fits(inside[-1] if inside else "", value, theirs) or (key.is_code and not value)


def _with_sections(name: str) -> list[str]:
    """Returns a dotted name and those of its sections, innermost first."""
    parts = name.split(".")
    return [".".join(parts[:length]) for length in range(len(parts), 0, -1)]


def _written(raw: Any, name: str) -> tuple[str, Any]:
    """Returns the name and text of the interpolation that a value comes from, or else its name and value."""
    for section in reversed(_with_sections(name)):
        found = at(raw, section.split("."))
        if isinstance(found, str):
            return section, found
    return name, at(raw, name.split("."))


def _without_theirs(words: Sequence[str]) -> dict[str, Any]:
    """Returns the config that the user would get without the files of somebody else; {} if it can't be composed."""
    folder, chosen, others = conf_dir(), [], []
    for word in parse_all(words):
        names = word.value if isinstance(word.value, list) else [word.value]
        if not (folder / word.key).is_dir():
            others.append(word.text)
        elif {str(name) for name in names} <= {*options_of(word.key, [folder])}:
            chosen.append(f"{word.key}={written(word.value, str)}")
    return _composed((*chosen, *others)) or _composed(tuple(chosen))


@functools.lru_cache(8)
def _composed(words: tuple[str, ...]) -> dict[str, Any]:
    try:
        with hydra_over([conf_dir()]):
            return interpolations.resolved(hydra_compose("config", overrides=[*words]))
    except (HydraException, OmegaConfBaseException, UserError, ValueError):
        return {}


def _chosen_by_trusted(files: Callable[[], list[ConfigFile]]) -> Iterator[str]:
    """Yields the options that files named with --trust choose in their defaults lists, as overrides."""
    for file in files() if environment.flags() else ():
        tree = safe_yaml.read(file.path) if environment.trusts(file.path) else {}
        for entry in tree.get("defaults") or ():
            for name, option in entry.items() if isinstance(entry, dict) else ():
                yield f"{str(name).removeprefix('override ').lstrip('/')}={option}".replace("'", "")


def _asked(key: str, name: str) -> str:
    """Returns the name by which a value within `key` can be typed: that of the list it is in, if it is in one."""
    parts = name.split(".")
    index = next((i for i, part in enumerate(parts) if part.isdigit() and i >= len(key.split("."))), len(parts))
    return ".".join(parts[:index])


def _refusal(typed: Mapping[str, str], where: Path) -> str:
    """Returns the message for values that somebody else's file sets; `typed` has the override that would set each."""
    words = [word if len(word) < 200 else f"{word[:200]}..." for word in dict.fromkeys(typed.values())][:9]
    opens = {key.name: key.open.to for key in all_keys() if key.open is not CLOSED}
    to = next((opens[part] for key in typed for part in _with_sections(key) if part in opens), None)
    why = "since it could run code, write, fetch or send what you did not ask for"
    found = f"{where} sets {' and '.join(words)}, which counts only where you type it, on the command line, {why}"
    may = f" (a file may set it to {to})" if to else ""
    return f"{found}{may}. If you trust it, add {' '.join(words)}, or --trust FILE with that yaml file"


def _typed(key: str, value: Any) -> str:
    if isinstance(value, list) and not any(isinstance(entry, dict | list) for entry in value):
        return f"{key}=[{','.join(bare_or_quoted(str(entry)) for entry in value)}]"
    return f"{key}={written(value)}"


def addresses(data: DataConfig) -> list[str]:
    """Returns the values of a run's data, as overrides, that are addresses to be opened."""
    named = [(key.name, value) for key in keys_of(DataConfig) if key.open is SOURCE
             for _, value in flat(getattr(data, key.name))]  # fmt: skip
    return [f"data.{name}={value}" for name, value in named if isinstance(value, str) and "://" in value]


def refuse_addresses(data: DataConfig, file: Path) -> None:
    """Raises UserError if the data of a run's config.yaml is at an address and the file is not trusted."""
    words = addresses(data)
    if words and not environment.is_trusted(file):
        raise UserError(_refusal({word.partition("=")[0]: word for word in words}, file))


def granted(config: Any) -> dict[str, Any]:
    """Returns what a checked config grants, all of which the user has typed."""
    values = {key: value_of(config, key) for key in CODE}
    return {key: value for key, value in values.items() if value}


def as_word(grants: Grants) -> str:
    """Encodes grants as a command-line argument for a process started by lmtrain."""
    return json.dumps(dict(grants))


def of_words(words: Sequence[str]) -> Grants:
    """Decodes the argument made by `as_word`; no grants if there are no arguments."""
    return json.loads(words[0]) if words else {}


def refuse_code(tree: DictConfig, grants: Grants, where: Path) -> None:
    """Raises UserError if a run's config.yaml lets code run that was not granted.

    Otherwise resolves these keys in place, so that no interpolation in them can change its value later.
    """
    asked = {key: OmegaConf.select(tree, key) for key in CODE}
    asked = {key: OmegaConf.to_container(v, resolve=True) if OmegaConf.is_config(v) else v for key, v in asked.items()}
    wanted = {key: value for key, value in asked.items() if value and not _within(key, value, grants)}
    if wanted:
        raise UserError(_refusal({key: _typed(key, value) for key, value in wanted.items()}, where))
    for key, value in asked.items():
        if value is not None:
            OmegaConf.update(tree, key, interpolations.escaped(value), merge=False)


def _within(key: str, value: Any, grants: Grants) -> bool:
    if key == "run.allow_target" and isinstance(value, list):
        return set(map(str, value)) <= set(map(str, grants.get(key, ())))
    if key == "tokenizer.trust_remote_code" and grants.get("model.trust_remote_code"):
        return True  # conf/tokenizer/pretrained.yaml copies the model's value to its tokenizer
    return bool(grants.get(key) == value)


def of_files(paths: Iterable[str]) -> list[str]:
    """Returns the keys of CODE in the files named with --trust, as overrides, which reach all processes.

    Raises:
        UserError: a file can't be read.
    """
    found: dict[str, Any] = {}
    for path in (Path(name).expanduser() for name in paths):
        with naming("--trust"):
            tree = safe_yaml.read(path)
        found |= {key: value for key in CODE if (value := at(tree, key.split(".")))}
    return [_typed(key, value) for key, value in found.items()]


def of_typed(words: Iterable[str]) -> list[str]:
    """Returns the overrides that set a key of CODE."""
    return [word for word in words if word.lstrip("+~").partition("=")[0] in CODE]
