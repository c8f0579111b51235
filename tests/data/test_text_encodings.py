"""Text files that are not UTF-8 are read, named and counted if the encoding can be detected, and otherwise refused."""

import codecs
from collections.abc import Callable
from pathlib import Path

import pytest

from inprocess import run
from lmtrain.config.schema_data import DataConfig
from lmtrain.data.sources import files, lines
from lmtrain.data.sources.encodings import detect
from lmtrain.errors import UserError
from support import TINY

TEXTS = {
    "latin-1": "Der König fährt über die Straße und kommt später zurück.\n" * 30,
    "cp1252": "Le garçon était très élève à l’école – “déjà vu” … 3 €.\n" * 30,
    "cp1250": "Zażółć gęślą jaźń, a potem idź do domu, proszę bardzo.\n" * 30,
    "cp1251": "Привет, как дела? Это небольшой текст на русском языке.\n" * 30,
    "utf-16-le": "\ufeffEin Text in UTF-16, wie ihn der Editor von Windows schreibt: größer 你好.\n" * 3,
    "utf-16-be": "\ufeffThe other way round: 1 € or £2.\n" * 3,
    "utf-32-le": "\ufeffFour bytes for each character, größer 你好.\n" * 3,
    "utf-32-be": "\ufeffThe other way round: 1 € or £2.\n" * 3,
    "shift_jis": "こんにちは、世界。これは日本語の文章です。今日は天気がいいですね。\n" * 30,
}


@pytest.mark.parametrize("encoding", TEXTS)
@pytest.mark.parametrize("size", [7, 1 << 20])
def test_text_is_read_as_it_was_written(encoding: str, size: int, tmp_path: Path) -> None:
    text, path = TEXTS[encoding], tmp_path / "text.txt"
    path.write_bytes(text.encode(encoding))
    expected = text.removeprefix("\ufeff")
    assert "".join(lines.decoded_blocks(path, size)) == expected
    assert list(lines.raw_lines(path)) == expected.splitlines(keepends=True)
    assert lines.encoding_notes([path, tmp_path / "other"])[0].startswith(
        "1 file is not UTF-8; read in the detected encoding: "
    )


def test_what_is_ascii_for_long_before_it_is_not(tmp_path: Path) -> None:
    path, text = tmp_path / "text.txt", "plain words\n" * 50_000 + "café\n"
    path.write_bytes(text.encode("latin-1"))
    assert "".join(lines.decoded_blocks(path, 1000)) == text


@pytest.mark.parametrize(
    "data",
    [b"f\xc3\xa4r\nGr\xfc\xdfe\n", b"abc\xffdef\n", b"\x00\x01\x02\xe9", b"a\x81\x8d\x9d\xfe" * 50, b"f\xc3\xa4r\xc3"],
    ids=["two encodings", "one odd byte", "binary", "undefined bytes", "cut in a character"],
)
def test_what_can_t_be_told_is_refused(data: bytes, tmp_path: Path) -> None:
    path = tmp_path / "text.txt"
    path.write_bytes(data)
    with pytest.raises(UserError, match=r"text\.txt.*not UTF-8.*iconv"):
        list(lines.decoded_blocks(path, 100))


def test_utf_8_stays_utf_8(tmp_path: Path) -> None:
    path, text = tmp_path / "text.txt", "für ’n Euro: 3 €, 你好 🙂\n" * 10
    path.write_text(text, encoding="utf-8")
    for size in (1, 2, 3, 1000):
        assert "".join(lines.decoded_blocks(path, size)) == text
    assert lines.encoding_notes([path]) == []


def test_a_byte_order_mark_is_no_text(tmp_path: Path) -> None:
    text = "für ’n Euro\n\ufeffnot at the begin\n"
    path = tmp_path / "text.txt"
    path.write_text(text, encoding="utf-8-sig")
    for size in (3, 5, 1000):
        assert "".join(lines.decoded_blocks(path, size)) == text
    assert list(lines.raw_lines(path)) == text.splitlines(keepends=True)
    assert lines.encoding_notes([path]) == []
    path.write_bytes(codecs.BOM_UTF8 + "für".encode() + "Der König\n".encode("latin-1") * 30)  # still refused
    with pytest.raises(UserError, match="not UTF-8"):
        list(lines.decoded_blocks(path, 100))


def test_a_table_of_a_spreadsheet(tmp_path: Path, data_config: Callable[..., DataConfig]) -> None:
    path = tmp_path / "table.csv"
    path.write_bytes("id,text\n1,Der König fährt\n2,über die Straße\n".encode("cp1252"))
    found = list(files.read_rows(path, "csv", data_config("jsonl")))
    assert found == ["Der König fährt", "über die Straße"]


def test_json_is_utf_8(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes('{"text": "café au lait"}\n'.encode("latin-1"))
    with pytest.raises(UserError, match="not UTF-8"):
        list(files.read_records([(path, "jsonl")]))


def test_letters_tell() -> None:
    assert detect("naïve".encode("latin-1")) == "cp1252"
    assert detect("l’été".encode("cp1252")) == "cp1252"
    assert detect(b"\xa9 2020") == "cp1252"
    assert detect(b"a\xb3b") is None


def test_the_plan_counts_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The plan counts non-UTF-8 files in the run that prepares them and in later runs, which reuse the tokens."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "old.txt").write_bytes(TEXTS["latin-1"].encode("latin-1"))
    ended = run("train", "old.txt", *TINY, "trainer.max_steps=1", "run.name=a")
    assert ended.code == 0, ended.err
    lines.not_utf8.clear()  # as in a new process
    assert run("train", "old.txt", *TINY, "trainer.max_steps=1", "run.name=b").code == 0
    for name in ("a", "b"):
        plan = " ".join((tmp_path / f"outputs/{name}/plan.txt").read_text().replace("│", " ").split())
        assert "1 file is not UTF-8; read in the detected encoding: old.txt (cp1252)" in plan
        assert "validation has 5 rows: small differences of val/loss are noise" in plan
