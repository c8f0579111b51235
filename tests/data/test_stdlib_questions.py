"""Questions about the standard library: right answers, held out by module, the same rows every time."""

from pathlib import Path

import pytest
from texts import whole

from inprocess import few_modules
from lmtrain.data.sources import stdlib as questions
from lmtrain.data.sources.choose import open_source, pieces
from lmtrain.data.sources.pieces import is_held_out
from lmtrain.data.sources.stdlib import stdlib_files

SHARE = 1 / 3  # two of six modules, which go from collections to threading


@pytest.fixture(autouse=True)
def modules(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    return few_modules(monkeypatch)


def turns(held_out: bool) -> list[list[str]]:
    return [[m["content"] for m in row["messages"]] for _, row in questions.conversations(held_out, SHARE)]


def test_answers_are_the_librarys_own() -> None:
    answered = dict(t for t in [*turns(False), *turns(True)] if len(t) == 2)
    assert {a for q, a in answered.items() if "`deque`" in q} == {"`deque` is in the module `collections`."}
    about = next(a for q, a in answered.items() if "`textwrap.dedent`" in q and ("do?" in q or "for?" in q))
    assert about == "`textwrap.dedent` is a function. Remove any common leading whitespace from every line in `text`."
    called = {a for q, a in answered.items() if "`shutil.copy2`" in q and ("called" in q or "arguments" in q)}
    assert called <= {"It is called as `shutil.copy2(src, dst, *, follow_symlinks=True)`."}
    longer = [t for t in [*turns(False), *turns(True)] if len(t) > 2]
    assert len(longer) > 10
    assert max(len(t) for t in longer) == 6


def test_what_pretraining_holds_out_is_held_out_here(modules: list[Path]) -> None:
    held = {file.stem for number, file in enumerate(modules) if is_held_out(number, SHARE)}
    assert len(held) == 2
    asked = " ".join(t[0] for t in turns(True))
    for name in ("shutil", "string", "textwrap", "threading"):
        assert (f"module `{name}`" in asked) is (name in held)
    assert not {tuple(t) for t in turns(True)} & {tuple(t) for t in turns(False)}


def test_it_is_the_split_of_the_text(data_config) -> None:
    """Over the whole library, file number i is held out of both the text and the questions, or of neither."""
    cfg = data_config("python_stdlib")
    held_out = {text[:200] for text in whole(pieces(open_source(cfg), cfg, "val") or iter(()))}
    expected = [f for number, f in enumerate(stdlib_files()) if is_held_out(number, cfg.val_fraction)]
    assert len(held_out) == pytest.approx(len(expected), abs=3)  # some files begin alike
    assert all(file.read_bytes()[:50].decode("utf-8", "ignore")[:20] in " ".join(held_out) for file in expected)


def test_pairs_have_a_right_and_a_wrong_answer() -> None:
    rows = [row for _, row in questions.pairs(False, SHARE)]
    right = dict(t for t in turns(False) if len(t) == 2)
    assert all(right[row["prompt"]] == row["chosen"] != row["rejected"] for row in rows)
    cut = [row for row in rows if row["chosen"].startswith(row["rejected"])]
    others = [row for row in rows if row["rejected"] in set(right.values())]
    assert len(cut) + len(others) >= len(rows)
    assert min(len(cut), len(others)) > 0.3 * len(rows)


def test_the_same_rows_every_time() -> None:
    first = list(questions.pairs(False, SHARE)), turns(False)
    questions.items.cache_clear()
    assert (list(questions.pairs(False, SHARE)), turns(False)) == first
