"""Router losses over whole steps, and what a run reports about its routers: use of chapters over time, collapse."""

from pathlib import Path
from typing import Any

import pytest
import torch

from chats import write_chats
from inprocess import message, run, train_tiny
from lmtrain.adapters import memory
from lmtrain.callbacks.routing import MOST, use
from lmtrain.reports.curves import LEVELS, HeatMap, heat_maps, level, paths
from support import TINY, Run, rows

SHAPE = [
    "model=memory_nano", "memory.layers=[0,1]", "memory.num_chapters=6", "memory.chapter_size=4",
    "memory.memory_dim=16", "memory.top_k=2", "data.global_batch_size=8", "trainer.max_steps=3", "optimizer.lr=0.01",
    "callbacks.samples.every_n_validations=0", "export.enabled=false",
]  # fmt: skip
LARGE = ["router.load_balance=1", "router.deviation=1", "router.z_loss=0.1"]
AUX = [f"train/router/{name}" for name in ("load_balance", "deviation", "z_loss", "entropy", "dead")]


def records(folder: Path) -> list[dict[str, Any]]:
    return [row for row in rows(folder / "metrics.jsonl") if "train/loss" in row]


def trained(corpus: Path, folder: Path, *extra: str) -> list[dict[str, Any]]:
    ended = train_tiny(corpus, *SHAPE, f"run.dir={folder}", *extra)
    assert ended.code == 0, ended.err
    return records(folder)


def assert_equal(found: list[dict[str, Any]], expected: list[dict[str, Any]]) -> None:
    """Asserts equality up to rounding for the first step and a looser one afterwards: AdamW steps by the sign of
    gradients near 0, which the order of summation may change, and a token between two chapters may switch."""
    assert len(found) == len(expected) == 3
    for a, b in zip(found, expected, strict=True):
        first = a["step"] == 1
        for name in ("train/loss", "grad_norm", *AUX):
            assert a[name] == pytest.approx(b[name], rel=2e-5 if first else 1e-3, abs=1e-7), (a["step"], name)
        assert a["router/chapters"] == pytest.approx(b["router/chapters"], rel=0, abs=0 if first else 2)


def test_losses_of_a_step_do_not_depend_on_its_micro_batches(corpus: Path, tmp_path: Path) -> None:
    """With router.scope=step, 1 x 8 and 4 x 2 rows give equal losses and gradients in all steps; else they differ."""
    whole = trained(corpus, tmp_path / "whole", *LARGE, "data.micro_batch_size=8", "router.scope=step")
    split = trained(corpus, tmp_path / "split", *LARGE, "data.micro_batch_size=2", "router.scope=step")
    assert_equal(split, whole)
    apart = trained(corpus, tmp_path / "apart", *LARGE, "data.micro_batch_size=2")
    assert abs(apart[0]["train/router/load_balance"] - whole[0]["train/router/load_balance"]) > 1e-3
    assert abs(apart[0]["grad_norm"] - whole[0]["grad_norm"]) > 1e-4


@pytest.mark.slow
@pytest.mark.parametrize("rows_at_once", [4, 2])
def test_losses_of_a_step_are_of_all_ranks(
    rows_at_once: int, corpus: Path, tmp_path: Path, forked_lmtrain: Run
) -> None:
    given = [*LARGE, "router.scope=step"]
    expected = trained(corpus, tmp_path / "one", *given, "data.micro_batch_size=8")
    done = run_ranks(forked_lmtrain, corpus, tmp_path / "two", *given, f"data.micro_batch_size={rows_at_once}")
    assert done.returncode == 0, done.stdout + done.stderr
    assert_equal(records(tmp_path / "two"), expected)


def run_ranks(forked_lmtrain: Run, corpus: Path, folder: Path, *extra: str) -> Any:
    few = ["trainer.val_check_interval=1", "trainer.limit_val_batches=1", "data=text", "trainer.devices=2"]
    return forked_lmtrain("train", *TINY, *few, f"data.path={corpus}", *SHAPE, f"run.dir={folder}", *extra)


def test_losses_of_a_step_want_one_reading_of_a_micro_batch() -> None:
    dpo = ["objective=dpo", "data=preference_jsonl", "data.path=x", "data.seq_len=64"]
    ended = run("train", *dpo, "router.scope=step")
    assert ended.code == 2
    assert "objective=dpo does not go with router.scope=step" in message(ended.err)
    assert "Set router.scope=micro_batch" in message(ended.err)


def test_padding_changes_no_loss_of_a_step(tmp_path: Path) -> None:
    """With router.scope=step, conversations that are padded to other lengths give equal losses and gradients."""
    chats = write_chats(tmp_path / "chats.jsonl", 40)
    words = [*TINY, *SHAPE, *LARGE, "objective=sft", "data=chat_jsonl", f"data.path={chats}", "data.packing=off",
             "data.chat_template=vicuna", "data.seq_len=256", "model.max_position_embeddings=256", "router.scope=step",
             "trainer.limit_val_batches=1"]  # fmt: skip
    for size in (8, 2):
        ended = run("train", *words, f"data.micro_batch_size={size}", f"run.dir={tmp_path / str(size)}")
        assert ended.code == 0, ended.err
    assert_equal(records(tmp_path / "2"), records(tmp_path / "8"))


def test_a_collapsed_router_is_told_once_and_seen_in_the_report(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A collapse is reported once and shown in the report; one of two routers gets equal logits for every token."""
    plain, blocks = memory.MemoryBlock.forward, list[Any]()

    def forced(self: Any, hidden: torch.Tensor) -> torch.Tensor:
        blocks.extend([self] if self not in blocks else [])
        read = plain(self, hidden)
        if self is not blocks[0]:
            self.last_router_logits = self.last_router_logits * 0 + torch.arange(6.0)
        return read

    monkeypatch.setattr(memory.MemoryBlock, "forward", forced)
    ended = train_tiny(corpus, *SHAPE, f"run.dir={tmp_path / 'a'}", "router.warn_after_steps=2", "report.enabled=true")
    assert ended.code == 0, ended.err
    words = " ".join(ended.out.split())
    assert words.count("has sent all tokens to the same 2 of 6 chapters for 2 steps") == 1
    assert "step 2: router 2 of 2 has sent" in words
    assert "raise router.load_balance (0.01), memory.router_noise (0) or lower optimizer.lr" in words

    for row in records(tmp_path / "a"):
        assert len(row["router/chapters"]) == 6
        assert sum(row["router/chapters"]) == pytest.approx(1000, abs=3)
    page = (tmp_path / "a" / "report.html").read_text()
    assert "Chapters of the memory" in page
    (heat,) = heat_maps(rows(tmp_path / "a" / "metrics.jsonl"))
    assert (heat.first, heat.last, len(heat.cells)) == (1, 3, 3)
    dark = {(x, y) for x, column in enumerate(heat.cells) for y, share in enumerate(column) if level(share, 6)}
    assert {(x, y) for x in range(3) for y in (4, 5)} <= dark, "where the second router sends all"
    assert all(f"M{x} {y}h1" in page for x, y in dark)


def test_use_is_in_thousandths_and_of_few_numbers() -> None:
    assert use(torch.tensor([[1.0, 1.0, 2.0], [0.0, 4.0, 0.0]])) == [125, 625, 250]
    many = torch.zeros(1, 1000)
    many[0, [0, 999]] = torch.tensor([1.0, 3.0])
    assert len(use(many)) == MOST
    assert (use(many)[0], use(many)[-1]) == (250, 750)


def test_cells_are_darker_the_more_they_are_chosen() -> None:
    assert [level(share / 64, 64) for share in (0, 0.04, 1, 64)] == [0, 0, LEVELS.index(1.0) + 1, len(LEVELS)]
    many = [{"step": s, "router/chapters": [1000, 0] if s < 500 else [0, 1000]} for s in range(1000)]
    (heat,) = heat_maps(many)
    assert len(heat.cells) == 120
    assert heat.cells[0] == [1.0, 0.0]
    assert heat.cells[-1] == [0.0, 1.0]
    assert paths(HeatMap("t", 1, 2, [[1.0, 0.0], [0.0, 1.0]])) == {5: "M0 0h1M1 1h1"}
    assert heat_maps([{"step": 1, "train/loss": 2.0}]) == []
