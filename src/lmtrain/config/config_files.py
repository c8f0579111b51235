"""The YAML files that a config is composed of: search folders, the section each file fills, the keys each file sets.

Imports no torch.
"""

import functools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from hydra import initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.types import RunMode
from hydra.version import VersionBase

from lmtrain.config.defaults import conf_dir
from lmtrain.config.keys import at
from lmtrain.config.override_text import typed_keys
from lmtrain.config.safe_yaml import check_folder
from lmtrain.errors import UserError


@dataclass(frozen=True)
class ConfigFile:
    """A file of the composition, and the section (Hydra's package) that it fills; '' is the root."""

    path: Path
    package: str

    def way_to(self, key: str) -> list[str]:
        """Returns the path to a dotted key within this file; empty if the file fills another section."""
        if not self.package:
            return key.split(".")
        inside = key.removeprefix(f"{self.package}.")
        return [] if inside == key else inside.split(".")


def folders_of(config_dir: str | None, config_name: str) -> tuple[list[Path], list[str]]:
    """Returns the folders searched for configs, that of the root config first, and the Hydra override for the others.

    A `config_dir` adds options to lmtrain's own. If it contains <config_name>.yaml, as a run folder does, that file is
    the root config.
    """
    if config_dir is not None and not Path(config_dir).is_dir():
        raise UserError(f"--config-dir {config_dir}: no such folder")
    if config_dir is not None:
        check_folder(Path(config_dir), config_name)
    folders = [conf_dir(), *([Path(config_dir).resolve()] if config_dir else [])]
    if (folders[-1] / f"{config_name}.yaml").is_file():
        folders.reverse()
    return folders, [f"hydra.searchpath=[file://{folder}]" for folder in folders[1:]]


@contextmanager
def hydra_over(folders: Sequence[Path]) -> Iterator[Any]:
    """Yields Hydra, initialized with the first of these folders as its root; an override has to name the others.

    Hydra allows one initialization at a time. That of an application around this call (`@hydra.main`) is restored.
    """
    held, version = GlobalHydra.instance(), VersionBase.instance()
    outer, base = held.hydra, version.version_base
    held.clear()
    try:
        with initialize_config_dir(config_dir=str(folders[0]), version_base="1.3", job_name="lmtrain"):
            yield held.hydra
    finally:
        held.hydra, version.version_base = outer, base
        GlobalHydra.set_instance(held)


def composed_files(overrides: Sequence[str], config_dir: str | None, config_name: str) -> list[ConfigFile]:
    """Returns the files that are composed, in order of increasing precedence."""
    folders, search = folders_of(config_dir, config_name)
    with hydra_over(folders) as hydra:
        found = hydra.config_loader.compute_defaults_list(config_name, [*search, *overrides], RunMode.RUN).defaults
    composed = []
    for default in found:
        path = next((f for d in folders if (f := d / f"{default.config_path}.yaml").is_file()), None)
        if path is not None:
            package = "" if default.package in (None, "_global_") else str(default.package)
            composed.append(ConfigFile(path, package.replace("_global_.", "")))
    return composed


def file_of(key: str, value: Any, composed: Sequence[ConfigFile]) -> Path | None:
    """Returns the file that sets a key (list indices are numbers) to this unresolved value, or None."""
    return next((file.path for file in reversed(composed) if _value_in(file, key) == value), None)


def _value_in(file: ConfigFile, key: str) -> Any:
    """Returns the unresolved value that a file sets for a key, or None if it doesn't set it."""
    way = file.way_to(key)
    if not way:
        return None
    try:
        return at(_tree(file.path.read_text(encoding="utf-8")), way)
    except (OSError, ValueError, yaml.YAMLError):
        return None


_tree = functools.lru_cache(64)(yaml.safe_load)  # by text: each key of the config is looked up in the same files


@dataclass(frozen=True)
class Origin:
    """A place, in a file or on the command line, where a key is set."""

    where: str  # the file, or "the command line"
    line: int | None
    text: str  # the value as written there
    comment: str  # the file's comment on the key

    def __str__(self) -> str:
        return self.where if self.line is None else f"{self.where}, line {self.line}"


# Kept by text: `explain` asks for hundreds of keys in the same few files.
_nodes = functools.lru_cache(256)(functools.partial(yaml.compose, Loader=yaml.SafeLoader))


def origins(key: str, composed: Sequence[ConfigFile], overrides: Sequence[str]) -> list[Origin]:
    """Returns all places that set `key`, in order of increasing precedence."""
    found = [o for file in composed for o in _in_file(key, file)]
    if key in typed_keys(overrides):
        found.append(Origin("the command line", None, typed_keys(overrides)[key], ""))
    return found


def _in_file(key: str, file: ConfigFile) -> Iterator[Origin]:
    way = file.way_to(key)
    if not way:
        return
    text = file.path.read_text(encoding="utf-8")
    node: Any = _nodes(text)
    line = 0
    for name in way:
        pairs = node.value if isinstance(node, yaml.MappingNode) else []
        pair = next((p for p in pairs if p[0].value == name), None)
        if pair is None:
            return
        line, node = pair[0].start_mark.line, pair[1]
    if isinstance(node, yaml.MappingNode) and node.value:
        return  # a section
    written = text[node.start_mark.index : node.end_mark.index]
    yield Origin(str(file.path), line + 1, written, _comment(text.splitlines(), line))


def _comment(lines: list[str], line: int) -> str:
    """Returns the comment behind the value or, if there is none, the comment lines above it."""
    _, sign, behind = lines[line].partition(" # ")
    if sign:
        return behind.strip()
    above: list[str] = []
    while line > 0 and lines[line - 1].lstrip().startswith("# ") and "=" not in lines[line - 1].split()[1]:
        line -= 1
        above.insert(0, lines[line].strip().lstrip("# "))
    return " ".join(above)
