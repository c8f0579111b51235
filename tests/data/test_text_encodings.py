"""Text is UTF-8: files in another encoding are refused, by line, with how to convert them."""

from collections.abc import Callable
from pathlib import Path

import pytest

from lmtrain.config.schema_data import DataConfig
from lmtrain.data.sources import files, lines
from lmtrain.errors import UserError

REFUSED = {
    "latin-1": "Der König fährt über die Straße und kommt später zurück.\n".encode("latin-1"),
    "utf-16": "\ufeffEin Text in UTF-16, wie ihn der Editor von Windows schreibt: größer 你好.\n".encode("utf-16-le"),
    "two encodings": b"f\xc3\xa4r\nGr\xfc\xdfe\n",
    "one odd byte": b"abc\xffdef\n",
    "binary": b"\x00\x01\x02\xe9",
    "undefined bytes": b"a\x81\x8d\x9d\xfe" * 50,
    "cut in a character": b"f\xc3\xa4r\xc3",
}


@pytest.mark.parametrize("data", REFUSED.values(), ids=REFUSED)
def test_what_is_not_utf_8_is_refused(data: bytes, tmp_path: Path) -> None:
    path = tmp_path / "text.txt"
    path.write_bytes(data)
    for read in (lambda: lines.text_blocks(path, 100), lambda: lines.raw_lines(path)):
        with pytest.raises(UserError, match=r"text\.txt.*not UTF-8.*iconv"):
            list(read())


@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
def test_utf_8_is_read_as_it_was_written(size: int, tmp_path: Path) -> None:
    path, text = tmp_path / "text.txt", "für ’n Euro: 3 €, 你好 🙂\r\n and more\n" * 10
    path.write_bytes(text.encode())
    assert "".join(lines.text_blocks(path, size)) == text
    assert "".join(lines.raw_lines(path)) == text


def test_a_table_of_a_spreadsheet(tmp_path: Path, data_config: Callable[..., DataConfig]) -> None:
    path = tmp_path / "table.csv"
    path.write_bytes("id,text\n1,Der König fährt\n2,über die Straße\n".encode("cp1252"))
    with pytest.raises(UserError, match=r"table\.csv, line 2: not UTF-8"):
        list(files.read_rows(path, "csv", data_config("jsonl")))
    path.write_bytes(path.read_bytes().decode("cp1252").encode("utf-8-sig"))
    assert list(files.read_rows(path, "csv", data_config("jsonl"))) == ["Der König fährt", "über die Straße"]


def test_json_is_utf_8(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes('{"text": "café au lait"}\n'.encode("latin-1"))
    with pytest.raises(UserError, match="not UTF-8"):
        list(files.read_records([(path, "jsonl")]))
