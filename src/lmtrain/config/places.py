"""Refuses untrusted configs that say where to write, open URLs or read the environment. Imports no torch.

lmtrain writes below the run folder, the cache, and paths that the user typed. An untrusted file (an experiment in
--config-dir, a run's config.yaml, a pipeline) could otherwise make a run, an evaluation or a callback overwrite any of
the user's files. It may name local data and hub datasets, but no URL (`https://`, `s3://`, `file://`,
`zip://a::https://`), which could refer to a server inside the user's network.
"""

import functools
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from lmtrain.config.config_files import composed_files, file_of
from lmtrain.config.environment import is_trusted, readings, refusal
from lmtrain.config.interpolations import plain
from lmtrain.config.keys import flat
from lmtrain.config.override_text import leaves
from lmtrain.errors import UserError

_RUNS = ("run.dir", "run.root", "sweep.root")  # new folders are created there; folders with other content are not used
_FILES = ("data.cache_dir", "evaluate.dir", "tune.dir", "inspect.html", "generate.out")
_OBJECTS = ("callbacks.extra", "logger")  # objects built with arguments from the config
_DATA = ("data.path", "data.val_path", "data.val_sets", "data.mixture", "data.source_options")  # data to read
_NAMES_A_PLACE = re.compile(r"(dir|path|root|folder)s?$")  # argument names: dirpath, save_dir, ...
_OUTSIDE = re.compile(r"^([/~]|file:)|(^|/)\.\.(/|$)")
Asked = tuple[str, Any, str, Any]  # key, value, and the key it comes from with its unresolved value


def refuse(tree: DictConfig, overrides: Sequence[str], config_dir: str, config_name: str) -> None:
    """Raises UserError if an untrusted file of `config_dir` sets what only the user may set; see `_reserved`.

    Args:
        tree: the config composed of the files and the overrides.
    """
    typed = leaves(overrides)
    files = functools.cache(lambda: composed_files(overrides, config_dir, config_name))
    for key, written, message in _reserved(tree, Path(config_dir)):
        if typed.get(key, ...) == written:
            continue
        file = file_of(key, written, files())
        if file is None or not is_trusted(file):
            raise UserError(message(str(file or config_dir)))


def refuse_words(tree: DictConfig, words: Sequence[str], typed: Sequence[str], file: Path) -> None:
    """Raises UserError, as `refuse`, for overrides in an untrusted file such as a pipeline."""
    if is_trusted(file):
        return
    ours, theirs = leaves(typed), leaves(words)
    for key, written, message in _reserved(tree, file.parent):
        if theirs.get(key, ...) == written and ours.get(key, ...) != written:
            raise UserError(message(str(file)))


def _reserved(tree: DictConfig, own: Path) -> Iterator[tuple[str, Any, Callable[[str], str]]]:
    """Yields what only the user may set: values that read the environment, places outside `own`, and URLs of data.

    Each is a key, its unresolved value, and a function that returns the message for a file that sets it.
    """
    for key, reading in readings(tree).items():
        yield key, reading.text, functools.partial(refusal, key, reading)
    for key, value, origin, written in asked(tree):
        if _elsewhere(key, value, own):
            yield origin, written, functools.partial(_refusal, key, value)


def refuse_space(words: Sequence[str], file: Path) -> None:
    """Raises UserError, as `refuse`, for values in an untrusted file for the trials of a sweep."""
    values = (pair for word in words for pair in leaves([word]).items())  # a key may have several values
    for key, value in values if not is_trusted(file) else ():
        asks = key in (*_RUNS, *_FILES) or key.startswith((*_OBJECTS, *_DATA))
        if asks and isinstance(value, str) and _elsewhere(key, value, file.parent):
            raise UserError(_refusal(key, value, str(file)))


def addresses(data: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yields the key and value of each URL in a checked section `data`."""
    for key in _DATA:
        for inner, value in flat(data.get(key.removeprefix("data.")), key):
            if isinstance(value, str) and "://" in value:
                yield inner, value


def refuse_addresses(data: Mapping[str, Any], file: Path) -> None:
    """Raises UserError if the section `data` of a run's config.yaml has URLs and the file is untrusted."""
    for key, value in addresses(data) if not is_trusted(file) else ():
        raise UserError(_refusal(key, value, str(file)))


def asked(tree: DictConfig) -> Iterator[Asked]:
    """Yields all text values of a config that may name a place to write to or a URL to read."""
    for key in (*_RUNS, *_FILES, *_OBJECTS, *_DATA):
        section, _, name = key.rpartition(".")
        node: Any = OmegaConf.select(tree, section) if section else tree
        child = node._get_node(name) if OmegaConf.is_dict(node) and name in node else None
        if child is not None:
            is_tree = OmegaConf.is_config(child) and not child._is_interpolation()
            raw = OmegaConf.to_container(child, resolve=False) if is_tree else child._value()
            yield from _walk(key, raw, plain(child))


def _walk(key: str, raw: Any, value: Any, origin: tuple[str, Any] | None = None) -> Iterator[Asked]:
    if origin is None and isinstance(raw, str):
        origin = (key, raw)
    if isinstance(value, dict | list):
        for name, inner in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _walk(f"{key}.{name}", raw[name] if origin is None else None, inner, origin)
    elif isinstance(value, str):
        yield (key, value, *(origin or (key, value)))


def _elsewhere(key: str, value: str, own: Path) -> bool:
    """Returns whether a value names a place that only the user may choose; `own` is the folder of the file."""
    name = key.rpartition(".")[2]
    if key.startswith(_DATA):
        return "://" in value
    if key.startswith(_OBJECTS):
        return name != "_target_" and bool(_NAMES_A_PLACE.search(name) or _OUTSIDE.search(value))
    place = Path(os.path.normpath(Path(value).expanduser().absolute()))
    if key == "data.cache_dir" and value in (os.environ.get("LMTRAIN_CACHE"), "~/.cache/lmtrain"):
        return False
    inside = place.is_relative_to(own.resolve()) or place.is_relative_to(own.absolute())
    return not (inside or (key in _RUNS and place.is_relative_to(Path.cwd())))


def _refusal(key: str, value: str, file: str) -> str:
    if key.startswith(_DATA):
        return (
            f"{key}={value}: {file} has an address opened, which a file may only do if you trust it, since it "
            f"could be an address that only you can reach: set {'.'.join(key.split('.')[:2])} on the command "
            f"line, name a local copy, or add --trust {file}"
        )
    return (
        f"{key}={value}: {file} says where to write. Unless you trust it, a file may name only places inside the "
        f"run's own folder: set {key.partition('.extra.')[0]} on the command line, remove the key from the file, "
        f"or add --trust {file}"
    )


def outside(arguments: Any, roots: Sequence[Path], key: str = "") -> Iterator[tuple[str, Path]]:
    """Yields the name and path of each argument of callbacks and loggers that is a path below none of `roots`."""
    if isinstance(arguments, dict | list):
        for name, inner in arguments.items() if isinstance(arguments, dict) else enumerate(arguments):
            yield from outside(inner, roots, str(name))
    elif isinstance(arguments, str | Path) and key != "_target_" and str(arguments):
        text = str(arguments).removeprefix("file:")
        if _OUTSIDE.search(text) or _NAMES_A_PLACE.search(key):
            place = Path(text).expanduser().resolve()
            if "://" not in text and not any(place.is_relative_to(root.resolve()) for root in roots):
                yield key, place
