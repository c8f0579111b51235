"""The share of validation text that is also in the training text equals a direct lookup, and the plan shows it."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from inprocess import run
from lmtrain.data.store.shards import Shard
from lmtrain.data.text.repeats import share_seen
from support import TINY

LENGTH = 20


def shards_of(file: Path, ids: Sequence[int] | np.ndarray) -> list[Shard]:
    np.asarray(ids, dtype=np.uint16).tofile(file)
    return [Shard(file, "uint16", len(ids), {})]


@pytest.mark.parametrize("at_once", [1 << 20, 137])
def test_share_seen_is_that_of_looking_each_piece_up(
    at_once: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lmtrain.data.text.repeats._TOKENS_AT_ONCE", at_once)
    draw = np.random.default_rng(0)
    train, val = (draw.integers(0, 50, n).astype(np.uint16) for n in (3000, 1000))
    val[300:420] = train[1001:1121]
    val[500:560] = val[300:360]  # each of several equal pieces counts
    shards = [shards_of(tmp_path / "train.bin", train), shards_of(tmp_path / "val.bin", val)]
    known = {tuple(train[i : i + LENGTH]) for i in range(len(train) - LENGTH + 1)}
    whole = [tuple(val[i : i + LENGTH]) for i in range(0, len(val), LENGTH)]
    by_hand = sum(piece in known for piece in whole) / len(whole)
    # Each part is cut into pieces from its own start, so with several parts pieces may be shifted against the whole.
    found = share_seen(*shards, LENGTH)
    assert found == by_hand if at_once > 1000 else abs(found - by_hand) < 0.08
    assert by_hand > 0.1


def test_few_pieces_and_pieces_at_the_edges_are_looked_up(tmp_path: Path) -> None:
    def share(train: list[int], val: list[int]) -> float:
        return share_seen(shards_of(tmp_path / "train.bin", train), shards_of(tmp_path / "val.bin", val), 3)

    text = [5, 6, 7, 8, 9]
    assert share(text, [7, 8, 9]) == 1.0, "the last piece of the training text, and one piece alone"
    assert share(text, [5, 6, 7]) == 1.0
    assert share(text, [5, 6, 8]) == 0.0
    assert share(text, [5, 6, 7, 9, 8, 7, 0]) == 0.5
    assert share(text, [5, 6]) == 0.0, "shorter than a piece"
    assert share([5, 6], text) == 0.0


def test_the_plan_says_it(tmp_path: Path) -> None:
    lines = [f"line {n} of a text: {n * 7919 % 1000} and {n * 104729 % 10000} are its numbers\n" for n in range(400)]
    (tmp_path / "train.txt").write_text("".join(lines))
    (tmp_path / "val.txt").write_text("".join(lines[100:150]) + "".join(f"new words {n * 31337}\n" for n in range(300)))
    paths = ["data=text", f"data.path={tmp_path}/train.txt", f"data.val_path={tmp_path}/val.txt"]
    done = run("train", *TINY, *paths, f"run.dir={tmp_path}/run", "trainer.max_steps=1")
    assert done.code == 0, done.err
    assert "of it stands in the training text word for word (100 bytes or more)" in " ".join(
        done.out.replace("│", " ").split()
    )
