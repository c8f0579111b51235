"""What a newcomer comes to first: the README, which is also the first page of the site, and the page of fine-tuning."""

import re
import sys

import pytest

from support import REPO


def test_the_readme_is_the_first_page_and_its_links_lead_to_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("mkdocs", reason='needs mkdocs: pip install "lmtrain[docs]"')
    monkeypatch.setattr(sys, "path", [str(REPO / "docs"), *sys.path])
    from notebook_pages import readme

    text = (REPO / "README.md").read_text()
    page = readme(text)
    doors = re.findall(r"(?m)^\*\*[^*]+\*\*.*?\(docs/(\w+\.md)\)", text)
    assert len(doors) == 5
    assert set(doors) <= set(re.findall(r"\]\(([^)]+)\)", page))
    links = [*re.findall(r"\]\(([^)]+)\)", page), *re.findall(r'src="([^"]+)"', page)]
    assert [link for link in links if not link.startswith("https:") and not (REPO / "docs" / link).is_file()] == []
    assert "benchmarks/RESULTS.md" in page


def test_a_search_for_a_table_finds_the_page_of_fine_tuning() -> None:
    """What stands in a heading comes first in a search."""
    assert any("CSV" in line for line in (REPO / "docs" / "sft.md").read_text().splitlines() if line.startswith("#"))
