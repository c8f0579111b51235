"""Inputs of other trainers' bug reports that no other test has; docs/known_reports.md lists all that were tried."""

import csv
import json
from pathlib import Path
from typing import Any

import pytest

from inprocess import train_tiny
from lmtrain.data import tokenizers
from lmtrain.data.chat.special_text import AnswerDecoder
from lmtrain.data.sources.tables import read_table

NOTHING = ["None", "NA", "null", "nan", "N/A", "-", "007", "1.0", "True", "two\nlines"]


def test_words_for_nothing_in_a_table_are_text(tmp_path: Path) -> None:
    """Readers of tables take `null` or `NA` for a missing value, and numbers and truth values for their own types."""
    path = tmp_path / "table.csv"
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([["prompt", "response"], *(["Say it.", word] for word in NOTHING)])
    assert [row["response"] for _, row in read_table(path, "csv") if isinstance(row, dict)] == NOTHING


def test_a_column_of_several_types_spoils_no_other(tmp_path: Path) -> None:
    """Arrow wants one type in a column, which it guesses from the first rows."""
    kinds: list[Any] = [1, "x", None, [[0, 4, "name"]], {"a": [1, "b"]}, 2.5, True]
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps({"text": f"row {i}", "meta": kind}) + "\n" for i, kind in enumerate(kinds)))
    assert [row for _, row in read_table(path, "jsonl")] == [
        {"text": f"row {i}", "meta": kind} for i, kind in enumerate(kinds)
    ]


def test_ends_of_documents_that_are_written_in_the_text_are_counted(tmp_path: Path) -> None:
    """TinyStories' text has <|endoftext|> between its stories; read as text, it ends none of them."""
    (tmp_path / "stories.txt").write_text("Once there was a cat.\nIt slept.\n<|endoftext|>\n" * 50)
    (tmp_path / "plain.txt").write_text("Once there was a cat.\nIt slept.\n\n" * 80)
    for name, said in (("stories.txt", True), ("plain.txt", False)):
        ended = train_tiny(tmp_path / name, "export.enabled=false", f"run.dir={tmp_path / name}_run")
        shown = " ".join(ended.out.replace("│", " ").split())
        assert ("<|endoftext|> is written in the text, 50 times, and read as text" in shown) == said


@pytest.mark.parametrize("kind", ["bytes", "char"])
def test_spaces_before_signs_are_kept_in_what_is_written(kind: str, tokenizer_config: Any) -> None:
    """Many tokenizers come with clean_up_tokenization_spaces=true, which turns `x != y` into `x!= y`."""
    text = "x != y , don ' t ? yes !"
    tokenizer = tokenizers.load_or_train(tokenizer_config(kind), lambda _: iter([text]))
    tokenizer.clean_up_tokenization_spaces = True
    assert AnswerDecoder(tokenizer, ()).decode(tokenizer(text)["input_ids"]) == text
