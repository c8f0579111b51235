"""The manifest.json of a checkpoint: its step, scores and files, and a hash of all of these.

The hash covers the parsed content, not the text, so reformatting the file does not invalidate it.

    version   of this format: 2; a manifest with a hash but no version is of version 1
    step, metrics, interim, files
    scored_on, tokenizer    since version 2: the validation rows that the scores were measured on (data/val_sets.py),
              and the hashes of the files in the run's tokenizer/ (data/tokenizers.py)
"""

import hashlib
import json
import re
from pathlib import Path
from typing import Any

from lmtrain.errors import RunError, reason
from lmtrain.files import NotRegular, read_regular, write_atomic

NAME = "manifest.json"
VERSION = 2
_HASH, _VERSION = "sha256", "version"
_FILE = re.compile(r"[\w.-]{1,200}", re.ASCII)  # valid names of files in a checkpoint folder
_REQUIRED = {"step", "metrics", "files"}


class Damaged(RunError):
    """Error for a checkpoint that differs from what was written; `what` describes the damage."""

    def __init__(self, checkpoint: Path, what: str) -> None:
        super().__init__(f"the checkpoint {checkpoint} is damaged ({what})")
        self.what = what


def unreadable(path: Path, error: OSError) -> RunError:
    """Returns the error for a failed read, which is no sign of damage: no other checkpoint may be used instead."""
    done = "That does not mean that it is damaged, so nothing was changed and no other was taken"
    advice = "repair the disk or the permissions, then give the same command again"
    return RunError(f"cannot read {path}: {reason(error)}. {done}: {advice}")


def write(checkpoint: Path, content: dict[str, Any]) -> None:
    """Writes `content` (see the module docstring), the format version and a hash of both, atomically."""
    plain = json.loads(json.dumps({_VERSION: VERSION, **content}))
    write_atomic(checkpoint / NAME, json.dumps({**plain, _HASH: _hash(plain)}, indent=2))


def read(checkpoint: Path) -> dict[str, Any]:
    """Returns the content that was given to `write`.

    Raises:
        Damaged: the manifest is missing, or differs from what was written.
        RunError: the file can't be read from the disk.
    """
    try:
        content = json.loads(read_regular(checkpoint / NAME))
    except FileNotFoundError:
        raise Damaged(checkpoint, f"{NAME} is missing") from None
    except (NotADirectoryError, IsADirectoryError, NotRegular):
        raise Damaged(checkpoint, f"{NAME} is not a file in a folder") from None
    except (ValueError, RecursionError) as error:
        raise Damaged(checkpoint, f"{NAME} can't be read: {error}") from None
    except OSError as error:
        raise unreadable(checkpoint / NAME, error) from error
    problem = _problem(content)
    if problem is not None:
        raise Damaged(checkpoint, f"{NAME} {problem}")
    return {key: value for key, value in content.items() if key not in (_HASH, _VERSION)}


def _hash(content: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _problem(content: Any) -> str | None:
    """Returns what is wrong with a parsed manifest, or None if it is valid."""
    if not isinstance(content, dict):
        return "is not a JSON object"
    rest = {key: value for key, value in content.items() if key != _HASH}
    if _HASH not in content:
        return "has lost its checksum"
    if content[_HASH] != _hash(rest):
        return "does not match its own checksum"
    if type(rest.get(_VERSION, 1)) is not int or rest.get(_VERSION, 1) > VERSION:
        return f"is of format version {rest[_VERSION]}, and this lmtrain reads up to {VERSION}: update it"
    if not rest.keys() >= _REQUIRED:
        return f"lacks {', '.join(sorted(_REQUIRED - rest.keys()))}"
    metrics, files = rest["metrics"], rest["files"]
    if type(rest["step"]) is not int or type(rest.get("interim", False)) is not bool:
        return "holds a step or an interim flag of the wrong type"
    if not isinstance(metrics, dict) or not all(isinstance(v, int | float | None) for v in metrics.values()):
        return "holds scores that are not numbers"
    if not isinstance(files, dict) or not all(_is_entry(*entry) for entry in files.items()):
        return "holds an entry that describes no file"
    return None


def _is_entry(name: str, entry: Any) -> bool:
    """Returns whether an entry describes a file of the checkpoint: whole, or in parts that several ranks wrote."""
    if not _FILE.fullmatch(name) or not isinstance(entry, dict) or type(entry.get("bytes")) is not int:
        return False
    if "parts" not in entry:
        return type(entry.get("sha256")) is str
    return isinstance(entry["parts"], list) and all(
        isinstance(part, dict)
        and type(part.get("offset")) is type(part.get("bytes")) is int
        and type(part.get("sha256")) is str
        for part in entry["parts"]
    )
