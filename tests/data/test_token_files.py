"""Token files of other programs: ids and borders as they were written, whatever is damaged refused."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lmtrain.data.store.prepared import PreparedData
from lmtrain.data.text.prepare import prepare
from support import REPO
from token_layouts import LAYOUTS

EOS = 256  # of tokenizer=bytes
CASES = REPO.parent / "shared" / "cases" / "tokens"


def documents(number: int = 40) -> list[list[int]]:
    draw = np.random.default_rng(0)
    return [[*draw.integers(1, 256, draw.integers(3, 30)).tolist(), EOS] for _ in range(number)]


@pytest.fixture
def opened(data_config: Any, tokenizer_config: Any) -> Any:
    def make(path: Path, tokenizer: Any = None, **settings: Any) -> PreparedData:
        cfg = data_config("bins", path=str(path), **settings)
        return prepare(cfg, tokenizer or tokenizer_config("bytes"), progress=False)

    return make


def read(prepared: PreparedData, split: str = "train") -> list[list[int]]:
    """Returns the documents of a split."""
    (shard,) = prepared.splits[split].shards
    ids, ends = shard.read(0, shard.tokens).tolist(), shard.document_ends(1, shard.tokens + 1).tolist()
    assert prepared.splits[split].documents == len(ends)
    return [ids[start:end] for start, end in zip([0, *ends], ends, strict=False)]


def laid_out(layout: str, folder: Path, given: list[list[int]]) -> list[list[int]]:
    """Writes documents in a layout; returns them as they are to be read."""
    folder.mkdir()
    LAYOUTS[layout](folder, given)
    return [[EOS, *one[:-1]] for one in given] if layout.startswith("llm.c") else given


@pytest.mark.parametrize("layout", LAYOUTS)
def test_ids_and_borders_are_those_that_were_written(layout: str, tmp_path: Path, opened: Any) -> None:
    wanted = laid_out(layout, tmp_path / "tokens", documents())
    assert read(opened(tmp_path / "tokens")) == wanted
