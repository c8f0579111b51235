"""What preparation prints while it runs without a terminal, and its progress bar on one."""

import io
import re

import pytest
from rich.console import Console

from lmtrain.data.store import progress


def test_the_text_of_a_tokenizer_is_shown_with_rate_and_time_left(monkeypatch, capsys) -> None:
    monkeypatch.setattr(progress, "_SECONDS_BETWEEN_LINES", 0.0)
    show = progress.PrepareProgress(True)
    parts = ["ä" * 500_000] * 3  # 1 MB each
    assert list(show.watch(iter(parts), 3_000_000)) == parts
    first, second, last = capsys.readouterr().err.splitlines()
    assert re.fullmatch(r"read text: 1\.0 of 3\.0 MB, [\d.]+ MB/s, [\d,]+ s left", first)
    assert second.startswith("read text: 2.0 of 3.0 MB")
    assert last.endswith(", 0 s left")


def test_without_a_known_total_there_is_no_time_left(monkeypatch, capsys) -> None:
    monkeypatch.setattr(progress, "_SECONDS_BETWEEN_LINES", 0.0)
    show = progress.PrepareProgress(True)
    show.start("train", None)
    show.advance(1_000_000, 10)
    assert re.fullmatch(r"tokenize train: 1\.0 MB, 10 tokens, [\d.]+ MB/s\n", capsys.readouterr().err)


@pytest.mark.parametrize("rows", [0, 7])
def test_a_split_of_rows_counts_tokens(rows: int, capsys) -> None:
    show = progress.PrepareProgress(True)
    show.start("train", None)
    show.advance(0, rows)
    show.finish()
    assert capsys.readouterr().err.startswith(f"tokenized train: {rows} tokens, ")


def test_the_bar_shows_no_share_of_the_vocabulary(monkeypatch) -> None:
    """How much of it has been learned is not known, so the bar must not stay full as it was after reading the text."""
    monkeypatch.setattr(progress.terminal, "console", lambda **_: Console(file=io.StringIO(), force_terminal=True))
    with progress.PrepareProgress(True) as show:
        assert list(show.watch(iter("abc"), 3)) == ["a", "b", "c"]
        (task,) = show.bar.tasks
        assert (task.description, task.total) == ("learn the vocabulary", None)
