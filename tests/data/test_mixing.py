"""Mixtures: counts follow the weights within one row at every step, rows come once per epoch, and limits are kept."""

import numpy as np
import pytest

from lmtrain.config.batch import Stages
from lmtrain.data.mixing import Mixture, MixtureSource, check_weights
from lmtrain.data.order import mix64, permute
from lmtrain.errors import UserError

BATCH = 8


def mixture(*sources: tuple, temperature: float | None = None) -> Mixture:
    """Returns a mixture of sources given as (rows, weight or weights by step, maximum number of epochs)."""
    made = []
    for number, (rows, weight, *limit) in enumerate(sources):
        weights = weight if isinstance(weight, dict) else {0: float(weight)}
        made.append(MixtureSource(f"s{number}", rows, weights, *limit))
    return Mixture(made, Stages.constant(BATCH), temperature)


def sources_of(mixed: Mixture, rows: np.ndarray) -> np.ndarray:
    return np.searchsorted(mixed.first_row, rows[:, 1], side="right") - 1


def step_rows(mixed: Mixture, step: int, **how) -> np.ndarray:
    return mixed.stream_rows(step * BATCH, (step + 1) * BATCH, **how)


def counts(mixed: Mixture, steps: range) -> np.ndarray:
    rows = np.concatenate([step_rows(mixed, step, seed=1) for step in steps])
    return np.bincount(sources_of(mixed, rows), minlength=len(mixed.sources))


@pytest.mark.parametrize(("a", "b"), [(1, 1), (3, 1), (0.7, 0.3), (1, 99), (0.123, 4.56), (5, 0)])
def test_two_sources_have_their_weights_to_one_row_at_every_step(a: float, b: float) -> None:
    mixed = mixture((37, a), (1000, b))
    given = np.zeros(2, dtype=int)
    for step in range(300):
        given += counts(mixed, range(step, step + 1))
        wanted = (step + 1) * BATCH * np.array([a, b]) / (a + b)
        assert np.abs(given - wanted).max() <= 0.5 + 1e-9
        assert mixed.rows_given((step + 1) * BATCH).tolist() == given.tolist()


def test_many_sources_stay_within_two_rows_of_their_weights() -> None:
    weights = np.random.default_rng(0).dirichlet(np.full(13, 0.3))
    mixed = mixture(*((100, w) for w in weights))
    for position in range(0, 20_000, 7):
        given = mixed.rows_given(position)
        assert given.sum() == position
        assert np.abs(given - position * weights).max() < 2


def test_rows_come_once_in_each_epoch_of_their_source() -> None:
    mixed = mixture((30, 2), (50, 1))
    rows = np.concatenate([step_rows(mixed, step, seed=3) for step in range(45)])  # 240 of the first, 120 of the second
    for source, size in enumerate((30, 50)):
        own = rows[sources_of(mixed, rows) == source]
        first = int(mixed.first_row[source])
        for epoch in range(len(own) // size):
            seen = own[own[:, 0] == epoch, 1] - first
            assert np.sort(seen).tolist() == list(range(size))
            assert seen.tolist() != list(range(size)), "shuffled"


def test_the_order_of_a_source_is_that_of_earlier_versions() -> None:
    """A run that another version began goes on with the rows it has not seen."""
    mixed = mixture((30, 2), (50, 1))
    rows = mixed.stream_rows(0, 300, seed=3)
    for source, size in enumerate((30, 50)):
        own = rows[sources_of(mixed, rows) == source]
        key, first = mix64(3, 0x317, source), int(mixed.first_row[source])
        whole = np.concatenate([first + permute(np.arange(size), size, key, epoch) for epoch in range(7)])
        assert own[:, 1].tolist() == whole[: len(own)].tolist()
        assert own[:, 0].tolist() == [n // size for n in range(len(own))]


def test_a_step_is_the_same_whenever_it_is_asked() -> None:
    parts = ((30, {0: 3.0, 5: 1.0}, 2), (50, {0: 1.0, 9: 0.0}), (20, 0.5))
    whole = [step_rows(mixture(*parts), step, seed=5).tolist() for step in range(30)]
    for step in (29, 0, 9, 14):
        assert step_rows(mixture(*parts), step, seed=5).tolist() == whole[step]
    assert step_rows(mixture(*parts), 3, seed=6).tolist() != whole[3]


def test_weights_change_at_their_step() -> None:
    mixed = mixture((40, {0: 1.0, 10: 0.0, 20: 3.0}), (40, {0: 1.0, 20: 1.0}))
    assert counts(mixed, range(10)).tolist() == [40, 40]
    assert counts(mixed, range(10, 20)).tolist() == [0, 80]
    assert counts(mixed, range(20, 30)).tolist() == [60, 20]
    check_weights([{0: 1.0, 10: 0.0}, {0: 0.0, 7: 1.0}])
    with pytest.raises(UserError, match="all weights are 0 from step 10 on"):
        check_weights([{0: 1.0, 10: 0.0}, {0: 1.0, 7: 0.0}])


def test_a_source_that_was_seen_often_enough_leaves_its_share_to_the_others() -> None:
    mixed = mixture((11, 1, 2), (1000, 1), (1000, 2))
    assert counts(mixed, range(8)).tolist() == [16, 16, 32]
    assert counts(mixed, range(200))[0] == 22
    later = counts(mixed, range(100, 400))
    assert later.tolist() == [0, 800, 1600]
    rows = np.concatenate([step_rows(mixed, step, seed=1) for step in range(100)])
    assert np.bincount(rows[sources_of(mixed, rows) == 0, 1]).tolist() == [2] * 11


def test_a_mixture_ends_where_all_its_sources_are_used_up() -> None:
    mixed = mixture((11, 1, 2), (7, 1, 1.5))
    assert mixed.end == 22 + 10
    assert [len(step_rows(mixed, step, seed=0)) for step in range(5)] == [8, 8, 8, 8, 0]
    assert mixture((11, 1, 2), (7, 1)).end is None


def test_a_mixture_without_a_whole_row_is_refused() -> None:
    with pytest.raises(UserError, match=r"max_epochs leaves no row to begin with \(rows: a 30, b 9\)"):
        Mixture([MixtureSource("a", 30, {0: 1.0}, 0.03), MixtureSource("b", 9, {0: 0.0, 5: 1.0})],
                Stages.constant(4), None)  # fmt: skip


def test_temperature_is_between_sizes_and_weights() -> None:
    sizes = (100, 1600)
    for temperature, wanted in ((None, 1), (1.0, 16), (2.0, 4), (1e9, 1)):
        mixed = mixture(*((size, 1) for size in sizes), temperature=temperature)
        first, second = mixed.stretches[0].shares
        assert second / first == pytest.approx(wanted)


def test_an_epoch_is_as_many_rows_as_there_are() -> None:
    mixed = mixture((5, 1), (8, 1))
    assert [len(step_rows(mixed, step, seed=0, max_epochs=2)) for step in range(5)] == [8, 8, 8, 2, 0]


def test_a_trillion_rows_cost_no_memory() -> None:
    mixed = mixture((10**12, 0.9), (10**6, 0.1, 50))
    rows = step_rows(mixed, 10**9, seed=0)
    assert len(rows) == BATCH
    assert (rows[:, 1] < 10**12).all(), "the small source was used up long before"
