"""What preparation prints while it runs without a terminal for a progress bar."""

import re

import pytest

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
