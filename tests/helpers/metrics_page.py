"""The names that docs/metrics.md defines, by the places where they stand."""

import re

from support import REPO

SECTIONS: dict[str, list[str]] = {
    part.partition("\n")[0]: re.findall(r"^\| `([^`]+)`", part, re.MULTILINE)
    for part in (REPO / "docs" / "metrics.md").read_text(encoding="utf-8").split("\n## ")[1:]
}
_PREFIX = "`train/`, `val/`: "
RECORD, OF_VALIDATION, OF_SUMMARY = SECTIONS["Every record"], SECTIONS["`val/`"], SECTIONS["summary.json"]
OF_ANY_OBJECTIVE = SECTIONS[f"{_PREFIX}routers; `router/memory/` beside experts"]
OBJECTIVES = {
    objective: names
    for title, names in SECTIONS.items() if title.startswith(_PREFIX) and "routers" not in title
    for objective in title.removeprefix(_PREFIX).split(", ")
}  # fmt: skip
