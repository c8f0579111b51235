"""Validation rows: each once for any number of ranks; a limited validation reads the same evenly spread rows."""

import numpy as np
import pytest
import torch

from lmtrain.data.loaders import ValidationDataset


class Numbers:
    """Rows that contain their own number."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def read(self, rows: np.ndarray) -> dict[str, torch.Tensor]:
        return {"rows": torch.from_numpy(rows[:, 1].copy())}

    def empty(self) -> dict[str, torch.Tensor]:
        return {"rows": torch.empty(0, dtype=torch.int64)}


def seen(count: int, limit: int | None, world: int) -> list[int]:
    ranks = [
        ValidationDataset(Numbers(count), micro_batch_size=4, limit=limit, rank=r, world_size=world)
        for r in range(world)
    ]
    assert len({len(d) for d in ranks}) == 1, "ranks validate in step"
    return sorted(int(row) for d in ranks for i in range(len(d)) for row in d[i]["rows"])


@pytest.mark.parametrize("world", [1, 2, 3])
def test_every_row_once(world: int) -> None:
    assert seen(23, None, world) == list(range(23))


@pytest.mark.parametrize("world", [1, 2, 3])
def test_a_limit_spreads_over_the_split_and_ignores_the_world(world: int) -> None:
    rows = seen(100, 5, world)
    assert rows == [i * 5 for i in range(20)]
    assert seen(10, 5, world) == list(range(10)), "a limit above the split changes nothing"
