"""Joining, filtering and holding out documents, each compared with a loop over whole strings."""

import random
import re

import pytest
from texts import whole

from lmtrain.config.compose import compose
from lmtrain.data.sources.pieces import (
    Piece,
    at_least,
    enough,
    first,
    is_held_out,
    join_rows,
    plan_split,
    split,
)


def cut_up(documents, seed=0):
    """Yields the documents as pieces of random length."""
    chance = random.Random(seed)
    for document in documents:
        done = 0
        while done < len(document):
            step = chance.randint(1, 5)
            yield Piece(document[done : done + step], False)
            done += step
        yield Piece("", True)


DOCUMENTS = ["x" * n for n in (0, 1, 5, 2, 9, 0, 3)]


@pytest.mark.parametrize("min_length", [0, 1, 3, 100])
def test_at_least(min_length):
    wanted = [d for d in DOCUMENTS if len(d) >= max(1, min_length)]
    assert list(whole(at_least(cut_up(DOCUMENTS), min_length))) == wanted


def test_first():
    for n in (0, 1, 3, 100):
        assert list(whole(first(cut_up(DOCUMENTS), n))) == DOCUMENTS[:n]


def test_rows_become_documents():
    rows = ["before\n", " = A = \n", "", " text \n", " = = B = = \n", " more \n", " = C ( d ) = \n", " end \n"]
    joined = list(whole(join_rows(rows, r"^ = [^=].* = \n?$")))
    assert joined == ["before\n", "".join(rows[1:6]), "".join(rows[6:])]
    assert list(join_rows([], "x")) == []


@pytest.mark.parametrize("fraction", [0.01, 0.05, 0.1, 0.3, 1 / 49, 1 / 3, 0.5])
@pytest.mark.parametrize("extra", [0, 1, 57])
def test_held_out_documents(fraction, extra):
    count = -(-1 // fraction)
    documents = [f"document {i}" for i in range(int(count) + 1 + extra)]
    share, cut = plan_split(cut_up(documents), fraction, 0)
    assert (share, cut) == (fraction, None)
    parts = [list(whole(split(cut_up(documents), fraction, cut, held_out=h))) for h in (False, True)]
    assert sorted(parts[0] + parts[1]) == sorted(documents)
    assert len(parts[1]) == int(len(documents) * fraction + 1e-6) >= 1


@pytest.mark.parametrize("documents", [["abcdefghij" * 10], ["a" * 55, "b" * 7, "c" * 200], ["x"] * 90 + ["yz"] * 5])
def test_the_end_of_a_few_documents_is_held_out(documents):
    _, cut = plan_split(cut_up(documents), 0.01, 0)
    train, val = (
        list(whole(at_least(split(cut_up(documents, seed=1), 0.01, cut, held_out=h), 1))) for h in (False, True)
    )
    assert "".join(train + val) == "".join(documents)
    assert len("".join(train)) == int(len("".join(documents)) * 0.99)
    assert train[:-1] == documents[: len(train) - 1]  # only the document at the cut is split


def test_planning_reads_no_more_than_it_needs():
    def endless():
        while True:
            yield Piece("text", True)

    assert plan_split(endless(), 0.01, 0) == (0.01, None)
    assert plan_split(endless(), 0.01, 20) == (0.01, None)


@pytest.mark.parametrize(
    ("fraction", "there", "held_out"),
    [
        (0.02, 10_000, 200),
        (0.02, 1000, 20),
        (0.02, 500, 20),
        (0.02, 100, 10),
        (0.02, 50, 5),
        (0.02, 49, 0),
        (0.3, 9, 2),
    ],
)
def test_a_few_rows_are_no_validation_split(fraction, there, held_out):
    share = enough(fraction, there, 20)
    assert sum(is_held_out(index, share) for index in range(there)) == held_out


@pytest.mark.parametrize(
    ("documents", "share"),
    [(["a" * 2_000_000], 0.01), (["a" * 1_000_000], 0.02), (["a" * 100_000], 0.1), (["a" * 50] * 100, 0.1),
     (["a" * 50] * 5000, 0.01), (["a" * 50_000] * 40, 0.01), (["a"] * 7, 0.01)],
)  # fmt: skip
def test_more_of_a_small_text_is_held_out(documents, share):
    assert plan_split(cut_up(documents), 0.01, 20)[0] == pytest.approx(share)


def test_a_share_that_was_typed_is_held_out_as_it_stands():
    assert plan_split(cut_up(["a" * 50] * 100), 0.01, 0)[0] == 0.01
    assert compose(["data=text"]).data.min_val_rows == 20
    assert compose(["data=text", "data.val_fraction=0.01"]).data.min_val_rows == 0
    assert compose(["data=text", "data.val_fraction=0.01", "data.min_val_rows=7"]).data.min_val_rows == 7


def test_wikitext_pattern_is_the_one_in_conf(data_config):
    pattern = data_config("wikitext").document_start
    assert re.search(pattern, " = Robert Boulter = \n")
    for other in (" = = Career = = \n", " = = = 2000 – 2005 = = = \n", "", " a = b \n", " = unfinished \n"):
        assert not re.search(pattern, other)
