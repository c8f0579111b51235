"""Batches of every kind of rows: tensors share no memory, every call gives the same, and one row can be a batch."""

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from chats import pair, write_chats
from inprocess import train_tiny
from lmtrain.config.compose import check, compose
from lmtrain.data.corpus import build_corpus
from lmtrain.data.text.windows import IGNORE
from support import TINY, rows

WIDE = [*TINY, "model.max_position_embeddings=1024", "data.seq_len=512"]
CHAT = [*WIDE, "objective=sft", "data=chat_jsonl", "data.val_fraction=0.1"]
PAIRS = [*WIDE, "objective=dpo", "data=preference_jsonl", "data.val_fraction=0.1"]
KINDS: dict[str, list[str]] = {
    "text": [*TINY, "data=text", "data.isolate_documents=false"],
    "text_isolated": [*TINY, "data=text", "data.isolate_documents=true"],
    "chat_padded": [*CHAT, "data.packing=off"],
    **{f"chat_{name}": [*CHAT, f"data.packing={name}"]
       for name in ("concat", "greedy", "first_fit", "best_fit_decreasing")},
    "chat_seeing_each_other": [*CHAT, "data.packing=greedy", "data.isolate_documents=false"],
    "pairs": [*PAIRS, "data.share_prompts=false"],
    "pairs_shared_prompts": [*PAIRS, "data.share_prompts=true"],
}  # fmt: skip


def corpus_of(kind: str, corpus: Path, folder: Path) -> Any:
    path = corpus
    if "chat" in kind:
        path = write_chats(folder / "chats.jsonl")
    elif "pairs" in kind:
        path = write_chats(folder / "pairs.jsonl", [pair(i) for i in range(40)])
    template = ["data.chat_template=vicuna"] if path != corpus else []
    return build_corpus(check(compose([*KINDS[kind], *template, f"data.path={path}"])))


def assert_apart(batch: dict[str, torch.Tensor], where: str) -> None:
    """Checks that no two tensors share memory and that a write to one changes no other."""
    for (a, x), (b, y) in itertools.combinations(batch.items(), 2):
        if x.numel() and y.numel():
            assert x.untyped_storage().data_ptr() != y.untyped_storage().data_ptr(), f"{where}: {a} and {b}"
    before = {name: tensor.clone() for name, tensor in batch.items()}
    for name in batch:
        batch[name].fill_(True)
        for other in batch:
            assert other == name or torch.equal(batch[other], before[other]), f"{where}: {name} writes into {other}"
        batch[name].copy_(before[name])


@pytest.mark.parametrize("kind", KINDS)
def test_tensors_of_a_batch_share_no_memory(kind: str, corpus: Path, tmp_path: Path) -> None:
    built = corpus_of(kind, corpus, tmp_path)
    for split in (built.train, built.val):
        assert_apart(split.empty(), f"{kind}, empty")
        for size in (1, 2, 3):
            for first in range(min(6, len(split) - size + 1)):
                asked = np.array([[epoch, first + i] for i, epoch in enumerate([0, 1, 0][:size])])
                batch, again = split.read(asked), split.read(asked)
                assert set(batch) == set(again)
                assert all(torch.equal(batch[name], again[name]) for name in batch), f"{kind}, {size} rows"
                assert int(batch["input_ids"].min()) >= 0, "a label was written into the input"
                assert_apart(batch, f"{kind}, {size} rows")
                if "labels" in batch:
                    follows = batch["labels"][:, :-1] == batch["input_ids"][:, 1:]
                    assert bool((follows | (batch["labels"][:, :-1] == IGNORE)).all())


def test_a_run_with_isolated_documents_and_one_row_a_batch(corpus: Path, tmp_path: Path) -> None:
    """Losses are equal for micro-batches of one row and of a size that leaves one row for the last validation batch."""
    common = ["data.isolate_documents=true", "data.sample_by=line", "trainer.limit_val_batches=null"]
    val = build_corpus(check(compose([*TINY, "data=text", f"data.path={corpus}", *common]))).val
    assert val is not None
    uneven = next(size for size in (2, 3, 6) if len(val) % size == 1)
    found = []
    for size in (1, uneven):
        run_dir = tmp_path / f"by_{size}"
        ended = train_tiny(corpus, *common, f"data.micro_batch_size={size}", f"run.dir={run_dir}")
        assert ended.code == 0, ended.err
        found.append([r.get("train/loss", r.get("val/loss")) for r in rows(run_dir / "metrics.jsonl")])
    assert len(found[0]) == 4
    assert found[0] == pytest.approx(found[1], rel=1e-5)
