"""The parts of preparing text, each by hand: cuts, near copies, draws of fill-in-the-middle, mixtures, and progress."""

import itertools
import json
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from lmtrain.data.order import mix64
from lmtrain.data.text import encode, mixture, prepare, repeats
from lmtrain.data.text.encode import Segment
from lmtrain.data.text.fim import FillInTheMiddle
from lmtrain.data.text.windows import IGNORE, Windows, cut_rows, make_batch
from lmtrain.errors import UserError


class Tokens:
    """A shard in memory."""

    def __init__(self, ids: list[int], ends: list[int]) -> None:
        self.tokens, self.ids, self.ends, self.path = len(ids), np.array(ids, dtype=np.int64), np.array(ends), "x.bin"

    def read(self, start: int, count: int) -> np.ndarray:
        return self.ids[start : start + count]

    def document_ends(self, start: int, stop: int) -> np.ndarray:
        return self.ends[(start <= self.ends) & (self.ends < stop)].astype(np.int64)


# Near copies


def near_by_hand(documents: list[list[int]], borders: list[int], length: int) -> int:
    """Counts near copies with sets of hashes; `borders` are places in the text that no n-gram crosses."""
    holders: dict[int, list[int]] = {}
    sizes, begin = [0] * len(documents), 0
    for number, ids in enumerate(documents):
        grams = set()
        for i in range(len(ids) - length + 1):
            powers = ((ids[i + j] + 1) * pow(repeats._BASE, j, 2**64) for j in range(length))
            value = sum(powers) % 2**64
            crosses = any(begin + i < border < begin + i + length for border in borders)
            if value < 2**62 and not crosses:  # a quarter of all
                grams.add(value >> 20)
        for gram in grams:
            holders.setdefault(gram, []).append(number)
        sizes[number], begin = len(grams), begin + len(ids)
    shared: dict[tuple[int, int], int] = {}
    for some in holders.values():
        for place, one in enumerate(some):
            for other in {some[0], *some[max(0, place - 4) : place]} - {one}:
                shared[one, other] = shared.get((one, other), 0) + 1
    return len({one for (one, other), n in shared.items()
                if n >= 0.8 * (sizes[one] + sizes[other] - n) and sizes[one] >= 8})  # fmt: skip


@pytest.mark.parametrize(("at_once", "most"), [(1 << 20, 1 << 21), (137, 1 << 21), (137, 5000)])
def test_near_copies_are_counted_as_by_sets(at_once: int, most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(repeats, "_TOKENS_AT_ONCE", at_once)
    monkeypatch.setattr(repeats, "_MOST_IN_COPIES", most)
    draw, documents = random.Random(2), list[list[int]]()
    for number in range(120):
        ids = [draw.randrange(50) for _ in range(draw.choice([3, 30, 40, 50, 90, 150]))]
        if number > 4 and draw.random() < 0.7:
            ids = list(documents[draw.choice([0, 1, 2, draw.randrange(number)])])
            for _ in range(draw.choice([0, 1, 1, 2, 3])):
                ids[draw.randrange(len(ids))] = draw.randrange(50)
        documents.append(ids)
    text, ends = [i for ids in documents for i in ids], np.cumsum([len(ids) for ids in documents])
    cuts = [0, int(ends[30]), int(ends[70]) + 10, len(text)]  # the second within a document
    shards: Any = [Tokens(text[a:b], [int(e) - a for e in ends if a < e <= b])
                   for a, b in itertools.pairwise(cuts)]  # fmt: skip
    whole = [ids for ids, end in zip(documents, ends, strict=True) if end < most]
    expected = near_by_hand(whole, cuts, 6)
    assert expected > 5
    assert repeats.near_repeats(shards, 6) == (expected, len(whole))
    assert repeats.near_repeats(shards[:1], 10**6) == (0, sum(end < min(most, cuts[1] + 1) for end in ends))
    assert repeats.near_repeats([], 6) == (0, 0)
    twice: Any = Tokens(documents[2] * 2, [len(documents[2]), 2 * len(documents[2])])
    assert repeats.near_repeats([twice], 6) == (1, 2)


# Fill-in-the-middle and windows


@pytest.mark.parametrize("begin", [99, None])
def test_draws_are_a_function_of_seed_epoch_row_and_document(begin: int | None) -> None:
    fim = FillInTheMiddle(0.5, 0.5, 90, 91, 92, 0, seed=7, begin=begin)
    documents = [[*([99] if begin else []), *range(1, n), 0] for n in (9, 2, 14, 1, 30, 5)]
    ends, forms = np.cumsum([len(d) for d in documents]), set()
    for epoch, row in ((0, 0), (0, 1), (3, 0), (2, 5)):
        expected: list[int] = []
        for number, document in enumerate(documents):
            share, one, two, order = (mix64(7, 0xF1, epoch, row, number, draw) / 2**64 for draw in range(4))
            first, text = document[: 1 if begin else 0], document[1 if begin else 0 : -1]
            a, b = sorted(int(u * (len(text) + 1)) for u in (one, two))
            forms.add((share < 0.5, order < 0.5))
            if share < 0.5 and order < 0.5:
                document = [*first, 90, 91, *text[b:], 92, *text[:a], *text[a:b], 0]
            elif share < 0.5:
                document = [*first, 90, *text[:a], 91, *text[b:], 92, *text[a:b], 0]
            expected += document
        found, _ = fim.rearrange(np.concatenate(documents), ends, epoch, row)
        same = ends[-1] - 30  # the last documents may be cut
        assert found[:same].tolist() == expected[:same]
    assert len(forms) == 4


def test_a_document_that_is_only_its_end_keeps_it_once() -> None:
    """GPT-2 begins and ends documents with the same token."""
    fim = FillInTheMiddle(1, 0, 90, 91, 92, 0, 7, begin=0)
    assert fim._parts_in_order(np.array([0]), [0.0, 0.5, 0.5, 0.0]).tolist() == [90, 91, 92, 0]
    assert fim._parts_in_order(np.array([0, 5, 0]), [0.0, 0.9, 0.1, 0.0]).tolist() == [0, 90, 91, 92, 5, 0]


def test_where_the_windows_of_an_epoch_begin() -> None:
    shards: Any = [Tokens(list(range(500)), []), Tokens(list(range(400)), [])]
    rows = Windows(shards, 16, seed=3, isolate_documents=False)
    for epoch in range(4):
        for shard in range(2):
            assert rows._offset(shard, epoch) == mix64(3, 0x0FF5E7, epoch, shard) % 16


def test_rows_are_cut_into_shorter_ones() -> None:
    batch = make_batch(np.arange(18).reshape(2, 9), [np.array([3, 4]), np.array([2])])
    cut = cut_rows(batch, 4)
    assert cut["input_ids"].tolist() == [[0, 1, 2, 3], [4, 5, 6, 7], [9, 10, 11, 12], [13, 14, 15, 16]]
    assert cut["labels"].tolist() == [[1, 2, IGNORE, IGNORE], [5, 6, 7, 8], [10, IGNORE, 12, 13], [14, 15, 16, 17]]
    assert cut["cu_seqlens"].tolist() == [0, 3, 4, 8, 10, 12, 16]
    assert cut["position_ids"].tolist() == [[0, 1, 2, 0], [0, 1, 2, 3], [0, 1, 0, 1], [0, 1, 2, 3]]
    assert cut_rows({"input_ids": torch.zeros(1, 4), "labels": torch.zeros(1, 4)}, 2).keys() == {"input_ids", "labels"}


# Segments


def test_a_document_is_cut_at_the_first_place_after_a_segment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encode, "SEGMENT", 100)
    made = encode.Encoder.__new__(encode.Encoder)
    made._is_safe = lambda text, cut: True  # type: ignore[method-assign]
    for count, cuts in ((39, [195]), (40, [104, 96]), (80, [104, 100, 196])):
        for size in (1, 7, 1000):
            text = "abcd " * count
            pieces: Any = [SimpleNamespace(text=text[i : i + size], ends=i + size >= len(text))
                           for i in range(0, len(text), size)]  # fmt: skip
            found = list(made.segments(pieces))
            assert [len(s.text) for s in found] == cuts, (count, size)
            assert [s.continues for s in found] == [False] + [True] * (len(cuts) - 1)
            assert [s.ends for s in found] == [False] * (len(cuts) - 1) + [True]
    assert [encode._before(text) for text in ("a b", "7.", " a", "", "\na", "é")] == ["\n", "\n", "a", "a", "a", "\n"]


def test_segments_are_tokenized_in_parts() -> None:
    some = [Segment("x" * n, False, False) for n in (3, 2, 5, 1, 1)]
    assert [[len(s.text) for s in part] for part in encode._parts(some, 5)] == [[3, 2], [5], [1, 1]]
    assert list(encode._parts([], 5)) == []


# Mixtures


def test_sources_of_a_mixture(data_config: Any) -> None:
    entries = [{"path": "a/x.txt"}, {"path": "b/x.txt", "weight": 2}, {"path": "x.txt", "val_fraction": 0.5},
               {"name": "hub/y", "max_epochs": 2, "weight": {0: 1, 8: 0}}, {"source": "python_stdlib"}]  # fmt: skip
    found = mixture.text_sources(data_config("mixture", mixture=entries, mixture_temperature=2.0))
    assert [s.label for s in found] == ["x.txt", "x.txt#2", "x.txt#3", "y", "python_stdlib"]
    assert [s.cfg.source for s in found] == ["files", "files", "files", "hub", "python_stdlib"]
    assert [s.weights for s in found] == [{0: 1.0}, {0: 2.0}, {0: 1.0}, {0: 1.0, 8: 0.0}, {0: 1.0}]
    assert [s.max_epochs for s in found] == [None, None, None, 2, None]
    assert {(s.cfg.mixture, s.cfg.mixture_temperature) for s in found} == {(None, None)}
    assert (found[2].cfg.val_fraction, found[2].cfg.min_val_rows) == (0.5, 0)
    assert found[0].cfg.min_val_rows == data_config("mixture").min_val_rows


@pytest.mark.parametrize(("key", "value", "words"), [
    ("weight", True, "a weight is a number from 0 up"), ("weight", float("inf"), "a weight is a number from 0 up"),
    ("weight", "1", "a weight is a number from 0 up"), ("weight", {0: 1, True: 2}, "True is not a step"),
    ("weight", {0: 1, -1: 2}, "-1 is not a step"), ("weight", {0: 1, 2.0: 2}, "2.0 is not a step"),
    ("weight", {5: 1, 3: 1}, r"say what it is at step 0, \{0: 0, 3: ...\}"), ("weight", {}, r"0, \{0: 0, 1: ...\}"),
    ("max_epochs", True, "a number above 0"), ("max_epochs", float("inf"), "a number above 0"),
    ("max_epochs", "2", "a number above 0"), ("max_epochs", 0, "a number above 0"),
])  # fmt: skip
def test_a_weight_or_limit_that_is_none(key: str, value: Any, words: str) -> None:
    read = mixture._weights if key == "weight" else mixture._max_epochs
    with pytest.raises(UserError, match=words):
        read({key: value}, "data.mixture[0]")


@pytest.mark.parametrize("count", [2, 6, 7])
def test_the_plan_shows_the_shares_of_a_source_and_their_changes(count: int) -> None:
    stretches = [SimpleNamespace(start=1000 * i, shares=(1.0, 1 / (i + 2))) for i in range(count)]
    both: Any = [(SimpleNamespace(label=name), SimpleNamespace(folder=f"f/{name}")) for name in "ab"]
    made: Any = SimpleNamespace(step_sizes=SimpleNamespace(step_of=lambda row: row * 2), stretches=stretches,
                                sources=[SimpleNamespace(rows=9), SimpleNamespace(rows=1234)])  # fmt: skip
    steady, changing = mixture.mixture_lines(both, made)
    assert steady == "  a: 1 of the rows; it has 9 (f/a)"
    words = ["0.5 of the rows", "0.3333 from step 2,000 on", "0.25 from step 4,000 on", "0.2 from step 6,000 on",
             "0.1667 from step 8,000 on", "0.1429 from step 10,000 on", "..."]  # fmt: skip
    assert changing == f"  b: {', '.join(words[:count])}; it has 1,234 (f/b)"


# Progress


class Shown(prepare.PrepareProgress):
    """Progress that keeps what it is told."""

    told: list[tuple[Any, ...]]

    def say(self, line: str) -> None:
        self.told.append(("say", line))

    def start(self, name: str, total_bytes: int | None, doing: str = "tokenize") -> None:
        self.told.append((doing, name, total_bytes))
        super().start(name, total_bytes, doing)

    def advance(self, text_bytes: int, tokens: int) -> None:
        self.told.append(("advance", text_bytes, tokens))
        super().advance(text_bytes, tokens)


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    monkeypatch.setattr(Shown, "told", [], raising=False)
    monkeypatch.setattr(prepare, "PrepareProgress", Shown)
    return Shown.told


def test_progress_counts_all_bytes_and_tokens(
    told: list[tuple[Any, ...]], tmp_path: Path, data_config: Any, tokenizer_config: Any
) -> None:
    texts = ["Küche", "b c d", "Küche", "e"]
    (tmp_path / "t.jsonl").write_text("".join(json.dumps({"text": t}) + "\n" for t in texts))
    own = {"path": str(tmp_path / "t.jsonl"), "val_fraction": 0, "dedup": "exact"}
    made = prepare.prepare(data_config("jsonl", **own), tokenizer_config("bytes"))
    begins = [i for i, (what, *_) in enumerate(told) if what in ("look for repeats in", "tokenize")]
    assert [told[i] for i in begins if told[i][1] == "train"] == [
        ("look for repeats in", "train", None),
        ("tokenize", "train", None),
    ]
    last = begins[[told[i][:2] for i in begins].index(("tokenize", "train"))]
    seen = {"look": told[:last], "tokenize": told[last:]}
    sums = {name: np.sum([t[1:] for t in some if t[0] == "advance"], axis=0).tolist() for name, some in seen.items()}
    split = made.meta["splits"]["train"]
    assert sums == {"look": [6 + 5 + 6 + 1, 0], "tokenize": [6 + 5 + 1, split["tokens"]]}
    assert any(what == "say" and words[0].startswith("tokenized train: ") for what, *words in told)


def test_a_vocabulary_is_said_to_be_learned(
    told: list[tuple[Any, ...]], tmp_path: Path, data_config: Any, tokenizer_config: Any
) -> None:
    (tmp_path / "t.txt").write_text("so and so on\n" * 9)
    cfg = data_config("text", path=str(tmp_path / "t.txt"), val_fraction=0)
    for most, total in ((50, 50), (None, 117)):
        told.clear()
        prepare.prepare(cfg, tokenizer_config("bpe", vocab_size=260, train_characters=most))
        assert ("say", "training a BPE of 260 tokens on t.txt") in told
        assert ("read", "text", total) in told
        assert ("tokenize", "train", 117) in told


def test_what_a_split_lacks_is_said(
    told: list[tuple[Any, ...]],
    tmp_path: Path,
    data_config: Any,
    tokenizer_config: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    small = prepare.tokenizers.load_or_train(tokenizer_config("char"), lambda _: iter(["so and\n"]))
    monkeypatch.setattr(prepare.tokenizers, "load_or_train", lambda *_: small)
    (tmp_path / "t.txt").write_text("so and so on\n" * 9)
    (tmp_path / "v.txt").write_text("so én\n")
    paths = {"path": str(tmp_path / "t.txt"), "val_path": str(tmp_path / "v.txt"), "val_fraction": 0.25}
    made = prepare.prepare(data_config("text", **paths), tokenizer_config("char"))
    assert made.meta["splits"]["val"]["bytes"] == 7
    assert made.meta["notes"] == [
        f"1 tokens stand for characters that the tokenizer lacks, all read as {made.tokenizer.unk_token}"
    ]
    made = prepare.prepare(data_config("text", **paths, min_length=20), tokenizer_config("char"))
    assert made.meta["splits"].keys() == {"train"}
    assert ("say", "t.txt: no text is left for validation (data.val_fraction=0.25)") in told


def test_a_mixture_has_one_tokenizer_made_once(
    told: list[tuple[Any, ...]],
    tmp_path: Path,
    data_config: Any,
    tokenizer_config: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(mixture, "PrepareProgress", Shown)
    for name, text in (("a.txt", "ab ab\n"), ("b.txt", "ba bé\n")):
        (tmp_path / name).write_text(text * 99)
    cfg = data_config("mixture", mixture=[{"path": str(tmp_path / f"{name}.txt")} for name in "ab"], val_fraction=0)
    for times in (1, 0):
        told.clear()
        parts = mixture.prepare_mixture(cfg, tokenizer_config("char"))
        assert told.count(("say", "making the tokenizer of 2 sources: a.txt, b.txt")) == times
    assert [part.meta["notes"][1:] for _, part in parts] == [[], []], "each character of both is known"
    assert ["".join(p.text for p in mixture.documents_of(cfg, "train"))] == ["ab ab" * 99 + "ba bé" * 99]
    with pytest.raises(UserError, match=r"bins of data.mixture is token bins: evaluate text"):
        list(mixture.documents_of(data_config("mixture", mixture=[{"path": "x/bins", "source": "bins"}]), "train"))
