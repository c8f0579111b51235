"""Short padded rows are computed many at a time, in no more tokens than full rows have; nothing else changes."""

import random
from pathlib import Path

import numpy as np
import pytest
import torch

from chats import write_chats
from inprocess import run
from lmtrain.config.batch import Stages
from lmtrain.data import order
from lmtrain.data.loaders import StepDataset, ValidationDataset
from lmtrain.run import build
from support import rows
from tiny_pretrained import save_pretrained

SIZE, MOST = 4, 360  # rows of a micro-batch, and tokens up to which they are joined


class Padded:
    """Rows of different lengths that contain their own number."""

    def __init__(self, count: int) -> None:
        self.lengths = np.random.default_rng(count).integers(3, 90, count)

    def __len__(self) -> int:
        return len(self.lengths)

    def read(self, rows: np.ndarray) -> dict[str, torch.Tensor]:
        return {"rows": torch.from_numpy(rows[:, 1].copy())}

    def empty(self) -> dict[str, torch.Tensor]:
        return {"rows": torch.empty(0, dtype=torch.int64)}


def test_joined_micro_batches_are_as_large_as_allowed() -> None:
    draw = random.Random(0)
    for _ in range(200):
        longest = [draw.randint(1, 100) for _ in range(draw.randint(1, 30))]
        starts = order.joins(longest, SIZE, MOST)
        ends = [*starts[1:], len(longest)]
        assert starts[0] == 0
        for start, end in zip(starts, ends, strict=True):
            tokens = SIZE * (end - start) * max(longest[start:end])
            assert tokens <= MOST or end == start + 1
            if end < len(longest):
                assert SIZE * (end + 1 - start) * max(longest[start : end + 1]) > MOST


@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("limit", [None, 7])
def test_every_rank_joins_alike_and_every_row_is_there_once(world: int, limit: int | None) -> None:
    data, share = Padded(119), {"micro_batch_size": SIZE, "joined_tokens": MOST, "world_size": world}
    steps = [StepDataset(data, seed=3, sizes=Stages.constant(48), max_epochs=1, rank=r, **share) for r in range(world)]
    joined = []
    for step in range(3):
        found = [s[step]["micro_batches"] for s in steps]
        assert len({len(micro_batches) for micro_batches in found}) == 1
        read = [m["rows"] for micro_batches in found for m in micro_batches]
        assert sorted(torch.cat(read).tolist()) == sorted(steps[0].row_ids(step)[:, 1].tolist())
        assert all(len(m) <= SIZE or len(m) * data.lengths[m].max() <= MOST for m in read)
        joined += [m for m in read if len(m) > SIZE]
    assert joined or world > 1  # a rank of several has rows of too different lengths
    parts = [ValidationDataset(data, limit=limit, rank=r, **share) for r in range(world)]
    apart = ValidationDataset(data, micro_batch_size=SIZE, limit=limit, rank=0, world_size=1)
    assert len({len(part) for part in parts}) == 1
    read = [part[i]["rows"] for part in parts for i in range(len(part))]
    assert sorted(torch.cat(read).tolist()) == [int(row) for i in range(len(apart)) for row in apart[i]["rows"]]
    assert all(len(m) <= SIZE or len(m) * data.lengths[m].max() <= MOST for m in read)


def test_joining_changes_no_loss(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = save_pretrained(tmp_path / "model", max_position_embeddings=512)
    pairs = write_chats(tmp_path / "pairs.jsonl", [{"question": "a" * (1 + i % 9), "answer": "b" * (1 + i % 5)}
                                                   for i in range(1, 80)])  # fmt: skip
    found = []
    for joins in (True, False):
        folder = tmp_path / str(joins)
        if not joins:
            monkeypatch.setattr(build, "joined_tokens", lambda _: None)
        ended = run("train", "objective=sft", "data=chat_jsonl", f"data.path={pairs}", f"model={model}",
                    "data.packing=off", "data.chat_template=alpaca", "data.global_batch_size=16",
                    "data.micro_batch_size=2", "data.seq_len=512", "trainer.precision=32-true",
                    "trainer.max_steps=4", "trainer.val_check_interval=2", "callbacks.samples.every_n_validations=0",
                    "logger=none", "export.enabled=false", "optimizer.lr=1e-2", f"run.dir={folder}")  # fmt: skip
        assert ended.code == 0, ended.err
        assert joins == ("of short ones more, up to 1,024 tokens" in " ".join(ended.out.replace("│", " ").split()))
        found.append(rows(folder / "metrics.jsonl"))
    for ours, theirs in zip(*found, strict=True):
        for key in {"train/loss", "val/loss", "grad_norm"} & ours.keys():
            assert ours[key] == pytest.approx(theirs[key], rel=1e-5)
