"""Keeps the values of environment variables out of what is written, logged and shown. Imports nothing that is slow.

Hidden are the values of variables whose name says that they are secret (HF_TOKEN, AWS_SECRET_ACCESS_KEY, DB_PASSWORD),
and of those that a config has read with `${oc.env:NAME}` (config/environment.py notes them). In their place stands
`${oc.env:NAME}`, which a config reads again: what was hidden in a config.yaml or a command still works.
"""

import contextlib
import functools
import hashlib
import os
import re
import shlex
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

_LENGTH = 8  # characters: shorter values stand in other words by chance
_SECRET = re.compile(r"(TOKEN|SECRET|PASSWORD|PASSWD|PASSPHRASE|KEY|CREDENTIAL)S?(?![A-Z])", re.IGNORECASE)
_PLACE = re.compile(r"(FILE|PATH|DIR|FOLDER|HOME)$", re.IGNORECASE)
# Who and where one is stands in every path that is shown.
_NO_SECRET = re.compile(r"HOME|USER|USERNAME|LOGNAME|HOSTNAME|PWD|OLDPWD|PATH|SHELL|LANG|TMPDIR|(SLURM|XDG|LMTRAIN)_.*")
# Parts of an address that let others in: a name and password before the host, and what signs or opens it behind `?`.
_LOGIN = re.compile(r"(?<=://)[^/?#@\s'\"]+@")
_SIGNATURE = re.compile(
    r"(?<=[?&])((?:x-(?:amz|goog|oss)-(?:signature|credential|security-token)|sig|signature|token|access_token|api_?key"
    r"|key|password|secret|auth|awsaccesskeyid|googleaccessid|ossaccesskeyid|policy|key-pair-id)=)(?!\$\{)[^&#\s'\"]+",
    re.IGNORECASE,
)

_read: set[str] = set()  # names of the variables that a config of this process has read


def note_read(name: str) -> None:
    """Hides the value of this variable from now on, unless it tells no more than who or where one is."""
    if not _NO_SECRET.fullmatch(name):
        _read.add(name)


@functools.cache
def is_secret(name: str) -> bool:
    """Whether the name of an environment variable says that its value is secret."""
    return bool(_SECRET.search(name)) and not _PLACE.search(name)


def hidden() -> dict[str, str]:
    """Value to name of the variables whose values are hidden, the longest value first."""
    found = {
        value: name
        for name, value in os.environ.items()
        if len(value) >= _LENGTH and (name in _read or is_secret(name)) and not _is_place(value)
    }
    return dict(sorted(found.items(), key=lambda item: -len(item[0])))


def _is_place(value: str) -> bool:
    """Whether a value names something on this machine: what lies there may be secret, its name is not."""
    with contextlib.suppress(OSError, ValueError):
        return value.startswith(("/", "~", ".")) and Path(value).expanduser().exists()
    return False


def hide(text: str, literal: Callable[[str], str] = str) -> str:
    """`text` with `${oc.env:NAME}` in the place of each hidden value; `literal` is applied to what is between."""
    values = hidden() if len(text) >= _LENGTH else {}
    if not any(value in text for value in values):
        return literal(text)
    pieces = re.split("(" + "|".join(map(re.escape, values)) + ")", text)
    return "".join(f"${{oc.env:{values[p]}}}" if i % 2 else literal(p) for i, p in enumerate(pieces))


def command(verb: str, words: list[str]) -> str:
    """The command as it is typed into a shell; secrets in it are read from the environment."""
    return shlex.join(["python", "-m", f"lmtrain.{verb}", *map(hide, words)])


def names_in(text: str) -> list[str]:
    """Names of the variables whose values `text` holds."""
    return [name for value, name in hidden().items() if value in text] if len(text) >= _LENGTH else []


def without_signatures(text: str) -> str:
    """`text` whose addresses open nothing: logins and signatures in them are `***`."""
    return _SIGNATURE.sub(r"\1***", _LOGIN.sub("***@", text)) if "://" in text else text


def shown(text: str) -> str:
    """`text` as it may be shown to others: hidden values and the signatures of addresses left out."""
    return without_signatures(hide(text))


def hashed(text: str) -> str:
    """`text`, or where it holds hidden values: without them, and a hash that tells it from others."""
    kept = hide(text)
    return text if kept == text else f"{kept} (sha256 {digest(text)})"


def digest(text: str) -> str:
    """16 digits of the SHA-256 of a text; of one that `hashed` has made, those it was made of."""
    made = re.fullmatch(r".* \(sha256 ([0-9a-f]{16})\)", text, re.DOTALL)
    return made[1] if made else hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:16]


def same(then: Any, now: Any) -> bool:
    """Whether two values are equal, of which either may have gone through `hashed`."""
    if isinstance(then, str) and isinstance(now, str):
        return then == now or (" (sha256 " in then + now and digest(then) == digest(now))
    if isinstance(then, dict) and isinstance(now, dict):
        return then.keys() == now.keys() and all(same(then[k], now[k]) for k in then)
    if isinstance(then, list) and isinstance(now, list):
        return len(then) == len(now) and all(map(same, then, now))
    return bool(then == now)


def shown_in(tree: Any, show: Callable[[str], str] = shown) -> Any:
    """A copy of plain containers with `show` applied to every text."""
    if isinstance(tree, Mapping):
        return {key: shown_in(value, show) for key, value in tree.items()}
    if isinstance(tree, list | tuple):
        return type(tree)(shown_in(value, show) for value in tree) if type(tree) in (list, tuple) else tree
    return show(tree) if isinstance(tree, str) else tree
