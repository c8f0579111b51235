"""Every promise of the pages has tests that are there, and the page that lists them is up to date."""

import pytest

import promises
from support import REPO


def test_the_page_is_made_of_the_promises() -> None:
    made = promises.page(promises.promises())  # raises an error for a promise or a test that isn't there
    assert "| a metric without a definition fails a test | `docs/test_metrics_page.py` | every commit |" in made


def test_every_entry_of_the_changelog_has_a_test() -> None:
    named = [promises.flat(promise) for promise in promises.promises()["CHANGELOG.md"]]
    entries = promises.added((REPO / "CHANGELOG.md").read_text(encoding="utf-8"))
    assert len(entries) > 40
    untested = [entry for entry in entries if not any(promise in entry for promise in named)]
    assert untested == [], "name the test in tests/promises.yaml, or take the promise out"


def test_what_is_not_there_is_noticed() -> None:
    with pytest.raises(ValueError, match=r"README\.md doesn't say 'it flies'"):
        promises.page({"README.md": {"it flies": ["test_smoke.py"]}})
    for test in ("test_smoke.py::test_flight", "test_flight.py"):
        with pytest.raises(ValueError, match="is not there"):
            promises.row("it flies", [test])
    assert promises.row("it", ["test_smoke.py::test_every_module_is_imported"]).endswith("| every commit |")
    assert promises.row("it", ["distributed/test_hsdp.py"]).endswith("| every change |")
