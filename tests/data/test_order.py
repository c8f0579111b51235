"""Data order: every row once per epoch for any number of ranks, and the same rows for a step at every request."""

import math
from fractions import Fraction

import numpy as np
import pytest

from lmtrain.data import order


@pytest.mark.parametrize("size", [1, 2, 3, 5, 16, 17, 255, 1000, 65_537])
@pytest.mark.parametrize("epoch", [0, 1])
def test_permute_is_a_permutation(size: int, epoch: int) -> None:
    image = order.permute(np.arange(size), size, seed=7, epoch=epoch)
    assert np.array_equal(np.sort(image), np.arange(size))


def test_permutations_of_epochs_and_seeds_differ() -> None:
    index = np.arange(1000)
    images = [order.permute(index, 1000, seed, epoch) for seed, epoch in [(0, 0), (0, 1), (1, 0)]]
    for a in range(3):
        for b in range(a):
            # Two random permutations of 1000 agree in about one position; in more than 10 with probability 1e-8.
            assert (images[a] == images[b]).sum() <= 10


def test_permutation_spreads_like_a_random_one() -> None:
    """Neighbors are spread as in a random permutation, where the mean gap of two uniform draws from n is n / 3."""
    n = 10_000
    image = order.permute(np.arange(n), n, seed=3, epoch=0)
    assert abs(np.abs(np.diff(image)).mean() / (n / 3) - 1) < 0.05
    assert abs(np.corrcoef(np.arange(n), image)[0, 1]) < 0.05


@pytest.mark.parametrize("rows", [24, 25, 31])
@pytest.mark.parametrize(("world", "micro"), [(1, 8), (1, 3), (2, 2), (4, 1), (4, 3)])
def test_every_row_once_an_epoch_whatever_the_world(rows: int, world: int, micro: int) -> None:
    global_batch, epochs = 8, 2
    steps = -(-rows * epochs // global_batch)
    seen: list[tuple[int, int]] = []
    for step in range(steps):
        chosen = order.step_rows(step, rows=rows, global_batch_size=global_batch, seed=1, max_epochs=epochs)
        shares = [order.rank_share(chosen, rank, world, micro) for rank in range(world)]
        assert len({len(s) for s in shares}) == 1, "every rank needs the same number of micro-batches"
        together = [tuple(map(int, row)) for share in shares for mb in share for row in mb]
        assert sorted(together) == sorted(tuple(map(int, r)) for r in chosen)
        seen += together
    assert sorted(seen) == [(e, r) for e in range(epochs) for r in range(rows)]


def test_a_step_is_the_same_whenever_it_is_asked() -> None:
    kwargs = {"rows": 1000, "global_batch_size": 7, "seed": 5}
    first = [order.step_rows(s, **kwargs) for s in range(30)]
    for s in (29, 3, 17):
        assert np.array_equal(order.step_rows(s, **kwargs), first[s])


def test_only_the_last_step_is_short() -> None:
    sizes = [len(order.step_rows(s, rows=10, global_batch_size=4, seed=0, max_epochs=1)) for s in range(4)]
    assert sizes == [4, 4, 2, 0]


def test_a_trillion_rows_cost_no_memory() -> None:
    rows = 10**12
    chosen = order.step_rows(123_456_789, rows=rows, global_batch_size=64, seed=0)
    assert len(np.unique(chosen[:, 1])) == 64
    assert chosen[:, 1].max() < rows


@pytest.mark.parametrize("weight", ["1", "2", "0.5", "1.5", "0.3", "2.7", "0.333"])
def test_rows_are_repeated_by_weight_without_a_list_of_them(weight: str) -> None:
    count, exact = 101, Fraction(weight)
    repeats = order.Repeats([7, count, 3], [Fraction(1), exact, Fraction(2)])
    by_hand = list(range(7))
    for row in range(count):  # once for each whole number that n * weight passes at the row
        by_hand += [7 + row] * (math.floor((row + 1) * exact) - math.floor(row * exact))
    by_hand += [108, 108, 109, 109, 110, 110]
    assert repeats.stored(np.arange(len(repeats))).tolist() == by_hand


def test_step_seeds_differ_by_step_rank_and_seed() -> None:
    seeds = {order.step_seed(s, t, r) for s in range(4) for t in range(50) for r in range(4)}
    assert len(seeds) == 4 * 50 * 4
    assert all(0 <= s < 2**63 for s in seeds)
    # A run that another version began goes on with the same dropout.
    assert order.step_seed(3, 4, 5) == order.mix64(3, 0x5EED, 4, 5) // 2


@pytest.mark.parametrize("rows", [1, 7, order._BLOCK - 1, order._BLOCK, order._BLOCK + 1, 3 * order._BLOCK + 5])
def test_rows_of_small_steps_are_computed_many_at_a_time(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are those of the epochs' permutations; each step used to compute its own, a third of a millisecond each."""
    size, epochs = 6, 3
    whole = [order.permute(np.arange(rows), rows, seed=11, epoch=epoch) for epoch in range(epochs)]
    calls, real = [], order.permute
    monkeypatch.setattr(order, "permute", lambda *args: calls.append(args) or real(*args))
    steps = [
        order.step_rows(step, rows=rows, global_batch_size=size, seed=11, max_epochs=epochs)
        for step in range(-(-rows * epochs // size))
    ]
    found = np.concatenate(steps)
    assert found.dtype == np.int64
    assert np.array_equal(found[:, 0], np.repeat(np.arange(epochs), rows))
    assert np.array_equal(found[:, 1], np.concatenate(whole))
    assert len(calls) <= epochs * -(-rows // order._BLOCK)


def by_definition(index: int, size: int, seed: int, epoch: int) -> int:
    """Permutes one index in Python's integers: six rounds of a balanced Feistel network, and walking the cycle."""
    bits = 1
    while 4**bits < size:
        bits += 1
    while True:
        left, right = index >> bits, index % 2**bits
        for number in range(6):
            x = right ^ order.mix64(seed, epoch, number)
            for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
                x = (x ^ x >> shift) * factor % 2**64
            left, right = right, left ^ (x ^ x >> 31) % 2**bits
        index = (left << bits) + right
        if index < size:
            return index


@pytest.mark.parametrize("size", [2, 5, 16, 17, 1000, 10**12])
def test_the_order_is_that_of_earlier_versions(size: int) -> None:
    """A run that another version began goes on with the rows it has not seen: the network is part of the format."""
    index = np.unique(np.linspace(0, size - 1, 50).astype(np.int64))
    expected = [by_definition(int(i), size, seed=3, epoch=2) for i in index]
    assert order.permute(index, size, seed=3, epoch=2).tolist() == expected
    assert order.permute(np.arange(10), 10, seed=7, epoch=1).tolist() == [3, 8, 1, 2, 4, 9, 0, 7, 6, 5]


def test_mixed_integers_are_those_of_earlier_versions() -> None:
    found = [order.mix64(), order.mix64(0), order.mix64(1, 2), order.mix64(-1)]
    assert found == [0x9E3779B97F4A7C15, 0xD85D1D823D12CDE7, 0x4E457FC668DAAE45, 0x782AE3BD0A73ACE7]
