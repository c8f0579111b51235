"""Text packed by documents: each token once, documents whole where they fit, and runs on it that resume exactly."""

import itertools
from pathlib import Path

import numpy as np
import pytest
import torch

from inprocess import message, run
from lmtrain.callbacks.metrics import without_times
from lmtrain.config.compose import check, compose
from lmtrain.data.corpus import Corpus, build_corpus
from lmtrain.data.examples.documents import TextPieces
from lmtrain.data.store.bins import open_shards
from lmtrain.data.store.writer import BinWriter
from lmtrain.data.text.windows import IGNORE
from support import TINY, rows

LENGTHS = [3, 40, 32, 33, 1, 64, 100, 7, 31, 2]


def written(folder: Path, shard_tokens: int) -> tuple[list[list[int]], TextPieces]:
    """Writes documents of consecutive ids and returns them with their pieces of at most 32 tokens."""
    writer = BinWriter(folder, "train", "uint16", shard_tokens)
    documents = [list(range(200 * i, 200 * i + n)) for i, n in enumerate(LENGTHS)]
    for document in documents:
        writer.append(np.array(document), ends_document=True)
    return documents, TextPieces(open_shards(folder, "uint16", writer.close()), 32)


@pytest.mark.parametrize("shard_tokens", [1000, 70])
def test_every_token_but_a_documents_first_is_predicted_once(shard_tokens: int, tmp_path: Path) -> None:
    documents, pieces = written(tmp_path, shard_tokens)
    pairs = []
    for i in range(len(pieces)):
        ids, learned = pieces.read(i)
        assert len(ids) == pieces.lengths[i] <= 32
        assert learned.all()
        pairs += zip(ids[:-1].tolist(), ids[1:].tolist(), strict=True)
    wanted = [pair for document in documents for pair in itertools.pairwise(document)]
    if shard_tokens == 70:  # a document longer than a shard is cut at the shard's end
        wanted.remove((1269, 1270))
    assert sorted(pairs) == sorted(wanted)
    whole = {tuple(pieces.read(i)[0].tolist()) for i in range(len(pieces))}
    assert all(tuple(document) in whole for document in documents if len(document) <= 32)


def text(tmp_path: Path) -> Path:
    path = tmp_path / "lines.txt"
    path.write_text("".join("abcdefghijklmnopqrstuvwxyz"[: 3 + i % 23] * (1 + i % 3) + "\n" for i in range(200)))
    return path


def corpus_of(tmp_path: Path, *overrides: str) -> Corpus:
    common = [*TINY, "data=text", f"data.path={text(tmp_path)}", "data.sample_by=line", f"data.cache_dir={tmp_path}/c"]
    return build_corpus(check(compose([*common, *overrides])))


@pytest.mark.parametrize("packing", ["best_fit_decreasing", "first_fit", "off"])
def test_packed_rows_learn_what_the_documents_hold(packing: str, tmp_path: Path) -> None:
    corpus = corpus_of(tmp_path, f"data.packing={packing}", "data.isolate_documents=true")
    batch = corpus.train.read(np.array([[0, r] for r in range(len(corpus.train))]))
    learned = batch["labels"] != IGNORE
    pieces = corpus.train.examples
    assert int(learned.sum()) == int((pieces.lengths - 1).sum())
    assert int(batch["seen"]) == corpus.epoch_tokens
    if packing != "off":
        fewest = -(-int(pieces.lengths.sum()) // 32)
        assert fewest <= len(corpus.train) <= 11 / 9 * fewest + 1 or packing == "first_fit"
        assert (batch["position_ids"][:, 0] == 0).all(), "no row begins in the middle"
    assert torch.equal(batch["input_ids"][learned.roll(1, 1)][:5], batch["labels"][learned][:5])


def test_concat_is_what_text_does_anyway(tmp_path: Path) -> None:
    default, named = corpus_of(tmp_path), corpus_of(tmp_path, "data.packing=concat")
    assert type(default.train) is type(named.train)
    assert len(default.train) == len(named.train)


@pytest.mark.parametrize("packing", ["best_fit_decreasing", pytest.param("off", marks=pytest.mark.slow)])
def test_a_run_over_whole_documents_goes_on_exactly(packing: str, tmp_path: Path) -> None:
    common = [*TINY, "data=text", f"data.path={text(tmp_path)}", "data.sample_by=line", f"data.packing={packing}",
              "data.isolate_documents=true", "trainer.limit_val_batches=1", "callbacks.samples.every_n_validations=0",
              "export.enabled=false", f"data.cache_dir={tmp_path}/c", "schedule=constant"]  # fmt: skip
    assert run("train", *common, f"run.dir={tmp_path}/whole", "trainer.max_steps=4").code == 0
    assert run("train", *common, f"run.dir={tmp_path}/parts", "trainer.max_steps=2").code == 0
    assert run("train", *common, f"run.dir={tmp_path}/parts", "run.resume=auto", "trainer.max_steps=4").code == 0
    found = [
        [without_times(r) for r in rows(tmp_path / name / "metrics.jsonl") if "train/loss" in r]
        for name in ("whole", "parts")
    ]
    assert found[0] == found[1]


def test_what_cannot_be_packed_is_said(tmp_path: Path) -> None:
    np.full(500, 7, dtype=np.uint16).tofile(tmp_path / "train.bin")
    bins = ["data=bins", f"data.path={tmp_path}", "data.packing=first_fit", f"run.dir={tmp_path}/run",
            "data.append_eos=false"]  # fmt: skip
    assert "no document borders" in message(run("train", *TINY, *bins, "trainer.max_steps=1").err)
    mixed = [
        "data=mixture",
        f"data.mixture=[{{path: {text(tmp_path)}}}]",
        "data.packing=off",
        f"run.dir={tmp_path}/run",
    ]
    assert "documents of a mixture are concatenated" in message(run("train", *TINY, *mixed).err)
