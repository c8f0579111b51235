"""Keeps the values of environment variables out of files, logs and output. Imports nothing slow.

Hidden values are those of variables whose names look secret (HF_TOKEN, AWS_SECRET_ACCESS_KEY, DB_PASSWORD), and of
variables that a config has read with `${oc.env:NAME}` (recorded by config/environment.py). They are replaced by
`${oc.env:NAME}`, which a config resolves again, so a config.yaml or command with hidden values still works.
"""

import contextlib
import functools
import hashlib
import os
import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

_LENGTH = 8  # minimum length of hidden values; shorter ones occur in other text by chance
_SECRET = re.compile(r"(TOKEN|SECRET|PASSWORD|PASSWD|PASSPHRASE|KEY|CREDENTIAL)S?(?![A-Z])", re.IGNORECASE)
_PLACE = re.compile(r"(FILE|PATH|DIR|FOLDER|HOME)$", re.IGNORECASE)
# Never hidden: names of users, hosts and folders, which are part of every displayed path.
_NO_SECRET = re.compile(r"HOME|USER|USERNAME|LOGNAME|HOSTNAME|PWD|OLDPWD|PATH|SHELL|LANG|TMPDIR|(SLURM|XDG|LMTRAIN)_.*")
# Parts of a URL that grant access: user name and password before the host, and signatures or keys in the query.
_LOGIN = re.compile(r"(?<=://)[^/?#@\s'\"]+@")
_SIGNATURE = re.compile(
    r"(?<=[?&])((?:x-(?:amz|goog|oss)-(?:signature|credential|security-token)|sig|signature|token|access_token|api_?key"
    r"|key|password|secret|auth|awsaccesskeyid|googleaccessid|ossaccesskeyid|policy|key-pair-id)=)(?!\$\{)[^&#\s'\"]+",
    re.IGNORECASE,
)

_read: set[str] = set()  # names of the variables that a config of this process has read


def note_read(name: str) -> None:
    """Hides the value of this variable from now on, unless it only names a user, host or folder (_NO_SECRET)."""
    if not _NO_SECRET.fullmatch(name):
        _read.add(name)


@functools.cache
def is_secret(name: str) -> bool:
    """Returns whether the name of an environment variable indicates a secret value."""
    return bool(_SECRET.search(name)) and not _PLACE.search(name)


def hidden() -> dict[str, str]:
    """Maps the value of each hidden variable to its name, the longest value first."""
    named = ((os.environ[name], name) for name in os.environ if name in _read or is_secret(name))
    found = {value: name for value, name in named if len(value) >= _LENGTH and not _is_place(value)}
    return dict(sorted(found.items(), key=lambda item: -len(item[0])))


def _is_place(value: str) -> bool:
    """Returns whether a value is an existing path; the content of the file may be secret, but the path is not."""
    with contextlib.suppress(OSError, ValueError):
        return value.startswith(("/", "~", ".")) and Path(value).expanduser().exists()
    return False


def hide(text: str, literal: Callable[[str], str] = str) -> str:
    """Replaces each hidden value in `text` by `${oc.env:NAME}` and applies `literal` to the text between them."""
    values = hidden() if len(text) >= _LENGTH else {}
    if not any(value in text for value in values):
        return literal(text)
    pieces = re.split("(" + "|".join(map(re.escape, values)) + ")", text)
    return "".join(f"${{oc.env:{values[p]}}}" if i % 2 else literal(p) for i, p in enumerate(pieces))


def command(verb: str, words: Sequence[str]) -> str:
    """Returns a command to paste into a shell, with secrets replaced by references to the environment."""
    return " ".join(["python", "-m", f"lmtrain.{verb}", *(in_shell(hide(word)) for word in words)])


def in_shell(word: str) -> str:
    """Quotes a word for a shell; one with control characters as $'...', in which they are seen and can be pasted."""
    if word.isprintable():
        return shlex.quote(word)
    shown = (c if c.isprintable() and c not in "'\\" else "".join(f"\\x{b:02x}" for b in os.fsencode(c)) for c in word)
    return f"$'{''.join(shown)}'"


def names_in(text: str) -> list[str]:
    """Returns the names of the hidden variables whose values occur in `text`."""
    return [name for value, name in hidden().items() if value in text] if len(text) >= _LENGTH else []


def shown(text: str) -> str:
    """Returns `text` to be shown: without hidden values, and with logins and signatures in URLs replaced by `***`."""
    text = hide(text)
    return _SIGNATURE.sub(r"\1***", _LOGIN.sub("***@", text)) if "://" in text else text


def hashed(text: str) -> str:
    """Returns `text`; if it has hidden values, they are replaced and a hash of the original is appended."""
    kept = hide(text)
    return text if kept == text else f"{kept} (sha256 {digest(text)})"


def digest(text: str) -> str:
    """Returns 16 hex digits of a text's SHA-256; for a result of `hashed`, those of the original text."""
    made = re.fullmatch(r".* \(sha256 ([0-9a-f]{16})\)", text, re.DOTALL)
    return made[1] if made else hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:16]


def same(then: Any, now: Any) -> bool:
    """Returns whether two values are equal, where texts in either may be results of `hashed`."""
    if isinstance(then, str) and isinstance(now, str):
        return then == now or (" (sha256 " in then + now and digest(then) == digest(now))
    if isinstance(then, dict) and isinstance(now, dict):
        return then.keys() == now.keys() and all(same(then[k], now[k]) for k in then)
    if isinstance(then, list) and isinstance(now, list):
        return len(then) == len(now) and all(map(same, then, now))
    return bool(then == now)


def shown_in(tree: Any, show: Callable[[str], str] = shown) -> Any:
    """Returns a copy of plain containers with `show` applied to every text."""
    if isinstance(tree, Mapping):
        return {key: shown_in(value, show) for key, value in tree.items()}
    if isinstance(tree, list | tuple):
        return type(tree)(shown_in(value, show) for value in tree) if type(tree) in (list, tuple) else tree
    return show(tree) if isinstance(tree, str) else tree
