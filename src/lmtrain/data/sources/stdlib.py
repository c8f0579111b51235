"""The default corpus: the source code of the running Python's standard library (about 11 MB)."""

import os
import sysconfig
import tokenize
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from lmtrain.config.schema_data import DataConfig
from lmtrain.data.sources.pieces import Piece
from lmtrain.data.sources.tables import Record
from lmtrain.data.store.contents import Content, Facts, joined_digest
from lmtrain.errors import UserError

# Tests and installed packages are not part of the library; encodings consists of tables of hexadecimal numbers.
_LEFT_OUT = {"test", "tests", "idle_test", "site-packages", "dist-packages", "encodings", "__pycache__"}


def stdlib_files() -> list[Path]:
    """Returns the modules' source files, in an order that is the same on every machine."""
    root = Path(sysconfig.get_path("stdlib"))
    files: list[Path] = []
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = [s for s in subfolders if s not in _LEFT_OUT and not s.startswith("config-")]
        files += [Path(folder, name) for name in names if name.endswith(".py")]
    files = [f for f in files if f.stat().st_size > 0]
    if not files:
        raise UserError(f"this Python has no source text in {root}: choose other data, such as data=text data.path=...")
    return sorted(files, key=lambda f: f.relative_to(root).as_posix())


def stdlib_pieces() -> Iterator[Piece]:
    """Yields one document per module, decoded as its encoding declaration says."""
    for path in stdlib_files():
        with tokenize.open(path) as file:
            yield Piece(file.read(), True)


class StdlibSource:
    """The library as text, one document per module."""

    label = "python_stdlib"
    notes: list[str] = []  # noqa: RUF012

    def __init__(self, cfg: DataConfig) -> None:
        self.cfg, self.files = cfg, stdlib_files()
        self.content = Content(self.files, Facts(cfg.cache_dir))
        self.resolved: str | None = joined_digest(self.content.digests.values())
        self.settings: dict[str, Any] = {"kind": "python_stdlib"}

    def refuse_changed(self) -> None:
        """Raises ReadError if a module was changed since the source was opened."""
        self.content.refuse_changed()

    def records(self, name: str) -> Iterator[Record] | None:
        raise UserError("data.source=python_stdlib is text: choose data=python_stdlib, or another source of rows")

    def pieces(self, name: str) -> Iterator[Piece] | None:
        return stdlib_pieces() if name == "train" else None

    def text_bytes(self, name: str) -> int | None:
        return sum(file.stat().st_size for file in self.files)
