"""The parts of rows, each by hand: counts, cuts, layouts, windows, steps, shares of ranks, and rings."""

import resource
import signal
import zlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from lmtrain.config.batch import Stages
from lmtrain.data import loaders
from lmtrain.data.chat.turns import BadRow, Remark
from lmtrain.data.examples import row_counts
from lmtrain.data.examples.documents import Examples
from lmtrain.data.examples.pair_rows import PairRows, common_prompt, fit_pair, lay_answers, margins_of, pad_answers
from lmtrain.data.examples.prompt_rows import PromptRowEncoder
from lmtrain.data.examples.row_counts import Counts
from lmtrain.data.examples.unpaired_rows import UnpairedRows, _parted, _with_completion
from lmtrain.data.store.shards import Shard
from lmtrain.data.stream import ring
from lmtrain.data.text.windows import IGNORE, Windows, documents_at, empty_window, make_batch
from lmtrain.errors import UserError

# Examples of bins


def test_examples_are_cut_at_the_ends_of_all_shards_also_those_of_one_token(tmp_path: Path) -> None:
    """Two files with the documents [5], [7, 8, 9] and [1, 2], [3], [4], written by hand."""
    shards = []
    for name, tokens, ends in [("a", [5, 7, 8, 9], [1, 4]), ("b", [1, 2, 3, 4], [2, 3, 4])]:
        (tmp_path / name).write_bytes(np.array(tokens, "<u2").tobytes())
        (tmp_path / f"{name}.docs").write_bytes(np.array(ends, "<u8").tobytes())
        (tmp_path / f"{name}.mask").write_bytes(bytes(len(tokens)))
        sides = {kind: tmp_path / f"{name}.{kind}" for kind in ("docs", "mask")}
        shards.append(Shard(tmp_path / name, "uint16", len(tokens), sides))
    examples = Examples(shards)
    assert [examples.read(i)[0].tolist() for i in range(len(examples))] == [[5], [7, 8, 9], [1, 2], [3], [4]]


# Counts of rows


def test_rows_are_counted_by_what_became_of_them() -> None:
    counts = Counts(
        rows=1000, examples=6, tokens=2000, trained=500, shortened=1, dropped=2, untrained=3, assistant_first=4
    )
    counts.bad = {"a": 5}
    counts.bad_at, counts.bad_first = {"a": "x.jsonl, line 3"}, {"a": "why: because"}
    assert (counts.seen(1), counts.seen(2)) == (9, 6)
    assert row_counts.summary("train", counts) == [
        "train: 1,000 rows -> 6 examples, 2,000 tokens, 25% learned, 1 shortened, 2 too long and dropped, 3 without a "
        "learned token, left out, 4 began with the assistant, whose first turns were dropped, 5 bad rows skipped",
        "train: 5 rows skipped, first x.jsonl, line 3: why: because",
    ]
    assert row_counts.summary("val", Counts()) == ["val: 0 rows -> 0 examples, 0 tokens, 0% learned"]
    assert row_counts.summary("val", Counts(rows=1, examples=1, tokens=7)) == ["val: 1 row -> 1 example, 7 tokens"]


def test_reasons_of_one_kind_are_counted_together(monkeypatch: pytest.MonkeyPatch) -> None:
    counts = Counts()
    for number, reason in enumerate(("role is 'a'", "role is 'b'", "3 turns: x", "14.5 turns: y", "no text")):
        counts.add_bad(reason, f"line {number}")
    assert counts.bad == {"role is '...'": 2, "N turns": 2, "no text": 1}
    assert (counts.bad_at["N turns"], counts.bad_first["N turns"]) == ("line 2", "3 turns: x")
    monkeypatch.setattr(row_counts, "_KINDS", 3)
    counts.add_bad("another", "line 9")
    counts.add_bad("no text", "line 10")
    assert (counts.bad["other"], counts.bad["no text"]) == (1, 2)
    monkeypatch.setattr(row_counts, "_SHOWN", 2)
    counts.bad["no text"] = 9
    lines = row_counts.bad_lines(counts)
    assert [words for words, _ in lines] == ["9 rows skipped", "2 rows skipped", "3 rows skipped"]
    assert [reason for _, reason in lines] == [
        "first line 4: no text",
        "first line 0: role is 'a'",
        "for 2 other reasons",
    ]


def test_remarks_are_counted_once_a_row() -> None:
    counts = Counts()
    counts.note([Remark("odd"), Remark("odd"), Remark("gone", lost=True)], 1, "line 1")
    counts.note([Remark("odd")], 3, "line 2")
    assert (counts.remarks, counts.lost, counts.remarks_at["odd"]) == ({"odd": 2, "gone": 1}, {"gone": 1}, "line 1")
    assert (counts.split, counts.split_into) == (1, 3)
    counts.note_unread(["a", "b"], "not read")
    counts.note_unread(["b"], "not read")
    lines = row_counts.remark_lines(counts)
    assert lines[0].startswith("1 conversation became 3 examples")
    assert lines[1:] == [
        "columns not read: a (1 row), b (2 rows)",
        "2 rows: odd; first line 1",
        "1 row: gone; first line 1",
    ]
    assert row_counts.remark_lines(Counts()) == []


@pytest.mark.parametrize(("share", "untrained", "group", "is_too_many"), [
    (0.5, 4, 1, False), (0.5, 5, 1, True), (0.5, 2, 2, False), (0.5, 3, 2, True), (None, 99, 1, False),
    (0.0, 1, 1, True),
    (0.0, 0, 1, False),
])  # fmt: skip
def test_a_share_of_rows_may_be_left_without_a_token_to_train_on(
    share: float | None, untrained: int, group: int, is_too_many: bool, data_config: Any
) -> None:
    counts = Counts(examples=4, untrained=untrained, untrained_at="line 1", untrained_text="'x'")
    cfg = data_config("chat", max_untrained=share)
    assert row_counts.too_many_untrained(counts, cfg, group) == is_too_many
    if is_too_many:
        with pytest.raises(UserError, match=f"{untrained} of {counts.seen(group)} train rows have no learned token"):
            row_counts.check_untrained(counts, cfg, "train", group)
    else:
        row_counts.check_untrained(counts, cfg, "train", group)
    lost = Counts(rows=10, bad={"x": 2}, lost={"a": 1, "b": 4}, remarks_at={"b": "line 3"})  # 8 were taken
    assert row_counts.too_many_lost(lost, data_config("chat", max_untrained=0.5)) is None
    assert row_counts.too_many_lost(lost, data_config("chat", max_untrained=None)) is None
    with pytest.raises(UserError, match="4 of 10 val rows: b, the first is line 3"):
        row_counts.check_lost(lost, data_config("chat", max_untrained=0.49), "val")


def test_a_long_text_is_shown_by_its_ends() -> None:
    assert row_counts.short("a" * 320) == repr("a" * 320)
    assert row_counts.short("b" * 161 + "c" * 160) == f"{'b' * 160!r} ... {'c' * 160!r}"


# Pairs

CHOSEN, REJECTED = [1, 2, 3, 4, 5, 6], [1, 2, 3, 7, 8]
MASKS = [False, False, False, True, True, True], [False, False, False, True, True]


@pytest.mark.parametrize(("settings", "ids"), [
    ({"max_length": 6}, [CHOSEN, REJECTED]),
    ({"max_length": 5, "on_too_long": "truncate_right"}, [CHOSEN[:5], REJECTED]),
    ({"max_length": 5, "on_too_long": "truncate_left"}, [CHOSEN[1:], REJECTED[1:]]),
    ({"max_length": 5, "on_too_long": "drop"}, []),
    ({"max_length": None}, [CHOSEN, REJECTED]),
    ({"max_length": 6, "max_prompt_length": 2}, [CHOSEN[1:], REJECTED[1:]]),
    ({"max_length": 4, "max_prompt_length": 2, "on_too_long": "truncate_right"}, [CHOSEN[1:5], REJECTED[1:]]),
    ({"max_length": 4, "on_too_long": "truncate_left"}, [CHOSEN[2:], REJECTED[2:]]),
])  # fmt: skip
def test_pairs_are_cut_alike(settings: dict[str, Any], ids: list[list[int]], data_config: Any) -> None:
    given = [(list(i), list(m)) for i, m in zip((CHOSEN, REJECTED), MASKS, strict=True)]
    cut, gone = fit_pair(*given, data_config("preference", **{"max_prompt_length": None, **settings}), "line 1")
    assert [list(found) for found, _ in cut] == ids
    assert gone == (11 - sum(map(len, ids)) if ids else 0)
    assert all(len(mask) == len(found) and sum(mask) >= 2 for found, mask in cut)


def test_a_pair_that_is_too_long_says_so(data_config: Any) -> None:
    given = [(CHOSEN, list(MASKS[0])), (REJECTED, list(MASKS[1]))]
    with pytest.raises(BadRow, match=r"an answer with its prompt has 6 tokens and data.max_length is 5"):
        fit_pair(*given, data_config("preference", max_length=5, on_too_long="raise", max_prompt_length=None), "line 1")
    for policy in ("truncate_left", "truncate_right"):
        with pytest.raises(BadRow, match=r"leaves no room for the answers within data.max_length=3"):
            fit_pair(
                *given, data_config("preference", max_length=3, on_too_long=policy, max_prompt_length=None), "line 1"
            )
    unscored = [(CHOSEN, [False] * 6), given[1]]
    assert fit_pair(*unscored, data_config("preference", max_length=2, on_too_long="raise"), "x") == (unscored, 0)
    kept, gone = fit_pair(*given, data_config("preference", max_length=5, on_too_long="truncate_left",
                                              max_prompt_length=None), "line 1", kept=1)  # fmt: skip
    assert ([list(ids) for ids, _ in kept], gone) == ([[1, 3, 4, 5, 6], [1, 3, 7, 8]], 2), "the first one stays"


def answer(ids: list[int], first: int) -> tuple[np.ndarray, np.ndarray]:
    return np.array(ids), np.arange(len(ids)) >= first


def test_answers_share_what_is_before_both_are_scored() -> None:
    assert common_prompt(answer([1, 2, 3, 4], 2), answer([1, 2, 3, 5], 3)) == 2
    assert common_prompt(answer([1, 9, 3, 4], 2), answer([1, 2, 3, 5], 3)) == 1
    assert common_prompt(answer([8, 2, 3, 4], 2), answer([1, 2, 3, 5], 2)) == 0


def test_answers_lie_one_after_the_other_or_continue_a_prompt() -> None:
    one, two, three = answer([1, 2, 3, 4], 2), answer([1, 2, 5], 2), answer([6, 7], 1)
    found = lay_answers([one, two, three])
    assert found["input_ids"].tolist() == [[1, 2, 3, 4, 1, 2, 5, 6, 7]]
    assert found["position_ids"].tolist() == [[0, 1, 2, 3, 0, 1, 2, 0, 1]]
    assert found["cu_seqlens"].tolist() == [0, 4, 7, 9]
    assert [found[name].tolist() for name in ("scored", "before", "answer", "lengths")] == [
        [2, 3, 6, 8], [1, 2, 5, 7], [0, 0, 1, 2], [2, 1, 1]
    ]  # fmt: skip
    shared = lay_answers([one, two, three], [0, 2, 0])
    assert shared["input_ids"].tolist() == [[1, 2, 3, 4, 5, 6, 7]]
    assert shared["position_ids"].tolist() == [[0, 1, 2, 3, 2, 0, 1]]
    assert [shared[name].tolist() for name in ("scored", "before", "cu_seqlens", "cu_kv", "prefix_lengths")] == [
        [2, 3, 4, 6], [1, 2, 1, 5], [0, 4, 5, 7], [0, 4, 7, 9], [0, 2, 0]
    ]  # fmt: skip
    assert shared["kv_index"].tolist() == [0, 1, 2, 3, 0, 1, 4, 5, 6]
    whole = lay_answers([answer([5, 6], 0)])
    assert whole["scored"].tolist() == [1], "nothing predicts the first token"
    padded = {**found, "ends": torch.tensor([3, 6, 8])}
    pad_answers(padded)
    assert padded["input_ids"].tolist() == [[1, 2, 3, 4], [1, 2, 5, 0], [6, 7, 0, 0]]
    assert [padded[name].tolist() for name in ("row_lengths", "real", "scored", "before", "ends")] == [
        [4, 3, 2], [0, 1, 2, 3, 4, 5, 6, 8, 9], [2, 3, 6, 9], [1, 2, 5, 8], [3, 6, 9]
    ]  # fmt: skip
    assert "cu_seqlens" not in padded


class Held:
    """Examples in memory."""

    def __init__(self, examples: list[tuple[np.ndarray, np.ndarray]], **more: Any) -> None:
        self.all, self.shards, self.texts = examples, [SimpleNamespace(texts="texts" in more)], more.get("texts")
        self.labels = np.array(more.get("labels", [0] * len(examples)))
        self.tokens = sum(len(ids) for ids, _ in examples)

    def __len__(self) -> int:
        return len(self.all)

    def read(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        return self.all[index]


def test_a_row_of_pairs_has_its_reference_and_margin_as_bits() -> None:
    some = [answer([1, 2, 3], 2), answer([1, 2, 4], 2), answer([5, 6], 1), answer([7, 8, 9], 1)]
    held: Any = Held(some, texts=["0.5", "", "", ""])
    assert margins_of(held).tolist() == [0.5, 0.0]  # type: ignore[union-attr]
    assert margins_of(Held(some)) is None  # type: ignore[arg-type]
    rows = PairRows(held, share_prompts=True)
    assert (len(rows), rows.epoch_tokens, rows.title(2), rows.title(3)) == (
        2,
        9,
        "pair 2 of 2, chosen",
        "pair 2 of 2, rejected",
    )
    rows.reference = np.array([[-1.0, -2.0], [-3.0, -4.0]])
    batch = rows.read(np.array([[0, 1], [0, 0]]))
    assert batch["reference"].view(torch.float64).tolist() == [[-3.0, -4.0], [-1.0, -2.0]]
    assert batch["margin"].view(torch.float64).tolist() == [0.0, 0.5]
    assert batch["prefix_lengths"].tolist() == [0, 0, 0, 2]
    assert (batch["pairs"].item(), batch["seen"].item()) == (2, 9)
    assert batch["ends"].tolist() == [1, 4, 7, 8]
    rows.pad()
    padded = rows.read(np.array([[0, 0]]))
    assert padded["input_ids"].tolist() == [[1, 2, 3], [1, 2, 4]]
    assert (rows.epoch_tokens, padded["ends"].tolist()) == (11, [2, 5])
    nothing = rows.empty()
    assert (nothing["pairs"].item(), nothing["seen"].item()) == (0, 0)


def test_a_prompt_is_read_with_the_completion_of_another_row() -> None:
    ids, mask = _with_completion(answer([1, 2, 3, 4], 2), answer([5, 6, 7], 1))
    assert (ids.tolist(), mask.tolist()) == ([1, 2, 6, 7], [False, False, True, True])
    held: Any = Held([answer([1, 2], 1), answer([3, 4], 1), answer([5, 6, 7], 1)], labels=[1, 0, 1])
    rows = UnpairedRows(held)
    batch = rows.read(np.array([[0, 2, 0], [0, 1, 2]]))
    assert batch["input_ids"].tolist() == [[5, 6, 7, 3, 4]]
    assert batch["kl_input_ids"].tolist() == [[5, 2, 3, 6, 7]]
    assert (batch["label"].tolist(), batch["answers"].item(), batch["seen"].item()) == ([True, False], 2, 5)
    assert rows.read(np.array([[0, 0], [0, 1]]))["kl_input_ids"].tolist() == [[1, 4, 3, 2]], "that of the one before"
    assert (rows.title(0), rows.title(1)) == ("answer 1 of 3, desirable", "answer 2 of 3, undesirable")
    turns = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
    assert _parted(turns, "line 1") == {"prompt": turns[:1], "response": turns[1:]}
    with pytest.raises(BadRow, match="ends with a turn from user"):
        _parted(turns[:1], "line 1")


# Windows


def shard(tokens: int, ends: tuple[int, ...] = ()) -> Any:
    def read(start: int, count: int) -> np.ndarray:
        assert 0 <= start <= start + count <= tokens
        return np.arange(start, start + count)

    inside = lambda start, stop: np.array([e for e in ends if start <= e < stop], dtype=np.int64)  # noqa: E731
    return SimpleNamespace(tokens=tokens, read=read, document_ends=inside, path="x.bin", mask=None)


@pytest.mark.parametrize("seed", [None, 3])
def test_windows_take_what_has_room_for_a_label_and_an_offset(seed: int | None) -> None:
    for tokens in range(9, 70):
        rows = Windows([shard(tokens)], 8, seed=seed, isolate_documents=False)
        moves = seed is not None and tokens >= 32
        assert len(rows) == (tokens - 1 - 7 * moves) // 8
        offsets = set()
        for epoch in range(20):
            batch = rows.read(np.array([[epoch, row] for row in range(len(rows))]))
            first = batch["input_ids"].flatten()
            assert torch.equal(first, torch.arange(len(first)) + first[0])
            assert torch.equal(batch["labels"].flatten(), first + 1)
            offsets.add(int(first[0]))
        assert (len(offsets) > 3) == moves
        assert offsets <= set(range(8))
    with pytest.raises(
        UserError, match=r"holds 8 tokens, fewer than one row of data.seq_len=8 .*set data.seq_len=7 or"
    ):
        Windows([shard(8), shard(3)], 8, seed=seed, isolate_documents=False)


def test_windows_of_several_shards_are_numbered_through() -> None:
    rows = Windows([shard(9), shard(3), shard(17)], 4, seed=None, isolate_documents=False)
    assert rows.first_row == [0, 2, 2, 6]
    assert [rows._locate(0, row)[1] for row in range(6)] == [0, 4, 0, 4, 8, 12]
    assert [rows._locate(0, row)[0].tokens for row in range(6)] == [9, 9, 17, 17, 17, 17]


def test_labels_do_not_cross_the_end_of_a_document() -> None:
    block = np.arange(10).reshape(2, 5)
    batch = make_batch(block, [np.array([2, 4, 5]), np.array([], dtype=np.int64)])
    assert batch["labels"].tolist() == [[1, IGNORE, 3, IGNORE], [6, 7, 8, 9]]
    assert batch["cu_seqlens"].tolist() == [0, 2, 4, 8]
    assert batch["position_ids"].tolist() == [[0, 1, 0, 1], [0, 1, 2, 3]]
    assert documents_at([0, 3], 2, 3)["position_ids"].tolist() == [[0, 1, 2], [0, 1, 2]]
    nothing = empty_window(3, True)
    assert (nothing["labels"].tolist(), nothing["cu_seqlens"].tolist()) == ([[IGNORE] * 3], [0, 3])
    assert empty_window(3, False).keys() == {"input_ids", "labels"}


# Prompts


def test_no_prompts_are_of_no_tokens() -> None:
    for lengths, words in (([], "0 prompts of up to 0 tokens"), ([3, 1200], "2 prompts of up to 1,200 tokens")):
        held: Any = Held([answer([0] * n, 0) for n in lengths])
        held.lengths = np.array(lengths, dtype=np.int64)
        assert PromptRowEncoder.make_rows(held, None, None)[1] == words  # type: ignore[arg-type]


# Steps and validation


class Numbered:
    """Rows that give what they are asked for."""

    def __init__(self, count: int, coupled: bool = False, lengths: list[int] | None = None) -> None:
        self.count, self.coupled = count, coupled
        if lengths is not None:
            self.lengths = np.array(lengths)

    def __len__(self) -> int:
        return self.count

    def read(self, rows: np.ndarray) -> Any:
        return {"asked": rows.tolist(), "input_ids": torch.zeros(1, 6), "labels": torch.zeros(1, 6)}

    def empty(self) -> Any:
        return {"asked": "nothing", "input_ids": torch.zeros(1, 6), "labels": torch.zeros(1, 6)}


def dataset(rows: Any, size: int = 4, rank: int = 0, world: int = 1, micro: int = 2, epochs: int | None = None) -> Any:
    sizes = Stages((0,), (size,))
    return loaders.StepDataset(
        rows, seed=1, sizes=sizes, micro_batch_size=micro, max_epochs=epochs, rank=rank, world_size=world
    )


def test_a_step_is_divided_among_ranks_and_micro_batches() -> None:
    whole = dataset(Numbered(10)).row_ids(1)
    items = [dataset(Numbered(10), rank=rank, world=2)[1] for rank in range(2)]
    assert [item["micro_batches"][0]["asked"] for item in items] == [whole[0::2].tolist(), whole[1::2].tolist()]
    assert {item["rows"] for item in items} == {f"{zlib.crc32(whole.tobytes()):08x}"}
    assert items[0]["step"] == 1
    last = dataset(Numbered(5), rank=1, world=2, epochs=1)[1]
    assert last["micro_batches"][0]["asked"] == "nothing", "one row is left, and rank 0 has it"
    long = dataset(Numbered(10, lengths=[5, 9, 1, 7, 3, 8, 2, 6, 4, 0]))
    order = [long.rows.lengths[row] for _, row in long.by_length(long.row_ids(0))]
    assert order == sorted(order, reverse=True)


def test_coupled_rows_are_read_with_the_one_before_them() -> None:
    data = dataset(Numbered(9, coupled=True), micro=9, epochs=1)
    for step in (0, 1):
        rows = data.row_ids(step)[:, 1].tolist()
        asked = data[step]["micro_batches"][0]["asked"]
        assert [row for _, row, _ in asked] == rows
        assert [other for _, _, other in asked] == [rows[-1], *rows[:-1]]
    ((_, row, other),) = data[2]["micro_batches"][0]["asked"]
    assert (row, other) == (data.row_ids(2)[0, 1], data.row_ids(1)[-1, 1]), "a single row has that of the step before"
    ((_, row, other),) = dataset(Numbered(1, coupled=True), size=1)[0]["micro_batches"][0]["asked"]
    assert (row, other) == (0, 0)


@pytest.mark.parametrize(
    ("count", "micro", "limit", "world"), [(10, 3, None, 1), (10, 3, None, 2), (10, 2, 3, 2), (4, 3, 9, 1)]
)
def test_validation_rows_are_spread_and_shared(count: int, micro: int, limit: int | None, world: int) -> None:
    made = [loaders.ValidationDataset(Numbered(count, coupled=True), micro_batch_size=micro, limit=limit, rank=rank,
                                      world_size=world) for rank in range(world)]  # type: ignore[arg-type]  # fmt: skip
    total = count if limit is None else min(count, limit * micro)
    expected = [i * count // total for i in range(total)]
    found: list[list[int]] = []
    for index in range(len(made[0])):
        shares = [one.share(index) for one in made]
        both = [None] * sum(map(len, shares))
        for rank, share in enumerate(shares):
            both[rank::world] = share.tolist()
        found += both  # type: ignore[arg-type]
    assert [row for _, row, _ in found] == expected
    assert [other for _, _, other in found] == [expected[-1], *expected[:-1]]
    assert {epoch for epoch, _, _ in found} == {0}
    assert made[0].total == total


def test_chosen_rows_are_the_same_in_every_epoch() -> None:
    rows: Any = Numbered(10, lengths=list(range(10)))
    spread = loaders.spread_rows(rows, 4)
    assert spread.chosen.tolist() == [0, 2, 5, 7]
    assert spread.lengths.tolist() == [0, 2, 5, 7]
    assert spread.read(np.array([[7, 1], [0, 3]]))["asked"] == [[0, 2], [0, 7]]
    assert (len(loaders.spread_rows(rows, 99)), len(loaders.spread_rows(Numbered(0), 3))) == (10, 0)  # type: ignore[arg-type]
    assert loaders.first_rows(rows, 3).chosen.tolist() == [0, 1, 2]
    assert len(loaders.first_rows(rows, 30)) == 10
    assert not loaders.first_rows(rows, 3).coupled
    assert loaders.first_rows(Numbered(3, coupled=True), 3).coupled  # type: ignore[arg-type]
    assert loaders.seen_rows(rows, 3, None) == 10
    assert (loaders.seen_rows(rows, 3, 2), loaders.seen_rows(rows, 3, 4)) == (6, 10)
    for steps, used in ((0, 50), (None, 50), (3, 12), (99, 50)):
        config: Any = SimpleNamespace(
            trainer=SimpleNamespace(overfit_batches=steps), data=SimpleNamespace(global_batch_size=4)
        )
        assert loaders.rows_used(config, 50) == used


def test_a_sampler_begins_where_it_is_told_and_keeps_its_length() -> None:
    begin = [0]
    sampler = loaders.StepSampler(5, lambda: begin[0], stop=7)
    assert (list(sampler), len(sampler)) == ([0, 1, 2, 3, 4], 5)
    begin[0] = 4
    assert (list(sampler), len(sampler)) == ([4, 5, 6], 5)
    assert list(loaders.StepSampler(2)) == [0, 1]


def test_workers_need_open_files(monkeypatch: pytest.MonkeyPatch) -> None:
    limits, was_set = [100, 200], list[Any]()
    monkeypatch.setattr(resource, "getrlimit", lambda kind: tuple(limits))
    monkeypatch.setattr(resource, "setrlimit", lambda kind, both: was_set.append(both))
    endless = resource.RLIM_INFINITY
    for workers, soft, hard, change in (
        (0, 1, 1, []), (2, 96, 96, []), (2, 95, 96, [(96, 96)]), (2, 95, endless, [(96, endless)]),
        (99, endless, endless, []),
    ):  # fmt: skip
        limits[:], was_set[:] = [soft, hard], []
        loaders.check_descriptors(workers)
        assert was_set == change
    limits[:] = [95, 95]
    with pytest.raises(
        UserError, match=r"num_workers=2 needs about 96 open files, and this shell allows 95 .*num_workers=1$"
    ):
        loaders.check_descriptors(2)
    for wrong in (-1, 1.5):
        with pytest.raises(UserError, match="a whole number from 0"):
            loaders.check_descriptors(wrong)  # type: ignore[arg-type]


def test_a_worker_leaves_stopping_to_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[Any, Any] = {}
    monkeypatch.setattr(loaders.signal, "signal", lambda number, what: seen.update({number: what}))
    monkeypatch.setattr(loaders, "end_with_parent", lambda parent, number: seen.update({parent: number}))
    loaders.start_worker(77, 0)
    assert seen == {**dict.fromkeys(loaders.SIGNALS, signal.SIG_IGN), 77: signal.SIGKILL}


# Rings


def test_a_ring_has_room_for_two_windows_and_a_window_for_what_is_read_ahead() -> None:
    def made(**changes: Any) -> ring.Ring:
        data = {"ring_bytes": 408, "ring_shard_tokens": 51, "ring_window": 2, "seq_len": 5, "global_batch_size": 10,
                "num_workers": 0, "isolate_documents": True}  # fmt: skip
        return ring.make_ring(SimpleNamespace(data=SimpleNamespace(**(data | changes))), "uint16")  # type: ignore[arg-type]

    found = made()
    assert (found.shard_rows, found.shard_tokens, found.window_rows) == (10, 51, 20)
    assert made(ring_shard_tokens=55).shard_rows == 10
    assert [found.window_of(step) for step in range(5)] == [0, 0, 1, 1, 2]
    assert [found.window_after(step) for step in range(5)] == [0, 0, 1, 1, 2]
    uneven = made(global_batch_size=7)
    assert [(uneven.window_of(s), uneven.window_after(s)) for s in range(4)] == [(0, 0), (0, 0), (0, 1), (1, 1)]
    for changes, words in (
        ({"ring_bytes": 407}, "holds less than two windows.*take 408 bytes.*Set data.ring_bytes=408"),
        (
            {"ring_shard_tokens": 5},
            "no room for a row of data.seq_len=5 tokens and a label: set data.ring_shard_tokens=6",
        ),
        ({"global_batch_size": 11}, "a window of the stream has 20 rows, .* may need 22 at once"),
        ({"num_workers": 1}, "may need 30 at once"),
    ):
        with pytest.raises(UserError, match=words):
            made(**changes)
    assert made(global_batch_size=6, num_workers=1).window_rows == 20
    assert ring.shard_file(Path("x"), 7) == Path("x/000000007.bin")
