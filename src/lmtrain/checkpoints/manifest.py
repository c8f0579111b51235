"""manifest.json of a checkpoint: its step, its scores, its files, and a hash of all that.

The hash is of the content, not of the text: whatever changes no value changes nothing. A manifest without one is taken
as it is, where its checkpoint says that it is of a version that wrote none (`_before_hashes`).

    version   of this format: 2; manifests with a hash and without it are of version 1
    step, metrics, interim, files
    scored_on, tokenizer    since version 2: what the scores are of (data/val_identity.py), and the hashes of the run's
              tokenizer/ (data/tokenizers.py)
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
_FILE = re.compile(r"[\w.-]{1,200}", re.ASCII)  # the name of a file of a checkpoint's folder
_KNOWN = {"step", "metrics", "files", "interim"}  # keys of a manifest without a hash


class Damaged(RunError):
    """A checkpoint that is not as it was written; `what` says in which way."""

    def __init__(self, checkpoint: Path, what: str) -> None:
        super().__init__(f"the checkpoint {checkpoint} is damaged ({what})")
        self.what = what


def unreadable(path: Path, error: OSError) -> RunError:
    """The error of a disk that does not give what may well be there: no damage, so nothing is passed over for it."""
    return RunError(
        f"cannot read {path}: {reason(error)}. That does not mean that it is damaged, so nothing was changed and no "
        f"other checkpoint was taken: repair the disk or the permissions, then give the same command again"
    )


def write(checkpoint: Path, content: dict[str, Any]) -> None:
    """Writes `content` (see the module), the version and a hash of all, atomically."""
    plain = json.loads(json.dumps({_VERSION: VERSION, **content}))
    write_atomic(checkpoint / NAME, json.dumps({**plain, _HASH: _hash(plain)}, indent=2))


def read(checkpoint: Path) -> dict[str, Any]:
    """The content that `write` was given, `verified` beside it: False of one that has no hash.

    Raises:
        Damaged: it is missing, or not what was written.
        RunError: the disk does not give it.
    """
    try:
        content = json.loads(read_regular(checkpoint / NAME))
    except FileNotFoundError:
        raise Damaged(checkpoint, f"{NAME} is missing") from None
    except (NotADirectoryError, IsADirectoryError, NotRegular):
        raise Damaged(checkpoint, f"{NAME} is not a file in a folder") from None
    except OSError as error:
        raise unreadable(checkpoint / NAME, error) from error
    except (ValueError, RecursionError) as error:
        raise Damaged(checkpoint, f"{NAME} can't be read: {error}") from None
    problem = _problem(content)
    if problem is not None:
        raise Damaged(checkpoint, f"{NAME} {problem}")
    verified = content.pop(_HASH, None) is not None
    if not verified and not _before_hashes(checkpoint):
        raise Damaged(checkpoint, f"{NAME} has lost its checksum")
    content.pop(_VERSION, None)
    return {**content, "verified": verified}


def _before_hashes(checkpoint: Path) -> bool:
    """Whether trainer.pt is of a version whose manifests had no hash: its fingerprint was not one of keys yet."""
    import torch

    try:
        state = torch.load(checkpoint / "trainer.pt", map_location="cpu", weights_only=True, mmap=True)
        return "keys" not in state["fingerprint"]
    except Exception:  # whatever a file that is none raises: then nothing says that it is of such a version
        return False


def _hash(content: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _problem(content: Any) -> str | None:
    """What is wrong with a manifest that is JSON; None if nothing is."""
    if not isinstance(content, dict):
        return "is not a JSON object"
    rest = {key: value for key, value in content.items() if key != _HASH}
    if _HASH in content and content[_HASH] != _hash(rest):
        return "does not match its own checksum"
    if type(rest.get(_VERSION, 1)) is not int or rest.get(_VERSION, 1) > VERSION:
        return f"is of format version {rest[_VERSION]}, and this lmtrain reads up to {VERSION}: update it"
    metrics, files = rest.get("metrics"), rest.get("files")
    fits = (
        (_HASH in content or rest.keys() <= _KNOWN)
        and type(rest.get("step")) is int
        and type(rest.get("interim", False)) is bool
        and isinstance(metrics, dict)
        and all(isinstance(value, int | float | None) for value in metrics.values())
        and isinstance(files, dict)
        and all(_is_entry(*entry) for entry in files.items())
    )
    return None if fits else "lacks a key of a manifest, or holds another value than one does"


def _is_entry(name: str, entry: Any) -> bool:
    """Whether it describes a file of the checkpoint's folder: whole, or in parts that several ranks wrote."""
    if not _FILE.fullmatch(name) or not isinstance(entry, dict):
        return False
    parts = entry.get("parts", [{**entry, "offset": 0}])
    return type(entry.get("bytes")) is int and isinstance(parts, list) and all(map(_is_part, parts))


def _is_part(part: Any) -> bool:
    kinds = {"offset": int, "bytes": int, "sha256": str}
    return isinstance(part, dict) and all(type(part.get(key)) is kind for key, kind in kinds.items())
