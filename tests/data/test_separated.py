"""CSV files as spreadsheets and people write them: separators, headers or none, columns without a name."""

import csv
from pathlib import Path

import pytest

from lmtrain.data.sources import tables
from lmtrain.data.sources.tables import read_table
from lmtrain.errors import UserError

ROWS = [["What are your opening hours?", "We are open Tuesday to Friday, 10-18."], ["Do you repair e-bikes?", "Yes."],
        ["Are you open on Sundays?", "No, sorry. Not on Sundays."]]  # fmt: skip


def written(rows: list[list[str]], sign: str, path: Path) -> Path:
    quoted = [[f'"{text}"' if sign in text else text for text in row] for row in rows]
    path.write_text("\ufeff" + "\r\n".join(sign.join(row) for row in quoted) + "\r\n", encoding="utf-8")
    return path


def read(path: Path, format: str = "csv", header: bool | None = None) -> list[list[str]]:
    """Returns the names of the columns and the values of each row."""
    rows = [row for _, row in read_table(path, format, header=header)]
    assert all(isinstance(row, dict) for row in rows), rows
    return [list(rows[0]), *(list(row.values()) for row in rows if isinstance(row, dict))]


@pytest.mark.parametrize("sign", [",", ";", "\t", "|"])
@pytest.mark.parametrize("names", [["Question", "Answer"], None])
def test_every_separator_with_and_without_a_header(sign: str, names: list[str] | None, tmp_path: Path) -> None:
    path = written([names, *ROWS] if names else ROWS, sign, tmp_path / "faq.csv")
    assert read(path) == [names or ["column_1", "column_2"], *ROWS]
    note = tables.read_otherwise.get(str(path), "")
    assert (f"separated by {sign!r}" in note) == (sign != "," and names is not None)
    assert ("the first line is read as a row" in note) == (names is None)
    if sign == "\t":
        assert read(path, "tsv") == read(path)


@pytest.mark.parametrize(("first", "is_header"), [
    (["What is your age?", "Where do you live?"], True),  # a survey's columns: no answer is a sentence
    (["Date of birth", "Place of birth"], True),
    (["No.", "Q."], True),
    (["id", "What is it?"], True),
])  # fmt: skip
def test_headers_that_look_like_text(first: list[str], is_header: bool, tmp_path: Path) -> None:
    path = written([first, ["1950", "Rome"], ["1960", "Oslo"]], ",", tmp_path / "a.csv")
    assert read(path)[0] == (first if is_header else ["column_1", "column_2"])
    assert read(path, header=False) == [["column_1", "column_2"], first, ["1950", "Rome"], ["1960", "Oslo"]]


def test_what_is_typed_decides_about_the_header(tmp_path: Path) -> None:
    path = written(ROWS, ",", tmp_path / "a.csv")
    assert read(path, header=True) == ROWS
    assert read(path, header=False)[1:] == ROWS
    # A column that is asked for is the first line's.
    rows = [row for _, row in read_table(path, "csv", [ROWS[0][1]])]
    assert [row[ROWS[0][1]] for row in rows if isinstance(row, dict)] == [row[1] for row in ROWS[1:]]
    with pytest.raises(UserError, match=r"a\.csv has no column 'text'"):
        list(read_table(path, "csv", ["text"]))


def test_columns_without_a_name(tmp_path: Path) -> None:
    """pandas writes its index under no name; spreadsheets write empty columns at the end."""
    rows = [["", "question", "answer", ""], ["0", "Why?", "So.", ""], ["1", "How?", "Thus.", ""]]
    path = written(rows, ",", tmp_path / "a.csv")
    assert read(path) == [["column_1", "question", "answer", "column_4"], *rows[1:]]
    with pytest.raises(UserError, match=r"line 1: the first line must name columns, each differently"):
        read(written([["a", "a"], ["b", "c"]], ",", path))


def test_a_row_of_another_width_decides_nothing(tmp_path: Path) -> None:
    for sign in (",", ";"):
        path = written([["question", "answer"], *ROWS], sign, tmp_path / "a.csv")
        with path.open("a") as file:
            file.write("alone\n")
        found = [row for _, row in read_table(path, "csv")]
        assert found[:-1] == [{"question": q, "answer": a} for q, a in ROWS]
        assert found[-1] == "the line has 1 fields, and the first line names 2 columns"


def test_a_field_may_be_longer_than_csvs_own_limit(tmp_path: Path) -> None:
    before = csv.field_size_limit(131_072)
    try:
        (tmp_path / "a.csv").write_text(f"text,n\n{'x' * 200_000},1\n")
        (_, row), *more = read_table(tmp_path / "a.csv", "csv")
        assert (len(row["text"]), more) == (200_000, [])  # type: ignore[index]
    finally:
        csv.field_size_limit(before)
