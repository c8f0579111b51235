"""Keys that allow code from outside lmtrain to run. They take effect only if the user types them.

A run's config.yaml, an experiment in --config-dir, a pipeline and a sweep may come from anybody. Their values of these
keys are refused unless the same value is typed (on the command line, or in Python to `lmtrain.compose`), or the file is
named with `--trust FILE`. Processes started by lmtrain get the typed values on their command line.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from lmtrain.config import interpolations, safe_yaml
from lmtrain.config.keys import at, value_of
from lmtrain.config.override_text import bare_or_quoted, written
from lmtrain.errors import UserError

# The last one is here because tasks refer to functions in Python files.
CLOSED = ("run.allow_target", "model.trust_remote_code", "tokenizer.trust_remote_code", "evaluate.task_folder")
Grants = Mapping[str, Any]  # what the user has granted: keys of CLOSED, with their values


def granted(config: Any) -> dict[str, Any]:
    """Returns what a checked config grants, all of which the user has typed."""
    values = {key: value_of(config, key) for key in CLOSED}
    return {key: value for key, value in values.items() if value}


def as_word(grants: Grants) -> str:
    """Encodes grants as a command-line argument for a process started by lmtrain."""
    return json.dumps(dict(grants))


def of_words(words: Sequence[str]) -> Grants:
    """Decodes the argument made by `as_word`; no grants if there are no arguments."""
    return json.loads(words[0]) if words else {}


def refuse_unasked(tree: DictConfig, grants: Grants, where: str) -> None:
    """Raises UserError if a config grants something that was not typed, listing all overrides that would be needed.

    Otherwise resolves these keys in place, so that no interpolation in them can change its value later.

    Args:
        tree: a composed config, or the content of a run's config.yaml.
        grants: what the user has typed.
        where: the file or folder that the config comes from, for the message.
    """
    asked = {key: OmegaConf.select(tree, key) for key in CLOSED}
    asked = {key: OmegaConf.to_container(v, resolve=True) if OmegaConf.is_config(v) else v for key, v in asked.items()}
    wanted = {key: value for key, value in asked.items() if value and not _within(key, value, grants)}
    if wanted:
        words = [_typed(key, value) for key, value in wanted.items()]
        raise UserError(f"{_refusal(_file_of(where, wanted), words)}, or --trust FILE with that yaml file")
    for key, value in asked.items():
        if value is not None:
            OmegaConf.update(tree, key, interpolations.escaped(value), merge=False)


def _file_of(where: str, keys: Iterable[str]) -> str:
    """Returns the first YAML file in the folder `where` that mentions one of the keys, or `where` itself."""
    names = [key.rpartition(".")[2] for key in keys]
    files = (file for file in sorted(Path(where).rglob("*.yaml")) if file.is_file()) if Path(where).is_dir() else ()
    found = (f for f in files if any(name in f.read_text(encoding="utf-8", errors="replace") for name in names))
    return str(next(found, where))


def _within(key: str, value: Any, grants: Grants) -> bool:
    if key == "run.allow_target" and isinstance(value, list):
        return set(map(str, value)) <= set(map(str, grants.get(key, ())))
    if key == "tokenizer.trust_remote_code" and grants.get("model.trust_remote_code"):
        return True  # conf/tokenizer/pretrained.yaml copies the model's value to its tokenizer
    return bool(grants.get(key) == value)


def of_files(paths: Iterable[str]) -> list[str]:
    """Returns what the files named with --trust grant, as overrides that count as typed.

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
    values = {key: at(tree, key.split(".")) for key in CLOSED}
    return {key: value for key, value in values.items() if value}


def key_in(word: str) -> str | None:
    """Returns the key of CLOSED that an override sets, or None."""
    key = word.lstrip("+~").partition("=")[0]
    return key if key in CLOSED else None


def of_typed(words: Iterable[str]) -> list[str]:
    """Returns the overrides that set a key of CLOSED."""
    return [word for word in words if key_in(word)]


def refuse_words(words: Iterable[str], typed: Iterable[str], where: str) -> None:
    """Raises UserError for an override in a file that sets a key of CLOSED which the user has not typed."""
    given = {key_in(word) for word in typed}
    for word in words:
        key = key_in(word)
        if key is not None and key not in given:
            raise UserError(_refusal(where, [word]))


def _refusal(where: str, words: list[str]) -> str:
    return (
        f"{where} sets {' and '.join(words)}, which lets code run that is not part of lmtrain: that counts only where "
        f"you type it, on the command line. If you trust it, add {' '.join(words)}"
    )


def _typed(key: str, value: Any) -> str:
    if isinstance(value, list):
        return f"{key}=[{','.join(bare_or_quoted(str(entry)) for entry in value)}]"
    return f"{key}={written(value)}"
