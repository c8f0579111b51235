"""The parts of reading text, each by hand: lines, encodings, tables, repeats, sums, progress and bins."""

import io
from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from lmtrain.data.order import Repeats, mix64
from lmtrain.data.sources import encodings, lines
from lmtrain.data.sources.pieces import Piece
from lmtrain.data.sources.separated import _is_header, _names, _sign_of
from lmtrain.data.sources.sums import Sums, written
from lmtrain.data.store import bins, progress
from lmtrain.data.text import repeats
from lmtrain.errors import UserError

# Lines and encodings


def test_lines_are_whole_wherever_blocks_are_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = "one\r\n\nthree é\nlast without end"
    (tmp_path / "a.txt").write_text(text, encoding="utf-8", newline="")
    for size in range(1, 12):
        monkeypatch.setattr(lines, "_BUFFER", size)
        assert list(lines.raw_lines(tmp_path / "a.txt")) == text.splitlines(keepends=True)
        assert "".join(lines.text_blocks(tmp_path / "a.txt", size)) == text
    assert "".join(lines.text_blocks(tmp_path / "a.txt", 5, start=5)) == text[5:]


def test_lines_are_located_by_their_byte(tmp_path: Path) -> None:
    raw = "\ufeffé\nb\nc".encode()
    (tmp_path / "a.jsonl").write_bytes(raw)
    assert list(lines.located_data_lines(tmp_path / "a.jsonl")) == [(0, "é\n"), (6, "b\n"), (8, "c")]
    assert list(lines.located_data_lines(tmp_path / "a.jsonl", 6)) == [(6, "b\n"), (8, "c")]
    assert list(lines.data_lines(tmp_path / "a.jsonl")) == ["é\n", "b\n", "c"]
    import gzip

    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(raw))
    assert list(lines.located_data_lines(tmp_path / "a.jsonl.gz", 8)) == [(8, "c")]
    (tmp_path / "bad.jsonl").write_bytes(b"fine\nnot \xff here\n")
    with pytest.raises(UserError, match=r"bad.jsonl, line 2: not UTF-8 \(invalid start byte\): b'not .xff here"):
        list(lines.data_lines(tmp_path / "bad.jsonl"))
    (tmp_path / "cut.gz").write_bytes(gzip.compress(raw * 99)[:-9])
    with pytest.raises(UserError, match=r"cut\.gz can't be read"):
        list(lines.data_lines(tmp_path / "cut.gz"))
    stream = io.BytesIO(b"abcdef")
    stream.seekable = lambda: False  # type: ignore[method-assign]
    lines._skip(stream, 4)
    assert stream.read() == b"ef"


def test_files_that_are_not_utf_8_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    paths = [Path(f"{i}.txt") for i in range(5)]
    monkeypatch.setattr(lines, "not_utf8", {str(path): "cp1252" for path in paths[:4]})
    assert lines.encoding_notes(paths[4:]) == []
    assert lines.encoding_notes(paths[3:]) == ["1 file is not UTF-8; read in the detected encoding: 3.txt (cp1252)"]
    assert lines.encoding_notes(paths) == ["4 files are not UTF-8; read in the detected encoding: 0.txt (cp1252), "
                                           "1.txt (cp1252), 2.txt (cp1252) ..."]  # fmt: skip


def test_western_letters_tell_cp1252() -> None:
    for text in ("Küche", "d’été", "a – b", "“x”", "£5", "Straße 3·4"):
        assert encodings.detect(text.encode("cp1252")) == "cp1252", text
    for raw in (b"a\x00b", b"a\x07b", b"x\x81y"):
        assert encodings.detect(raw) != "cp1252"
    assert not encodings._is_western("a£b".encode("cp1252")), "a sign inside a word"
    assert not encodings._is_western(b"\xde\xfe\xd0"), "letters of Icelandic are rare"
    for name, mark in encodings.MARKS.items():
        assert encodings.marked(mark + "x".encode(name)) == name
    assert encodings.marked(b"\xef\xbb\xbfx") is None


def test_a_decoder_changes_to_what_it_detects_unless_there_was_utf_8_before() -> None:
    text = ("plain " * 50 + "Küche für Gäste\n").encode("cp1252")
    decoder = encodings.Decoder(lambda: io.BytesIO(text), None)
    assert decoder.decode(text[:100]) + decoder.decode(text[100:], True) == text.decode("cp1252")
    assert decoder.encoding == "cp1252"
    mixed = "é".encode() + text
    decoder = encodings.Decoder(lambda: io.BytesIO(mixed), None)
    assert decoder.decode(mixed[:2]) == "é"
    with pytest.raises(UnicodeDecodeError):
        decoder.decode(mixed[2:])
    assert encodings._of_file(io.BytesIO(b"only ascii")) is None
    assert encodings._of_file(io.BytesIO("It costs 5 €\n".encode("cp1252"))) == "cp1252", "the first byte of all"
    marked = encodings.Decoder(lambda: io.BytesIO(), "utf-16-le")
    assert marked.decode("aé".encode("utf-16-le")) == "aé"


def test_the_sign_of_a_table_is_the_one_that_gives_even_lines() -> None:
    assert _sign_of(["a;b,c\n", "1;2,3\n"]) == ","
    assert _sign_of(["a;b\n", "1,5;2\n", "3;4\n"]) == ";"
    assert _sign_of(["a\tb,c\n", "1\t2\n"]) == "\t"
    assert _sign_of(["a|b\n"]) == "|"
    assert _sign_of(["word\n", "word\n"]) == ","
    assert _sign_of(["a;b;c\n", "1;2\n"]) == ";", "the most columns in the first line where none is even"
    assert _names(["a", " ", "b"], "x") == ["a", "column_2", "b"]
    with pytest.raises(UserError, match="x: the first line must name columns, each differently"):
        _names(["a", "b", "a"], "x")
    sentence, below = ["It is a nice day.", "3"], ["So it is here too.,4\n"]
    assert not _is_header(sentence, ["It is a nice day.,3\n", *below], ",", [])
    assert _is_header(sentence, ["It is a nice day.,3\n", *below], ",", ["3"]), "one of the wanted columns"
    assert _is_header(["text", "label"], ["text,label\n", *below], ",", [])
    assert _is_header(sentence, ["It is a nice day.,3\n", "word,4\n"], ",", []), "those below are no sentences"
    assert _is_header([sentence[0], "label"], [f"{sentence[0]},label\n", *below], ",", []), "beside a word"


# Repeats


def test_rolling_hashes_are_polynomials() -> None:
    tokens, base = np.array([3, 1, 4, 1, 5, 9, 2, 6]), repeats._BASE
    found = repeats._rolling(tokens, 3).tolist()
    powers = [sum((int(tokens[i + j]) + 1) * pow(base, j, 2**64) for j in range(3)) % 2**64 for i in range(6)]
    scale = found[0] * pow(powers[0], -1, 2**64) % 2**64 if powers[0] % 2 else None
    assert len(found) == 6
    assert scale is None or [p * scale % 2**64 for p in powers] == found
    again = repeats._rolling(np.array([7, 3, 1, 4]), 3).tolist()
    assert again[1] == found[0], "the same wherever it begins"
    assert len(set(found)) == 6


def test_words_and_ngrams_do_not_depend_on_where_pieces_are_cut() -> None:
    text = "One two  three\nFOUR five six seven"
    for size in (1, 3, 7, 99):
        pieces = [text[i : i + size] for i in range(0, len(text), size)]
        assert [word for words in repeats._words(pieces) for word in words] == text.split()
        groups = list(repeats._overlapping(repeats._words(pieces)))
        ngrams = [" ".join(words[i : i + 5]) for words in groups for i in range(len(words) - 4)]
        assert ngrams == ["One two three FOUR five", "two three FOUR five six", "three FOUR five six seven"]
    assert list(repeats._overlapping([["Two"], ["words"]])) == [["Two", "words"]]
    index = repeats._Exact()
    assert [index.is_new([t]) for t in ("a b", "a  b\n", "ab", "a b c")] == [True, False, True, True]


def test_documents_of_an_index_are_left_out() -> None:
    pieces = [Piece("a", False), Piece("b", True), Piece("c", True), Piece("d", True)]
    assert list(repeats._without(pieces, {0, 2})) == [Piece("c", True)]
    assert list(repeats._without(pieces, set())) == pieces


def test_a_hundredth_of_copies_is_worth_a_note(monkeypatch: pytest.MonkeyPatch) -> None:
    near = [(0, 100)]
    monkeypatch.setattr(repeats, "near_repeats", lambda train, length: near[0])

    def noted(copies: int, documents: int = 100) -> list[str]:
        counter = repeats.RepeatCounter()
        pieces = [Piece(p, p != "x") for i in range(documents - copies) for p in ("x", str(i))]
        pieces += [Piece(p, p != "x") for _ in range(copies) for p in ("x", "0")]
        assert list(counter.watch(pieces)) == pieces
        return counter.notes([], 5)

    assert noted(0) == []
    assert noted(1) == ["1 of 100 documents (1%) are exact copies of an earlier one: data.dedup=exact leaves them out"]
    assert noted(1, 101) == []
    near[0] = (3, 100)
    assert len(noted(2)) == 2
    assert noted(0)[0].startswith("3 of 100 documents (3%) are near or exact copies")
    assert len(noted(3)) == 1, "as many as the exact ones"
    monkeypatch.setattr(repeats, "_COUNTED", 2)
    counter = repeats.RepeatCounter()
    list(counter.watch([Piece("a", True)] * 5))
    assert (counter.documents, len(counter.seen)) == (2, 1)


def test_the_share_of_text_that_is_seen_in_training(monkeypatch: pytest.MonkeyPatch) -> None:
    def shards(*parts: list[int]) -> Any:
        return [
            SimpleNamespace(tokens=len(p), read=lambda start, n, p=p: np.array(p[start : start + n])) for p in parts
        ]

    train = shards(list(range(40)), [*range(100, 120)])
    assert repeats.share_seen(train, shards([*range(5, 9), *range(200, 204)]), 4) == 0.5
    assert repeats.share_seen(train, shards([*range(5, 9)] * 3), 4) == 1.0
    assert repeats.share_seen(train, shards([38, 39, 100, 101]), 4) == 0.0, "not across shards"
    assert repeats.share_seen(train, shards([1, 2]), 4) == 0.0
    assert list(repeats._hashes(shards([1, 2, 3], [4, 5]), 4, 9)) == []
    assert [at for at, _ in repeats._hashes(shards([1, 2, 3], [4, 5]), 2, 9)] == [0, 3]
    monkeypatch.setattr(repeats, "_TOKENS_AT_ONCE", 3)
    found = [(at, len(hashes)) for at, hashes in repeats._hashes(shards(list(range(9)), [4, 5]), 2, 5)]
    assert found == [(0, 3), (3, 3)], "parts begin within the first five tokens"


# Sums, and rows repeated by weight


def test_sums_are_right_written_backwards_and_apart_from_those_held_out() -> None:
    assert [written(n) for n in (7, 45, 123, 1998)] == ["700", "540", "321", "8991"]
    source = Sums(number=300, held_out=50, seed=4)
    rows = {name: list(source.terms(name)) for name in ("train", "val")}
    assert [len(rows[name]) for name in rows] == [300, 50]
    drawn = [tuple(10 + mix64(4, 0, draw, which) % 990 for which in (0, 1)) for draw in range(1, 400)]
    assert rows["train"] == [pair for pair in drawn if mix64(*pair) % 10][:300], "those of earlier versions"
    assert not set(rows["train"]) & set(rows["val"])
    assert {n for some in rows.values() for pair in some for n in pair} <= set(range(10, 1000))
    assert max(n for pair in rows["train"] for n in pair) > 950
    (where, row), (a, b) = next(iter(source.records("train"))), rows["train"][0]
    assert (where, row) == ("sum 0", {"prompt": f"{written(a)}+{written(b)}=", "completion": f"<{written(a + b)}>",
                                      "answer": written(a + b)})  # fmt: skip
    assert next(
        iter(source.pieces("val"))
    ).text == f"{written(rows['val'][0][0])}+{written(rows['val'][0][1])}=" + written(sum(rows["val"][0]))
    assert (source.text_bytes("train"), source.settings["held_out"]) == (3600, 50)
    assert Sums().numbers == {"train": 20_000, "val": 500}
    assert list(Sums(300, 50, seed=4).terms("train")) == rows["train"] != list(Sums(300, 50).terms("train"))


def test_rows_are_repeated_by_weight_as_a_list_would_hold_them() -> None:
    counts, weights = [4, 3, 5], [Fraction(2), Fraction(1, 2), Fraction(7, 5)]
    listed, begin = list[int](), 0
    for count, weight in zip(counts, weights, strict=True):
        given = 0
        for n in range(count):
            now = int((n + 1) * weight)
            listed += [begin + n] * (now - given)
            given = now
        begin += count
    found = Repeats(counts, weights)
    assert len(found) == len(listed)
    assert found.stored(np.arange(len(found))).tolist() == listed


# Progress


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [100.0]
    monkeypatch.setattr(progress.time, "perf_counter", lambda: now[0])
    return now


def test_progress_is_said_every_ten_seconds(clock: list[float], capsys: pytest.CaptureFixture[str]) -> None:
    with progress.PrepareProgress(True) as show:
        show.start("train", 4_000_000)
        clock[0] += 9.9
        show.advance(500_000, 100)
        assert capsys.readouterr().err == ""
        clock[0] += 0.1
        show.advance(500_000, 900)
        assert capsys.readouterr().err == "tokenize train: 1.0 of 4.0 MB, 1,000 tokens, 0.1 MB/s, 30 s left\n"
        show.advance(1, 0)
        clock[0] += 10
        show.advance(3_500_000, 0)
        assert capsys.readouterr().err == "tokenize train: 4.5 MB, 1,000 tokens, 0.2 MB/s\n"
        show.finish("a library")
        assert capsys.readouterr().err == "tokenized train: 4.5 MB, 1,000 tokens, 0.2 MB/s (by a library)\n"
        show.start("rows", None, doing="read")
        clock[0] += 0.5
        show.advance(0, 50)
        show.finish()
        assert capsys.readouterr().err == "tokenized rows: 50 tokens, 100 tokens/s\n"
        assert show.bar.task_ids == [], "it is no longer drawn"
    assert [progress._size(n) for n in (99_999, 100_000)] == ["100.0 kB", "0.1 MB"]
    with progress.PrepareProgress(False) as quiet:
        quiet.start("x", 1)
        clock[0] += 99
        quiet.advance(1, 1)
        quiet.finish()
    assert capsys.readouterr().err == ""


def test_rows_are_counted_with_the_time_left(clock: list[float], capsys: pytest.CaptureFixture[str]) -> None:
    with progress.RowProgress(True) as show:
        show.start("rows", 50, doing="score")
        clock[0] += 10
        show.advance(20, 0)
        assert capsys.readouterr().err == "score rows: 20 of 50, 2 rows/s, 15 s left\n"
        clock[0] += 5
        show.advance(30, 0)
        show.finish()
        assert capsys.readouterr().err == "score rows: 50 of 50, 3 rows/s\n"
        show.start("rows", 50, doing="score")
        clock[0] += 0.5
        show.advance(20, 0)
        show.finish()
        assert capsys.readouterr().err == "score rows: 20 of 50, 40 rows/s, 1 s left\n"
        assert show.bar.task_ids == [], "it is no longer drawn"


def test_what_bins_begin_with() -> None:
    shards = [SimpleNamespace(read=lambda start, n: np.array([3, 9, 1][start : start + n]))]
    split = bins.SplitBins(shards, 6, None, None, "uint16", None)  # type: ignore[arg-type]
    assert split.begins_with([3, 9])
    assert not split.begins_with([9])
    assert not split.begins_with([3] * 7)
