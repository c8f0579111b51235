"""YAML that somebody else may have written, refused where reading it would do harm, or not what it says.

Hydra imports the package of a `pkg://` entry of hydra.searchpath, and omegaconf copies an alias of YAML wherever it
stands, so that a file of one kilobyte can stand for a billion values. Both are refused before Hydra reads. PyYAML keeps
the last of two values of a key; a key that stands twice is refused.
"""

import contextlib
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from lmtrain.errors import UserError

VALUES = 100_000  # that the aliases of a file may stand for; the largest config has some hundreds in all
_DEPTH = 3  # folders below a folder of configs in which groups are looked for
_SEARCH_PATH = "hydra.searchpath"


def check_folder(folder: Path, config_name: str) -> None:
    """Raises UserError where a YAML file is a bomb, or where the root config has Hydra import something."""
    for file in _files(folder):
        try:
            text = file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError):  # of those that are read, composing says so
            continue
        digits = re.search(r"[0-9_]{4000}", text)
        if digits is not None:
            line = text[: digits.start()].count("\n") + 1
            raise UserError(f"{file} can't be read: a number with thousands of digits is in line {line}")
        check_text(text, str(file))
    root = folder / f"{config_name}.yaml"
    if root.is_file():
        try:
            found = OmegaConf.select(OmegaConf.create(root.read_text(encoding="utf-8")), _SEARCH_PATH)
        except (OSError, ValueError, RecursionError, yaml.YAMLError, OmegaConfBaseException):  # composing says so
            return
        check_search_path(found, f"{root}: {_SEARCH_PATH}")


def check_words(overrides: list[str]) -> None:
    """The same of what is typed, or stands in a pipeline."""
    for word in overrides:
        if word.lstrip("+").startswith(f"{_SEARCH_PATH}="):
            with contextlib.suppress(HydraException):  # composing says so
                check_search_path(OverridesParser.create().parse_override(word).value(), _SEARCH_PATH)


def check_search_path(found: Any, where: str) -> None:
    """Raises UserError for an entry that is not a folder."""
    for entry in found if OmegaConf.is_list(found) or isinstance(found, list) else [found] if found else []:
        if "://" in str(entry) and not str(entry).startswith("file://"):
            raise UserError(f"{where} has {entry}, which Hydra would import: name a folder, file:///path/to/configs")


def check_text(text: str, where: str) -> None:
    """Raises UserError for YAML whose aliases stand for more than VALUES values, or for what they stand in."""
    if "&" not in text or "*" not in text:
        return
    try:
        node = yaml.compose(text, yaml.SafeLoader)
    except (yaml.YAMLError, RecursionError):  # whoever reads it says so
        return
    if node is not None and _size(node, {}) > VALUES:
        raise UserError(f"{where} can't be read: its aliases (*) stand for over {VALUES:,} values, or for themselves")


def _size(node: yaml.Node, known: dict[int, float]) -> float:
    """Values that a node stands for, itself included; infinite for one that holds itself."""
    if id(node) in known:
        return known[id(node)]
    known[id(node)] = float("inf")  # until it is known
    parts: list[yaml.Node] = []
    if isinstance(node, yaml.MappingNode):
        parts = [part for pair in node.value for part in pair]
    elif isinstance(node, yaml.SequenceNode):
        parts = node.value
    known[id(node)] = 1 + sum(_size(part, known) for part in parts)
    return known[id(node)]


def _files(folder: Path) -> Iterator[Path]:
    """The YAML files in which Hydra may look."""
    top = len(folder.parts)
    for place, below, names in os.walk(folder):
        if len(Path(place).parts) - top >= _DEPTH:
            below.clear()
        below[:] = [name for name in below if not name.startswith(".")]
        files = (Path(place) / name for name in names if name.endswith((".yaml", ".yml")))
        yield from (file for file in files if file.is_file())


class _Loader(yaml.SafeLoader):
    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        lines: dict[str, int] = {}
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.tag != "tag:yaml.org,2002:merge":
                line = key.start_mark.line + 1
                if key.value in lines:
                    raise yaml.YAMLError(f"the key {key.value} is in line {lines[key.value]} and in line {line}")
                lines[key.value] = line
        return super().construct_mapping(node, deep)


def parse(text: str, where: str) -> Any:
    """The plain values of a YAML text; UserError, which begins with `where`, for one that can't be read."""
    check_text(text, where)
    try:
        return yaml.load(text, _Loader)  # a safe loader
    except (yaml.YAMLError, ValueError, RecursionError) as error:  # ValueError: of dates
        raise UserError(f"{where} can't be read: {' '.join(str(error).split())}") from None
