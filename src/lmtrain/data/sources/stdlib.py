"""The default corpus: the source code of the running Python's standard library, about 11 MB."""

import os
import sysconfig
import tokenize
from collections.abc import Iterator
from pathlib import Path

from lmtrain.data.sources.pieces import Piece
from lmtrain.errors import UserError

# Tests and installed packages are not the library; encodings is tables of hexadecimal numbers.
_LEFT_OUT = {"test", "tests", "idle_test", "site-packages", "dist-packages", "encodings", "__pycache__"}


def stdlib_files() -> list[Path]:
    """The modules' source files, in an order that is the same on every machine."""
    root = Path(sysconfig.get_path("stdlib"))
    files: list[Path] = []
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = [s for s in subfolders if s not in _LEFT_OUT and not s.startswith("config-")]
        files += [Path(folder, name) for name in names if name.endswith(".py")]
    files = [f for f in files if f.stat().st_size > 0]
    if not files:
        raise UserError(
            f"this Python keeps no source text in {root}: choose other data, such as data=text data.path=..."
        )
    return sorted(files, key=lambda f: f.relative_to(root).as_posix())


def stdlib_pieces() -> Iterator[Piece]:
    """One document per module, decoded as its coding line says."""
    for path in stdlib_files():
        with tokenize.open(path) as file:
            yield Piece(file.read(), True)
