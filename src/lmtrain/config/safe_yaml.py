"""Checks on untrusted YAML: refuses files that would be harmful to load or would not mean what they say.

Hydra imports the package of a `pkg://` entry of hydra.searchpath, and OmegaConf copies the target of a YAML alias to
every use, so a file of one kilobyte can expand to a billion values. Both are refused before Hydra reads the file.
PyYAML silently keeps the last of two values of a key; duplicate keys are refused.
"""

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from lmtrain.config.sections import text_keys
from lmtrain.errors import UserError
from lmtrain.files import read_regular

# Those in C, which may be missing.
FAST_LOADER, FAST_DUMPER = (getattr(yaml, f"CSafe{x}", getattr(yaml, f"Safe{x}")) for x in ("Loader", "Dumper"))
VALUES = 100_000  # maximum number of values after aliases are expanded; the largest config has a few hundred
_DEPTH = 3  # levels of subfolders of a config folder that are searched for groups
_SEARCH_PATH = "hydra.searchpath"


def check_folder(folder: Path, config_name: str) -> None:
    """Raises UserError if a YAML file of the folder is an alias bomb, or if its root config makes Hydra import code."""
    for file in _files(folder):
        try:
            text = file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError):  # if the file is used, composing reports it
            continue
        if (digits := re.search(r"[0-9_]{4000}", text)) is not None:
            line = text[: digits.start()].count("\n") + 1
            raise UserError(f"{file} can't be read: a number with thousands of digits is in line {line}")
        check_text(text, str(file))
    root = folder / f"{config_name}.yaml"
    if root.is_file():
        try:
            found = OmegaConf.select(OmegaConf.create(root.read_text(encoding="utf-8")), _SEARCH_PATH)
        except (OSError, ValueError, RecursionError, yaml.YAMLError, OmegaConfBaseException):  # reported by composing
            return
        check_search_path(found, f"{root}: {_SEARCH_PATH}")


def check_search_path(found: Any, where: str) -> None:
    """Raises UserError for an entry of a search path that is a URL other than file://."""
    for entry in found if OmegaConf.is_list(found) or isinstance(found, list) else [found]:
        if "://" in str(entry) and not str(entry).startswith("file://"):
            raise UserError(f"{where} has {entry}, which Hydra would import: name a folder, file:///path/to/configs")


def check_text(text: str, where: str) -> None:
    """Raises UserError for YAML that expands to more than VALUES values, or whose aliases contain themselves."""
    if "&" not in text or "*" not in text:
        return
    try:
        node = yaml.compose(text, yaml.SafeLoader)
    except (yaml.YAMLError, RecursionError):  # reported when the text is parsed
        return
    if node is not None and _size(node, {}) > VALUES:
        raise UserError(f"{where} can't be read: its aliases (*) stand for over {VALUES:,} values, or for themselves")


def _size(node: yaml.Node, known: dict[int, float]) -> float:
    """Returns how many values a node expands to, including itself; infinite if it contains itself."""
    if id(node) in known:
        return known[id(node)]
    known[id(node)] = float("inf")  # found again below if the node contains itself
    parts = node.value if isinstance(node, yaml.CollectionNode) else []
    if isinstance(node, yaml.MappingNode):
        parts = [part for pair in parts for part in pair]
    known[id(node)] = 1 + sum(_size(part, known) for part in parts)
    return known[id(node)]


def _files(folder: Path) -> Iterator[Path]:
    """Yields the YAML files of a config folder that Hydra may read."""
    for place, below, names in os.walk(folder):
        below[:] = [n for n in below if n[0] != "." and len(Path(place).relative_to(folder).parts) < _DEPTH]
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


class _Texts(yaml.SafeLoader):
    """Reads numbers, booleans and dates as the text that they are written as."""


for _kind in ("int", "float", "bool", "timestamp"):
    _Texts.add_constructor(f"tag:yaml.org,2002:{_kind}", yaml.SafeLoader.construct_yaml_str)


def _with_texts(value: Any, written: Any, key: str) -> Any:
    if key in text_keys():
        return written
    if not isinstance(value, dict):
        return value
    pairs = zip(value.items(), written.values(), strict=True)
    return {name: _with_texts(v, text, f"{key}.{name}" if key else str(name)) for (name, v), text in pairs}


def loader_of(text: str) -> Any:
    """Returns a safe loader for a text: that in C, unless deep nesting could overflow its stack, which ends Python."""
    return FAST_LOADER if sum(map(text.count, "[{")) + max(map(len, text.split("\n"))) < 2000 else yaml.SafeLoader


def table(module: str, name: str) -> Any:
    """Returns the contents of a YAML file of this package, which stands beside a module; `module` is its __file__."""
    return yaml.load(Path(module).with_name(name).read_text(encoding="utf-8"), FAST_LOADER)


def plain(text: str) -> Any:
    """Returns the plain values of a YAML text, which may raise yaml.YAMLError, ValueError or RecursionError."""
    return yaml.load(text, loader_of(text))


def dumped(tree: Any) -> str:
    """Returns plain values as YAML, keys in their order; with escapes it is left to Python, which writes fewer."""
    text: str = yaml.dump(tree, Dumper=FAST_DUMPER, sort_keys=False, allow_unicode=True)
    if not text.isascii() or "\\" in text:
        text = yaml.safe_dump(tree, sort_keys=False, allow_unicode=True)
    # Python leaves a NEL unescaped, which would be read back as a line break.
    return text if "\x85" not in text else yaml.safe_dump(tree, sort_keys=False)


def text_of(path: Path) -> str:
    """Returns the text of a YAML file; raises UserError if it can't be read."""
    try:
        return read_regular(path)
    except FileNotFoundError:
        raise UserError(f"{path}: no such file; is {path.parent} a run folder?") from None
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path} can't be read: {' '.join(str(error).split())}") from None


def parse(text: str, where: str, section: str = "") -> Any:
    """Returns the plain values of a YAML text; a key whose type is text has the text written there (1.10, 007, no).

    Args:
        section: the section of the config that the text fills; '' is the root.

    Raises:
        UserError: the text can't be parsed; the message begins with `where`.
    """
    check_text(text, where)
    try:
        node = yaml.compose(text, loader_of(text))
        value, written = (node and kind("").construct_document(node) for kind in (_Loader, _Texts))
        return _with_texts(value, written, section)
    except (yaml.YAMLError, ValueError, RecursionError) as error:  # ValueError: invalid dates
        raise UserError(f"{where} can't be read: {' '.join(str(error).split())}") from None


def read(path: Path) -> Any:
    """Returns the plain values of a YAML file; raises UserError if it can't be read or parsed."""
    return parse(text_of(path), str(path))
