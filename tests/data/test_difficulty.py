"""Rows from easy to hard: scores as computed by hand and by transformers, an order that loses no row, exact resume."""

import itertools
import re
import zlib
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM

from chats import write_rows
from inprocess import Ended, message, run, stops_at
from lmtrain.callbacks.metrics import without_times
from lmtrain.config.compose import check, compose
from lmtrain.config.growth import step_sizes
from lmtrain.config.schema import Config
from lmtrain.data import difficulty, order
from lmtrain.data.corpus import Corpus, build_corpus
from lmtrain.data.loaders import rows_of_step
from lmtrain.data.store import row_numbers
from lmtrain.data.store.progress import RowProgress
from lmtrain.errors import UserError
from lmtrain.run.difficulty import order_rows, score_rows
from support import TINY, rows
from tiny_pretrained import save_pretrained

SEQ_LEN, ROWS = 32, 6  # of TINY
RUN = [*TINY, "data=text", "trainer.limit_val_batches=1", "callbacks.samples.every_n_validations=0",
       "export.enabled=false", "trainer.save_every_n_steps=3", "trainer.accelerator=cpu"]  # fmt: skip
BY = "data.curriculum.by=difficulty"


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Paragraphs of few and of many different letters."""
    path = tmp_path_factory.mktemp("text") / "text.txt"
    draw = np.random.default_rng(0)
    alphabet = "abcdefghijklmnopqrstuvwxyz ,.;:!?()-ABCDEFGHIJKLMNOP"
    paragraphs = ["".join(draw.choice(list(alphabet[: 2 + i % 49]), size=20 + i % 60)) for i in range(160)]
    path.write_text("\n\n".join(paragraphs))
    return path


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of random weights, with positions for a row and not a token more."""
    return save_pretrained(tmp_path_factory.mktemp("scorer"), "gpt2", n_positions=SEQ_LEN)


def of_text(text: Path, *overrides: str) -> tuple[Config, Corpus]:
    return prepared(*RUN, f"data.path={text}", f"data.cache_dir={text.parent}/cache", *overrides)


def prepared(*overrides: str) -> tuple[Config, Corpus]:
    config = check(compose([*overrides, BY]))
    return config, build_corpus(config)


def train(text: Path, folder: Path, *overrides: str) -> Ended:
    cache = f"data.cache_dir={text.parent}/cache"
    return run("train", *RUN, f"data.path={text}", cache, f"run.dir={folder}", *overrides)


def test_rarity_and_compression_by_hand(text: Path) -> None:
    """From the file itself: bytes are tokens, and a window of 32 is followed by the label of its last."""
    config, corpus = of_text(text, "data.curriculum.score=rarity")
    chosen, scores = score_rows(config, corpus)
    written, train = text.read_bytes(), corpus.train
    assert isinstance(chosen, np.ndarray)
    assert sorted(chosen.tolist()) == list(range(len(train)))
    windows = [written[(at := train._locate(0, row)[1]) : at + SEQ_LEN + 1] for row in chosen.tolist()]
    counts = Counter(byte for window in windows for byte in window[1:])
    frequency = {byte: n / (SEQ_LEN * len(windows)) for byte, n in counts.items()}
    by_hand = [-np.mean([np.log(frequency[byte]) for byte in window[1:]]) for window in windows]
    assert scores == pytest.approx(by_hand, rel=1e-5)
    config.data.curriculum.score = "compression"
    _, scores = score_rows(config, corpus)
    assert scores == pytest.approx([len(zlib.compress(window)) / len(window) for window in windows], rel=1e-6)


KINDS = {
    "windows": [],
    "documents kept apart": ["data.sample_by=paragraph", "data.isolate_documents=true"],
    "packed documents": ["data.sample_by=paragraph", "data.isolate_documents=true", "data.packing=first_fit"],
    "a document a row": ["data.sample_by=paragraph", "data.packing=off"],
}


@pytest.mark.parametrize("kind", KINDS)
def test_the_loss_is_that_of_transformers(kind: str, text: Path, model: Path) -> None:
    """Each document by itself, without padding."""
    settings = ["data.curriculum.score=loss", f"data.curriculum.model={model}", *KINDS[kind], "data.curriculum.steps=3"]
    config, corpus = of_text(text, *settings)
    chosen, scores = score_rows(config, corpus)
    assert len(chosen) == 3 * ROWS
    theirs = AutoModelForCausalLM.from_pretrained(model).eval()
    for row, score in zip(chosen.tolist(), scores.tolist(), strict=True):
        batch = corpus.train.read(np.array([[0, row]]))
        borders = batch.get("cu_seqlens", torch.tensor([0, batch["input_ids"].shape[1]])).tolist()
        nll, count = 0.0, 0
        for start, stop in itertools.pairwise(borders):
            labels = batch["labels"][0, start:stop]
            with torch.no_grad():
                logits = theirs(batch["input_ids"][:, start:stop]).logits[0]
            nll += float(cross_entropy(logits, labels, reduction="sum"))
            count += int((labels != -100).sum())
        assert score == pytest.approx(nll / count, rel=1e-4)


def test_pairs_and_conversations_have_scores_too(tmp_path: Path) -> None:
    """Of their learned tokens alone: the loss of a pair is that of both answers; the length counts prompts as well."""
    folder = save_pretrained(tmp_path / "scorer", max_position_embeddings=512)
    cache = f"data.cache_dir={tmp_path}/cache"
    common = [*TINY, cache, "model.max_position_embeddings=512", "data.seq_len=512", f"data.curriculum.model={folder}",
              "trainer.accelerator=cpu", "data.chat_template=zephyr", "data.curriculum.score=loss"]  # fmt: skip
    pairs = write_rows(tmp_path / "pairs.jsonl", "preference_jsonl", 12)
    config, corpus = prepared(*common, "objective=dpo", "data=preference_jsonl", f"data.path={pairs}")
    chosen, scores = score_rows(config, corpus)
    theirs, examples = AutoModelForCausalLM.from_pretrained(folder).eval(), corpus.train.examples  # type: ignore
    for row, score in zip(chosen.tolist(), scores.tolist(), strict=True):
        parts = []
        for ids, learned in (examples.read(2 * row), examples.read(2 * row + 1)):
            with torch.no_grad():
                logp = theirs(torch.from_numpy(ids)[None]).logits[0].log_softmax(-1)
            at = np.flatnonzero(learned)
            parts.append(-logp[at - 1, ids[at]])
        assert score == pytest.approx(float(torch.cat(parts).mean()), rel=1e-4)
    config.data.curriculum.score = "length"
    expected = [sum(examples.lengths[[2 * row, 2 * row + 1]]) for row in chosen.tolist()]
    assert score_rows(config, corpus)[1].tolist() == expected
    chats = write_rows(tmp_path / "chats.jsonl", "chat_jsonl", 12)
    sft = [*common[:-1], "data.curriculum.score=rarity", "data.curriculum.model=null", "objective=sft"]
    config, corpus = prepared(*sft, "data=chat_jsonl", f"data.path={chats}", "data.packing=off")
    chosen, scores = score_rows(config, corpus)
    answers = [ids[learned] for ids, learned in map(corpus.train.examples.read, chosen.tolist())]  # type: ignore
    counts = Counter(np.concatenate(answers).tolist())
    rare = [-np.mean([np.log(counts[token] / counts.total()) for token in answer.tolist()]) for answer in answers]
    assert scores == pytest.approx(rare, rel=1e-5)


@pytest.mark.parametrize("steps", [None, 7])
def test_the_first_rows_come_by_buckets_and_none_is_lost(steps: int | None, text: Path) -> None:
    """All else stays: which rows the curriculum has, what comes after, the second epoch."""
    limit = f"data.curriculum.steps={'null' if steps is None else steps}"
    config, corpus = of_text(text, "data.curriculum.score=rarity", "data.curriculum.buckets=4", limit)
    order_rows(config, corpus)
    easy_first, count = corpus.easy_first, len(corpus.train)
    ordered = count if steps is None else steps * ROWS
    assert easy_first is not None
    assert len(easy_first) == ordered
    sizes = step_sizes(config.data)
    takes: Any = {"sizes": sizes, "seed": config.seed, "max_epochs": 2}
    last = sizes.steps_for(2 * count)
    mine = np.concatenate([rows_of_step(corpus.train, s, **takes, easy_first=easy_first) for s in range(last)])
    plain = np.concatenate([rows_of_step(corpus.train, s, **takes) for s in range(last)])
    assert sorted(mine[:ordered, 1].tolist()) == sorted(plain[:ordered, 1].tolist())
    assert mine[ordered:].tolist() == plain[ordered:].tolist()
    chosen, scores = score_rows(config, corpus)
    score = dict(zip(chosen.tolist(), scores.tolist(), strict=True))
    found = [score[row] for row in mine[:ordered, 1].tolist()]
    edges = [-(-b * ordered // 4) for b in range(5)]
    buckets = [found[a:b] for a, b in itertools.pairwise(edges)]
    assert all(max(one) <= min(next_one) for one, next_one in itertools.pairwise(buckets))
    assert max(map(len, buckets)) - min(map(len, buckets)) <= 1
    place = {row: i for i, row in enumerate(plain[:ordered, 1].tolist())}
    first = [place[row] for row in mine[: edges[1], 1].tolist()]
    assert first == sorted(first), "within a bucket rows come as they would without it"
    assert found != sorted(found)


def test_a_run_goes_on_exactly_and_not_in_another_order(text: Path, tmp_path: Path) -> None:
    """Stopped in the middle of the curriculum. Scores that have become others are noticed."""
    cache = tmp_path / "cache"
    settings = ["data.curriculum={by: difficulty, score: compression, steps: 6, buckets: 3}", "trainer.max_steps=8",
                f"data.cache_dir={cache}"]  # fmt: skip
    folders = [tmp_path / "whole", tmp_path / "parts"]
    assert train(text, folders[0], *settings).code == 0
    assert train(text, folders[1], *settings, *stops_at(4)).code == 75
    kept = next(cache.glob("difficulty-compression-*/scores.npy"))
    scores = np.load(kept)
    np.save(kept, -scores)
    ended = train(text, folders[1], *settings, "run.resume=auto")
    assert ended.code == 2
    assert "data.curriculum (then " in ended.err
    np.save(kept, scores)
    ended = train(text, folders[1], *settings, "run.resume=auto", "data.num_workers=1")
    assert ended.code == 0, ended.err
    assert "score rows" not in ended.err, "they were scored before"
    whole, parts = ([without_times(r) for r in rows(f / "metrics.jsonl") if "train/loss" in r] for f in folders)
    assert whole == parts
    plan = " ".join((folders[0] / "plan.txt").read_text().replace("│", "").split())
    assert "curriculum compression, easy to hard over the first 6 steps, 3 buckets" in plan


def test_prepare_scores_ahead_of_training(text: Path, tmp_path: Path) -> None:
    settings = [*RUN, f"data.path={text}", f"data.cache_dir={tmp_path}/cache", BY, "data.curriculum.score=rarity"]
    done = run("prepare", *settings)
    assert done.code == 0, done.err
    count = len(build_corpus(check(compose(settings))).train)
    assert f"score rows: {count} of {count}" in done.err
    ended = run("train", *settings, f"run.dir={tmp_path}/run", "trainer.max_epochs=1", "trainer.max_steps=null")
    assert ended.code == 0, ended.err
    assert "score rows" not in ended.err
    plan = " ".join((tmp_path / "run" / "plan.txt").read_text().replace("│", "").split())
    steps = -(-count // ROWS)
    assert f"curriculum rarity, easy to hard over the first epoch ({steps} steps), 10 buckets" in plan


def test_scoring_goes_on_where_it_was_interrupted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_numbers, "PART", 4)
    chosen, asked = order.permute(np.arange(19), 19, 0, 0), list[int]()

    def score(rows: np.ndarray) -> np.ndarray:
        asked.extend(rows.tolist())
        if len(asked) == 12 and chosen[0] in asked:  # the first attempt, in its third part
            raise KeyboardInterrupt
        return rows.astype(np.float32) ** 2

    with pytest.raises(KeyboardInterrupt):
        difficulty.scored_once(tmp_path / "scores", chosen, lambda _: score, RowProgress(False))
    assert not (tmp_path / "scores").exists()
    asked.clear()
    for _ in range(2):
        found = difficulty.scored_once(tmp_path / "scores", chosen, lambda _: score, RowProgress(False))
        assert found.tolist() == (chosen.astype(np.float32) ** 2).tolist()
    assert asked == chosen[8:].tolist(), "two parts were there, and all of it the second time"
    assert [p.name for p in tmp_path.iterdir() if p.name != ".locks"] == ["scores"]
    (tmp_path / "scores" / "scores.npy").write_bytes(b"half")
    with pytest.raises(UserError, match=re.escape("scores.npy can't be read")):
        difficulty.scored_once(tmp_path / "scores", chosen, lambda _: score, RowProgress(False))


WRONG = {
    BY: "data.curriculum.by=difficulty needs data.curriculum.score",
    "data.curriculum={by: difficulty, score: hard}": "data.curriculum.score=hard is not known",
    "data.curriculum={by: difficulty, score: loss}":
        "data.curriculum.score=loss with data.curriculum.model=None: the loss, and it alone, needs a model",
    "data.curriculum={by: difficulty, score: rarity, model: gpt2}": "data.curriculum.score=rarity with data.curriculum",
    "data.curriculum={by: difficulty, score: rarity, buckets: 1}": "data.curriculum.buckets=1: at least 2 is needed",
    "data.curriculum={by: difficulty, score: rarity, start_length: 8}": "start_length=8 doesn't go with",
    "data.curriculum={by: difficulty, score: length}": "data.curriculum.score=length: with data.packing=None each row",
    "data=text_mixture data.mixture=[{path: x},{path: y}] data.curriculum={by: difficulty, score: rarity}":
        "data.curriculum.by=difficulty doesn't go with a mixture of text",
    "data.streaming=true data.ring_bytes=1000000000 data.path=x data.curriculum={by: difficulty, score: rarity}":
        "data.curriculum.by=difficulty doesn't go with a stream",
}  # fmt: skip


@pytest.mark.parametrize(("wrong", "said"), WRONG.items())
def test_what_is_wrong_is_said(wrong: str, said: str) -> None:
    with pytest.raises(UserError, match=re.escape(said)):
        check(compose([*RUN, *re.split(" (?=data)", wrong)]))


def test_what_only_data_or_model_can_tell(text: Path, tmp_path: Path) -> None:
    """Too short a run or an epoch, another tokenizer, too few positions: one message each, before training."""
    settings = [BY, "data.curriculum.score=rarity", "trainer.max_steps=5"]
    ended = train(text, tmp_path / "short", *settings, "data.curriculum.steps=6")
    assert message(ended.err).startswith(
        "data.curriculum.by=difficulty: rows come from easy to hard over 6 steps, and the run ends after 5, without "
        "the hardest: set data.curriculum.steps=5 or less"
    )
    ended = train(text, tmp_path / "long", *settings, "data.curriculum.steps=900")
    assert message(ended.err).startswith("data.curriculum.steps=900: the first epoch has ")
    ended = train(text, tmp_path / "no", "data.curriculum.buckets=4", "trainer.max_steps=5")
    assert message(ended.err) == "data.curriculum.buckets has no effect here: set data.curriculum.by=difficulty too"
    scorer = save_pretrained(tmp_path / "scorer", "gpt2", n_positions=SEQ_LEN - 1)
    by_loss = [BY, "data.curriculum.score=loss", f"data.curriculum.model={scorer}", "data.curriculum.steps=2"]
    ended = train(text, tmp_path / "positions", *by_loss, "trainer.max_steps=2")
    assert message(ended.err) == (
        f"data.curriculum.model={scorer} has positions for 31 tokens, and a row has 32: choose another model, or lower "
        f"data.seq_len"
    )
    ended = train(text, tmp_path / "other", *by_loss, "trainer.max_steps=2", "tokenizer=char")
    said = message(ended.err)
    assert said.startswith(f"data.curriculum.model={scorer} has another tokenizer (257 tokens) than this run's, char (")
    assert said.endswith(f"set tokenizer=hub tokenizer.name_or_path={scorer}")
