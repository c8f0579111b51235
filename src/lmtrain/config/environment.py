"""Environment variables in configs, `${oc.env:NAME}`: who may read them, and how their values are kept out of files.

A run uses the values resolved at its start. Everything that is written, logged or shown has the unresolved text
instead, so that a config.yaml contains no secret and reads the environment again whenever a run begins.

An untrusted file could send what it reads to any server. Only the command line (or Python), the files of conf/ and
files that the user trusts (`trust`) may read the environment; trust.py refuses others. Imports no torch.
"""

import contextlib
import os
import re
import shlex
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from lmtrain import secrets
from lmtrain.config.defaults import conf_dir
from lmtrain.config.interpolations import escaped, interpolated, plain, variables_read
from lmtrain.config.keys import flat
from lmtrain.config.override_text import quoted
from lmtrain.terminal import visible

OPEN = {"LMTRAIN_CACHE"}  # variables read by conf/ itself: any file may read them, and their values are not hidden

_trusted: set[Path] = set()
_told: set[Path] = set()


@dataclass(frozen=True)
class Reading:
    """A config value that depends on environment variables, through any resolver."""

    text: str  # the unresolved text, which is written to files
    value: Any
    names: tuple[str, ...]  # the variables it reads


def trust(files: Iterable[Path | str]) -> None:
    """Sets the files that may read the environment like the command line, replacing those set before."""
    _trusted.clear()
    _trusted.update(Path(file).expanduser().resolve() for file in files)


def flags() -> list[str]:
    """Returns the --trust flags that pass the trusted files on to a process started by lmtrain."""
    return [word for file in sorted(_trusted) for word in ("--trust", str(file))]


def trusts(file: Path | None) -> bool:
    """Returns whether the user has named the file with --trust."""
    return file is not None and file.resolve() in _trusted


def is_trusted(file: Path) -> bool:
    """Returns whether the user trusts a file; lmtrain's own are always trusted."""
    return trusts(file) or file.resolve().is_relative_to(conf_dir().resolve())


def readings(tree: DictConfig) -> dict[str, Reading]:
    """Maps the dotted keys (list indices are numbers) of all values that depend on the environment to their Readings.

    A value that can't be resolved and reads no variable is left out; resolving the whole config reports the error.
    """
    found: dict[str, Reading] = {}
    with variables_read() as names:
        for key, node in interpolated(tree):
            names.clear()
            value = None
            with contextlib.suppress(OmegaConfBaseException, ValueError):
                value = plain(node)
            if set(names) - OPEN:
                found[key] = Reading(str(node._value()), value, tuple(dict.fromkeys(names)))
    return found


def as_written(text: str) -> str:
    """Escapes a text for config.yaml, from which it is read back unchanged; secrets become `${oc.env:NAME}`."""
    if not secrets.names_in(text):
        return escaped(text)
    # A backslash before an interpolation would escape it and has to be doubled; at the end of the text it must not be.
    written = secrets.hide(text, lambda piece: re.sub(r"(\\+)$", r"\1\1", escaped(piece)))
    return written.removesuffix("\\" * (len(text) - len(text.rstrip("\\"))))


def note(tree: DictConfig) -> dict[str, Reading]:
    """Returns `readings` and hides their variables from now on, except those in folder names, which are on disk."""
    found = readings(tree)
    for key, reading in found.items():
        if not key.startswith(("run.", "run_dir", "sweep.", "evaluate.dir", "evaluate.name", "hydra.")):
            for name in reading.names:
                secrets.note_read(name)
    return found


def typed(found: Mapping[str, Reading], plain: Mapping[str, Any]) -> dict[str, Reading]:
    """Returns the readings with their values converted to the types of the schema, taken from `plain`."""
    values = dict(flat(dict(plain)))
    return {key: replace(reading, value=values.get(key, reading.value)) for key, reading in found.items()}


def unresolved(tree: Any, kept: Mapping[str, Reading], show: Callable[[str], str], key: str = "") -> Any:
    """Copies plain containers, with environment values replaced by their text and `show` applied to other texts."""
    if key in kept and kept[key].value == tree:
        return kept[key].text
    if isinstance(tree, dict):
        return {k: unresolved(v, kept, show, f"{key}.{k}" if key else str(k)) for k, v in tree.items()}
    if isinstance(tree, list):
        return [unresolved(v, kept, show, f"{key}.{i}") for i, v in enumerate(tree)]
    return show(tree) if isinstance(tree, str) else tree


def written(key: str, value: Any, kept: Mapping[str, Reading]) -> Any:
    """Returns the value of a key as it is written to config.yaml."""
    return unresolved(value, kept, as_written, key)


def hashed(key: str, value: Any, kept: Mapping[str, Reading]) -> Any:
    """Returns the value of a key for a checkpoint; text from the environment is replaced by its source and a hash."""
    texts = {
        name: replace(reading, text=f"{reading.text} (sha256 {secrets.digest(reading.value)})")
        for name, reading in kept.items()
        if isinstance(reading.value, str)
    }
    return unresolved(value, texts, secrets.hashed, key)


def in_full(plain: Mapping[str, Any], kept: Mapping[str, Reading]) -> list[str]:
    """Returns a note for each config value that contains a secret environment variable's value as literal text."""
    return [
        f"{key} holds the value of the environment variable {name}: files, pages and loggers show "
        f"${{oc.env:{name}}} instead; type it in that form too, in single quotes, to keep the value out of the "
        "shell's history"
        for key, value in flat(dict(plain))
        if isinstance(value, str) and key not in kept
        for name in secrets.names_in(value)
    ]


def refusal(key: str, reading: Reading, file: str) -> str:
    """Returns the message for an untrusted file that reads the environment in `key`."""
    word = reading.text if re.fullmatch(r"\$\{[\w.:]+\}", reading.text) else quoted(reading.text)
    return (
        f"{key}: {file} reads the environment there ({', '.join(reading.names)}, by {reading.text}), which a file "
        f"may only do if you trust it, since it could send what it reads elsewhere: add --trust {file} if it is "
        f"yours, or set the key on the command line: {shlex.quote(f'{key}={word}')}"
    )


def without_reading(tree: DictConfig, file: Path) -> DictConfig:
    """Returns a run's config.yaml; if it is untrusted, its environment interpolations become text, with a note."""
    found = {} if is_trusted(file) else readings(tree)
    if not found:
        return tree
    if file.resolve() not in _told and os.environ.get("RANK", "0") == "0":
        _told.add(file.resolve())
        pairs = ", ".join(f"{key}={reading.text}" for key, reading in found.items())
        said = (
            f"note: {file} asks for environment variables ({pairs}), which a file may read only if you trust it; "
            f"they are left as plain text. Add --trust {file} if it is yours"
        )
        print(visible(said), file=sys.stderr)
    return as_text(tree)


def as_text(tree: DictConfig) -> DictConfig:
    """Returns a config in which values that would read the environment are literal text."""
    found = readings(tree)
    if not found:
        return tree
    texts = {key: replace(reading, text=escaped(reading.text), value=reading.text) for key, reading in found.items()}
    made = OmegaConf.create(unresolved(OmegaConf.to_container(tree, resolve=False), texts, str))
    assert isinstance(made, DictConfig)
    return made
