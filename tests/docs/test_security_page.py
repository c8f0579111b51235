"""The table of docs/security.md is the output of `python docs/security.py`: what the schema says of each key."""

import runpy

from support import REPO


def test_the_table_is_made_of_the_schema() -> None:
    script = runpy.run_path(str(REPO / "docs" / "security.py"))
    assert script["PAGE"].read_text(encoding="utf-8") == script["page"](), "run: python docs/security.py"
    assert "`export.push_to`" in script["table"]()
