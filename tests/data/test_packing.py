"""Packing: every token once, no overfull row, the known guarantees of each method, and the rows built from it."""

import pickle
from pathlib import Path

import numpy as np
import pytest
import torch

from example_files import ExampleWriter
from lmtrain.data.examples.documents import Examples
from lmtrain.data.examples.rows import PackedRows, Packing, PaddedRows, pack
from lmtrain.data.text.windows import IGNORE

CAPACITY = 64
METHODS_THAT_PACK = ["concat", "greedy", "first_fit", "best_fit_decreasing"]


def some_lengths(n: int = 500, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(1, CAPACITY + 1, n)


def pieces_of(packing: Packing, row: int) -> list[tuple[int, int, int]]:
    span = range(packing.first[row], packing.first[row + 1])
    return [(int(packing.example[p]), int(packing.start[p]), int(packing.stop[p])) for p in span]


@pytest.mark.parametrize("method", METHODS_THAT_PACK)
@pytest.mark.parametrize("seed", [None, 3])
def test_every_token_lies_in_one_row_and_no_row_is_overfull(method: str, seed: int | None) -> None:
    lengths = some_lengths()
    packing = pack(lengths, CAPACITY, method, seed)
    seen = [np.zeros(n, dtype=int) for n in lengths]
    for row in range(len(packing)):
        pieces = pieces_of(packing, row)
        assert pieces
        assert sum(stop - start for _, start, stop in pieces) <= CAPACITY
        for example, start, stop in pieces:
            seen[example][start:stop] += 1
    assert all((s == 1).all() for s in seen)
    if method != "concat":
        assert all(
            start == 0 and stop == lengths[e] for r in range(len(packing)) for e, start, stop in pieces_of(packing, r)
        )


@pytest.mark.parametrize("method", METHODS_THAT_PACK)
def test_the_same_lengths_and_seed_give_the_same_rows(method: str) -> None:
    a, b = (pack(some_lengths(), CAPACITY, method, 7) for _ in range(2))
    assert all(np.array_equal(getattr(a, f), getattr(b, f)) for f in ("first", "example", "start", "stop"))


@pytest.mark.parametrize("longest", [3, 20, CAPACITY])
def test_first_fit_and_best_fit_against_their_definition(longest: int) -> None:
    lengths = np.random.default_rng(5).integers(1, longest + 1, 200)

    def by_definition(order: list[int], best: bool) -> list[list[int]]:
        rows: list[list[int]] = []
        for i in order:
            rooms = [CAPACITY - sum(lengths[j] for j in row) for row in rows]
            fits = [r for r, room in enumerate(rooms) if room >= lengths[i]]
            if not fits:
                rows.append([i])
            else:
                rows[min(fits, key=lambda r: rooms[r]) if best else fits[0]].append(i)
        return rows

    packed = pack(lengths, CAPACITY, "first_fit", None)
    expected = by_definition(list(range(200)), best=False)
    assert [[e for e, _, _ in pieces_of(packed, r)] for r in range(len(packed))] == expected
    packed = pack(lengths, CAPACITY, "best_fit_decreasing", None)
    expected = by_definition(sorted(range(200), key=lambda i: -lengths[i]), best=True)
    # A method may choose differently among rows with equal room, so only the fills of the rows are compared.
    fills = sorted(sum(lengths[e] for e, _, _ in pieces_of(packed, r)) for r in range(len(packed)))
    assert fills == sorted(sum(lengths[i] for i in row) for row in expected)


def test_greedy_fills_each_row_in_order_until_the_next_does_not_fit() -> None:
    lengths = np.array([30, 34, 64, 1, 63, 40, 25, 2, 60, 4])
    packed = pack(lengths, CAPACITY, "greedy", None)
    rows = [[e for e, _, _ in pieces_of(packed, r)] for r in range(len(packed))]
    assert rows == [[0, 1], [2], [3, 4], [5], [6, 7], [8, 9]], "a row may be full to the last token"
    assert packed.utilisation == lengths.sum() / (6 * CAPACITY)


def test_concat_leaves_room_in_the_last_row_only() -> None:
    lengths = some_lengths()
    packing = pack(lengths, CAPACITY, "concat", None)
    fills = [sum(stop - start for _, start, stop in pieces_of(packing, r)) for r in range(len(packing))]
    assert set(fills[:-1]) == {CAPACITY}
    assert len(packing) == -(-lengths.sum() // CAPACITY)


def test_decreasing_best_fit_is_within_its_bound() -> None:
    """Best fit decreasing needs at most 11/9 of the least number of rows, plus 1 (Johnson 1973)."""
    lengths = some_lengths(2000)
    rows = len(pack(lengths, CAPACITY, "best_fit_decreasing", 1))
    assert rows <= 11 / 9 * -(-lengths.sum() // CAPACITY) + 1


@pytest.fixture
def examples(tmp_path: Path) -> Examples:
    """Returns examples whose ids count up from 1000 * the example's number; the second half of each is learned."""
    writer = ExampleWriter(tmp_path)
    for number, length in enumerate([5, 3, 9, 1, 7, 6]):
        ids = [1000 * number + i for i in range(length)]
        writer.append(ids, [i >= length // 2 for i in range(length)])
    return writer.close()


def test_examples_lie_in_as_many_files_as_they_fill(tmp_path: Path) -> None:
    """Ids, masks and labels of every example are read back whole from whichever file holds the example."""
    random = np.random.default_rng(0)
    writer = ExampleWriter(tmp_path, shard_tokens=40)
    wanted = []
    for number in range(50):
        ids = random.integers(0, 10**6, int(random.integers(1, 20))).tolist()
        mask = (random.random(len(ids)) < 0.5).tolist()
        writer.append(ids, mask, label=number)
        wanted.append((ids, mask))
    found = writer.close()
    assert len(found.shards) > 10
    assert [tuple(part.tolist() for part in found.read(i)) for i in range(len(found))] == wanted
    assert found.labels.tolist() == list(range(50))
    assert found.lengths.tolist() == [len(ids) for ids, _ in wanted]
    assert found.learned().tolist() == [sum(mask) for _, mask in wanted]


def all_rows(rows: PaddedRows | PackedRows) -> dict[str, torch.Tensor]:
    return rows.read(np.array([[0, r] for r in range(len(rows))]))


def targets(batch: dict[str, torch.Tensor]) -> set[tuple[int, int]]:
    """Returns the set of (token, learned token after it)."""
    learned = batch["labels"] != IGNORE
    return set(zip(batch["input_ids"][learned].tolist(), batch["labels"][learned].tolist(), strict=True))


def expected_targets(examples: Examples) -> set[tuple[int, int]]:
    found = set()
    for i in range(len(examples)):
        ids, trained = examples.read(i)
        found |= {(int(a), int(b)) for a, b, t in zip(ids[:-1], ids[1:], trained[1:], strict=True) if t}
    return found


@pytest.mark.parametrize("method", ["greedy", "first_fit", "best_fit_decreasing"])
def test_packed_and_padded_rows_learn_the_same_tokens(examples: Examples, method: str) -> None:
    packed = PackedRows(examples, pack(examples.lengths, 12, method, 0), isolate_documents=True)
    padded = PaddedRows(examples)
    expected = expected_targets(examples)
    assert targets(all_rows(packed)) == targets(all_rows(padded)) == expected
    assert int(all_rows(packed)["seen"]) == int(all_rows(padded)["seen"]) == examples.lengths.sum()


def test_documents_of_a_packed_row(examples: Examples) -> None:
    rows = PackedRows(examples, pack(examples.lengths, 12, "greedy", None), isolate_documents=True)
    batch = rows.read(np.array([[0, 0], [0, 1]]))  # lengths 5 + 3 (4 padding), 9 + 1 (2 padding)
    assert batch["cu_seqlens"].tolist() == [0, 5, 8, 12, 21, 22, 24]
    assert batch["position_ids"][0].tolist() == [0, 1, 2, 3, 4, 0, 1, 2, 0, 1, 2, 3]
    assert batch["labels"][0, 4] == IGNORE  # the next token belongs to another example


def test_rows_of_a_batch_do_not_change_with_it(examples: Examples) -> None:
    rows = PackedRows(examples, pack(examples.lengths, 12, "best_fit_decreasing", 0), isolate_documents=True)
    together = all_rows(rows)
    for r in range(len(rows)):
        alone = rows.read(np.array([[0, r]]))
        for key in ("input_ids", "labels", "position_ids"):
            assert torch.equal(alone[key][0], together[key][r])


def test_examples_travel_to_loader_workers(examples: Examples) -> None:
    again = pickle.loads(pickle.dumps(examples))  # noqa: S301
    assert again.read(2)[0].tolist() == examples.read(2)[0].tolist()


def test_validation_rows_come_by_length(examples: Examples) -> None:
    rows = PaddedRows(examples, by_length=True)
    assert rows.lengths.tolist() == sorted(rows.lengths.tolist())
    assert targets(all_rows(rows)) == expected_targets(examples)
