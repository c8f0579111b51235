"""Definition of a hostile input: its kind, the command that reads it, its files, and the permitted outcome."""

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from guard import WORD

from support import TINY

SECRET = "planted-4f1d-secret-value"  # the value of an environment variable that must not leak
STEPS = ["trainer.max_steps=2", "trainer.val_check_interval=1", "trainer.limit_val_batches=1", "run.name=mine"]
JS = "pwnedjs()"  # what injected scripts would call
SCRIPTS = [
    f"<script>{JS}</script>", f"</script><script>{JS}</script>", f"<img src=x onerror={JS}>", f'"><svg onload={JS}>',
    f"' onmouseover='{JS}", f"<iframe src=javascript:{JS}></iframe>", f"</style><script>{JS}</script>",
    f"--><script>{JS}</script><!--", f"]]><script>{JS}</script>", f"</pre></td></table><body onload={JS}>",
    f"<a href='javascript:{JS}'>a</a>", "</title><base href=//pwned.example/>", f"\\u003cscript>{JS}",
]  # fmt: skip
STEERS = [
    "\x1b]0;title\x07", "\x1b[2J\x1b[H", "\x9b2J", "\u202egnp.exe", "\x1b]8;;http://pwned.example\x07a\x1b]8;;\x07",
    "\x1b]52;c;cHduZWQ=\x07", "a\rb", "\x08\x08\x08", "\x1bP+q\x1b\\", "\u2066\u2069\u200f", "\x00\x07",
]  # fmt: skip


@dataclass
class Place:
    """The folders of one case: the user works in `work`, and the attacker's files are in `work/stranger`."""

    area: Path
    trained: Path  # the folder of a run, to be copied
    chat: Path  # an export with a chat template, to be copied
    corpus: Path
    bins: Path  # prepared text, to be copied
    writable: list[Path] = field(default_factory=list)

    def __post_init__(self) -> None:
        for folder in (self.work, self.stranger, self.home / ".ssh", self.area / "tmp"):
            folder.mkdir(parents=True)
        self.key.write_text(SECRET)
        self.writable += [self.work / "outputs", self.area / "tmp", self.area / "cache"]

    @property
    def work(self) -> Path:
        return self.area / "work"

    @property
    def stranger(self) -> Path:
        return self.work / "stranger"

    @property
    def home(self) -> Path:
        return self.area / "home"

    @property
    def key(self) -> Path:
        return self.home / ".ssh" / "id_rsa"

    @property
    def marker(self) -> Path:
        return self.area / WORD

    def filled(self, value: Any) -> Any:
        """Returns a copy with {marker}, {stranger}, {key} and {area} filled in in all strings."""
        if isinstance(value, dict):
            return {self.filled(k): self.filled(v) for k, v in value.items()}
        if isinstance(value, list | tuple):
            return [self.filled(v) for v in value]
        if not isinstance(value, str):
            return value
        for name in ("marker", "stranger", "key", "area"):
            value = value.replace("{" + name + "}", str(getattr(self, name)))
        return value

    def yaml(self, name: str, tree: Any) -> Path:
        return self.text(name, tree if isinstance(tree, str) else yaml.safe_dump(self.filled(tree), sort_keys=False))

    def text(self, name: str, text: str | bytes) -> Path:
        """Writes a file of the attacker."""
        file = self.stranger / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(text if isinstance(text, bytes) else self.filled(text).encode("utf-8", "surrogatepass"))
        return file

    def jsonl(self, name: str, rows: list[Any]) -> Path:
        return self.text(name, "".join(json.dumps(row) + "\n" for row in rows))

    def run(self) -> Path:
        """Copies a run's folder that the attacker sends; verbs may write into it."""
        folder = self.stranger / "run"
        shutil.copytree(self.trained, folder, symlinks=True)
        self.writable.append(folder)
        return folder

    def export(self) -> Path:
        return Path(shutil.copytree(self.trained / "export", self.stranger / "export"))

    def train(self, *words: str, data: bool = True) -> list[str]:
        """Returns the command of a tiny run."""
        found = ["data=text", f"data.path={self.corpus}"] if data else []
        return ["train", *TINY, *STEPS, *found, *words]


@dataclass(frozen=True)
class Case:
    """One hostile input.

    Args:
        make: writes the attacker's files; returns the verb and its arguments.
        says: words that the message must contain if the input is refused.
        must: "refused", "harmless" (exit code 0), or None for either.
        stdin: what the user types.
        reads: whether a file of the user may be read (through a link); it must not be shown or written anywhere.
    """

    kind: str
    name: str
    make: Callable[[Place], list[str]]
    says: tuple[str, ...] = ()
    must: str | None = None
    stdin: str = ""
    reads: bool = False

    @property
    def id(self) -> str:
        return f"{self.kind}: {self.name}"
