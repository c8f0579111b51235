"""The table of docs/security.md is the output of `python tests/security_table.py`: what the schema says of each key."""

import runpy

from support import REPO


def test_the_table_is_made_of_the_schema() -> None:
    script = runpy.run_path(str(REPO / "tests" / "security_table.py"))
    assert script["PAGE"].read_text(encoding="utf-8") == script["page"](), "run: python tests/security_table.py"
    assert "`export.push_to`" in script["table"]()
