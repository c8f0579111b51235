"""The page of known reports: each row has a report of its own and names a test that exists."""

import re

from support import REPO


def test_each_report_has_a_test_that_exists() -> None:
    page = (REPO / "docs" / "known_reports.md").read_text()
    table = [line.strip("|").split("|") for line in page.splitlines() if line.startswith("| [")]
    links = [link for first, *_ in table for link in re.findall(r"\]\((https://github.com/\S+)\)", first)]
    assert len(table) > 60
    assert len(links) == len(set(links)) >= len(table)
    assert all(shown.strip().startswith("`tests/") for *_, shown in table)
    for file, name in re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", page):
        assert re.search(rf"^def {name}\(", (REPO / file).read_text(), re.MULTILINE), f"{file}::{name}"
