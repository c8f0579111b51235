"""The README and the first page of the documentation send a newcomer through the same doors."""

import re

from support import REPO


def test_readme_and_index_have_the_same_doors() -> None:
    readme, index = (REPO / "README.md").read_text(), (REPO / "docs" / "index.md").read_text()
    begun = readme[readme.index("## Five doors") : readme.index("`python -m lmtrain` lists")]
    in_readme = re.findall(r"(?m)^\*\*([^*]+)\*\*.*?\(docs/(\w+\.md)\)", begun)
    in_index = re.findall(r"(?m)^\*\*\[([^]]+)\]\((\w+\.md)\)\*\*", index)
    assert len(in_readme) == 5
    assert in_index == in_readme


def test_a_search_for_a_table_finds_the_page_of_fine_tuning() -> None:
    """What stands in a heading comes first in a search."""
    assert any("CSV" in line for line in (REPO / "docs" / "sft.md").read_text().splitlines() if line.startswith("#"))
