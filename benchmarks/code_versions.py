"""Versions of code: hashes of the files that a measurement depends on."""

import hashlib
from pathlib import Path

REPO = Path(__file__).resolve().parents[1]


def code_of(paths: tuple[str, ...]) -> str:
    """Returns a hash of the files, or those in the folders, without blank lines and comments of whole lines."""
    found = hashlib.sha256()
    for path in sorted(paths):
        place = REPO / path
        for file in [place] if place.is_file() else sorted(f for f in place.rglob("*") if f.suffix in (".py", ".yaml")):
            lines = (line for line in file.read_text().splitlines() if line.strip() and line.lstrip()[0] != "#")
            found.update("\n".join([file.relative_to(REPO).as_posix(), *lines]).encode())
    return found.hexdigest()[:12]
