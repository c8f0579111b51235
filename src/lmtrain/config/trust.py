"""Keys that let code run which lmtrain doesn't bring. They count where the user types them, and in no file by itself.

A run's config.yaml, an experiment of --config-dir, a pipeline and a sweep may come from anybody. So what they say of
these keys is refused unless the same is typed (on the command line, or in Python to `lmtrain.compose`), or the file
that says it is named with `--trust FILE`. A process that lmtrain starts is given what was typed on its command line.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from lmtrain.config import interpolations, safe_yaml
from lmtrain.config.keys import value_of
from lmtrain.config.override_text import bare_or_quoted, written
from lmtrain.errors import UserError

# Each with the value that opens nothing.
CLOSED: dict[str, Any] = {
    "run.allow_target": [],
    "model.trust_remote_code": False,
    "tokenizer.trust_remote_code": False,
    "evaluate.task_folder": None,  # its tasks name functions of Python files
}
Grants = Mapping[str, Any]  # what is open: some of these keys to their values


def granted(config: Any) -> dict[str, Any]:
    """What a checked config has open, all of which was typed."""
    values = {key: value_of(config, key) for key in CLOSED}
    return {key: value for key, value in values.items() if value}


def as_word(grants: Grants) -> str:
    """The word that hands this to a process that lmtrain starts."""
    return json.dumps(dict(grants))


def of_words(words: Sequence[str]) -> Grants:
    """From such a command line; nothing where there is no such word."""
    found: Grants = json.loads(words[0]) if words else {}
    return found


def refuse_unasked(tree: DictConfig, grants: Grants, where: str) -> None:
    """Raises UserError where a config opens what was not typed, with all that would have to be; then fixes the values:
    an interpolation can't become another one later.

    Args:
        tree: a composed config, or what a run's config.yaml holds.
        grants: what was typed.
        where: the file or folder that the config comes from, for the message.
    """
    asked = {key: OmegaConf.select(tree, key) for key in CLOSED}
    asked = {key: OmegaConf.to_container(v, resolve=True) if OmegaConf.is_config(v) else v for key, v in asked.items()}
    wanted = {key: value for key, value in asked.items() if value and not _within(key, value, grants)}
    if wanted:
        words = [_typed(key, value) for key, value in wanted.items()]
        raise UserError(
            f"{_file_of(where, wanted)} sets {' and '.join(words)}, by which code runs that lmtrain doesn't bring: "
            f"that counts only where you type it. If you trust it, add {' '.join(words)}, or --trust FILE with the "
            f"yaml that says so"
        )
    for key, value in asked.items():
        if OmegaConf.select(tree, key) is not None:
            OmegaConf.update(tree, key, interpolations.escaped(value), merge=False)


def _file_of(where: str, keys: Iterable[str]) -> str:
    """The yaml in the folder `where` that names one of the keys; else `where`."""
    names = [key.rpartition(".")[2] for key in keys]
    files = (file for file in sorted(Path(where).rglob("*.yaml")) if file.is_file()) if Path(where).is_dir() else ()
    found = (f for f in files if any(name in f.read_text(encoding="utf-8", errors="replace") for name in names))
    return str(next(found, where))


def _within(key: str, value: Any, grants: Grants) -> bool:
    if key == "run.allow_target" and isinstance(value, list):
        return set(map(str, value)) <= set(map(str, grants.get(key, ())))
    if key == "tokenizer.trust_remote_code" and grants.get("model.trust_remote_code"):
        return True  # conf/tokenizer/pretrained.yaml: what is true of the model is true of its tokenizer
    return bool(grants.get(key) == value)


def of_files(paths: Iterable[str]) -> list[str]:
    """What the files named with --trust open, as overrides: as if it were typed.

    Raises:
        UserError: a file can't be read.
    """
    found: dict[str, Any] = {}
    for path in paths:
        found |= _opened_by(Path(path).expanduser())
    return [_typed(key, value) for key, value in found.items()]


def _opened_by(path: Path) -> dict[str, Any]:
    try:
        tree = safe_yaml.parse(path.read_text(encoding="utf-8"), str(path))
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"--trust {path} can't be read: {error}") from None
    found = {}
    for key in CLOSED:
        section, _, name = key.partition(".")
        node = tree.get(section) if isinstance(tree, dict) else None
        if isinstance(node, dict) and node.get(name):
            found[key] = node[name]
    return found


def key_in(word: str) -> str | None:
    """The key of these that an override sets."""
    key = word.lstrip("+~").partition("=")[0]
    return key if key in CLOSED else None


def of_typed(words: Iterable[str]) -> list[str]:
    """Those of the typed overrides that open something."""
    return [word for word in words if key_in(word)]


def refuse_words(words: Iterable[str], typed: Iterable[str], where: str) -> None:
    """Raises UserError for overrides in a file that open something, where the user types nothing of that key."""
    given = {key_in(word) for word in typed}
    for word in words:
        key = key_in(word)
        if key is not None and key not in given:
            raise UserError(
                f"{where} sets {word}, by which code runs that lmtrain doesn't bring: that counts only where you type "
                f"it. If you trust it, add {word}"
            )


def _typed(key: str, value: Any) -> str:
    if isinstance(value, list):
        return f"{key}=[{','.join(bare_or_quoted(str(entry)) for entry in value)}]"
    return f"{key}={written(value)}"
