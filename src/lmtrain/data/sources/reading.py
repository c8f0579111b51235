"""How a process has read files otherwise than their names say, noted in a part for the process that reads it."""

import json
from pathlib import Path

from lmtrain.data.sources import lines, tables
from lmtrain.data.store.parts import parts_in


def note_reading(folder: Path) -> None:
    """Notes in a part how this process has read files otherwise than their names say."""
    (folder / "reading.json").write_text(json.dumps([lines.not_utf8, tables.read_otherwise]))


def recall_reading(folder: Path) -> None:
    """Makes this process remember what its tasks have noted by `note_reading`."""
    for part in parts_in(folder):
        not_utf8, otherwise = json.loads((part / "reading.json").read_text())
        lines.not_utf8.update(not_utf8)
        tables.read_otherwise.update(otherwise)
