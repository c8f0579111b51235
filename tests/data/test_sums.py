"""Sums: right, of the numbers that are promised, held out for every seed alike, and the same in all forms."""

import itertools

from lmtrain.data.order import mix64
from lmtrain.data.sources.sums import Sums, written


def test_numbers_are_written_from_their_last_digit() -> None:
    assert [written(n) for n in (7, 12, 120, 999, 1998)] == ["700", "210", "021", "999", "8991"]


def test_sums_are_right_and_the_same_as_text_and_as_rows() -> None:
    sums = Sums(2000, 300, seed=3)
    for split, count in (("train", 2000), ("val", 300)):
        terms = list(sums.terms(split))
        assert len(terms) == count
        texts, rows = [p.text for p in sums.pieces(split)], [row for _, row in sums.records(split)]
        for (a, b), text, row in zip(terms, texts, rows, strict=True):
            first, second, total = (int(part[::-1]) for part in (text[:3], text[4:7], text[8:]))
            assert (first, second, total) == (a, b, a + b)
            assert 10 <= a <= 999
            assert 10 <= b <= 999
            assert row == {"prompt": text[:8], "completion": f"<{text[8:]}>", "answer": text[8:]}
        assert all(piece.ends for piece in sums.pieces(split))
        assert abs(sums.text_bytes(split) - sum(map(len, texts))) < 0.1 * count * 12
    assert [where for where, _ in itertools.islice(sums.records("val"), 2)] == ["sum 0", "sum 1"]
    assert {n for pair in sums.terms("train") for n in pair} >= {10, 999, 500}


def test_a_tenth_of_all_sums_is_held_out_whatever_the_seed() -> None:
    """No stage trains on what another is validated on."""
    trained = {pair for seed in (0, 1) for pair in Sums(4000, 0, seed).terms("train")}
    held = {pair for seed in (0, 1) for pair in Sums(0, 400, seed).terms("val")}
    assert not trained & held
    assert len(held) > 700, "seeds draw different sums"
    assert len(trained) > 7500
    shares = [mix64(a, b) % 10 == 0 for a in range(10, 200) for b in range(10, 60)]
    assert abs(sum(shares) / len(shares) - 0.1) < 0.01
    assert list(Sums(5).terms("train")) == list(Sums(5, 0, 0).terms("train"))
    assert list(Sums().terms("val")) == list(Sums(20_000, 500, 0).terms("val"))
    assert list(Sums(5, 0, 1).terms("train")) == list(Sums(5, 9, 1).terms("train"))
    assert Sums(5, 6, 7).settings == {"kind": "sums", "number": 5, "held_out": 6, "seed": 7}
