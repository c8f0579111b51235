"""Mixtures of text in real runs: counts by weight, exact resuming, one tokenizer, no copies, mistakes reported."""

import json
import re
from pathlib import Path

import numpy as np
import pytest

from inprocess import Ended, message, run, stops_at
from lmtrain.callbacks.metrics import without_times
from lmtrain.config.compose import check, compose
from lmtrain.data.corpus import Corpus, build_corpus
from lmtrain.errors import UserError
from support import TINY, rows

RUN = [*TINY, "data=mixture", "trainer.limit_val_batches=1", "callbacks.samples.every_n_validations=0",
       "export.enabled=false", "trainer.save_every_n_steps=3"]  # fmt: skip


@pytest.fixture
def sources(tmp_path: Path) -> tuple[Path, Path]:
    """Returns a file of lines of letters and a file of rows with digits in a column `body`."""
    letters, digits = tmp_path / "letters.txt", tmp_path / "digits.jsonl"
    letters.write_text("".join(f"{'abcdefgh' * (1 + i % 5)} and so on\n" for i in range(300)))
    digits.write_text("".join(json.dumps({"body": f"{i * 7919} {i * 104729}"}) + "\n" for i in range(500)))
    return letters, digits


def mixing(sources: tuple[Path, Path], first: str = "weight: 3", second: str = "weight: 1") -> str:
    letters, digits = sources
    return f"data.mixture=[{{path: {letters}, {first}}}, {{path: {digits}, text_column: body, {second}}}]"


def train(folder: Path, *overrides: str) -> Ended:
    return run("train", *RUN, f"data.cache_dir={folder.parent}/cache", f"run.dir={folder}", *overrides)


def trained_on(record: dict) -> list[int]:
    """Returns the tokens seen of letters and of digits."""
    return [record[f"tokens_seen/{name}"] for name in ("letters.txt", "digits.jsonl")]


def test_a_run_sees_its_sources_by_weight_and_goes_on_exactly(sources: tuple[Path, Path], tmp_path: Path) -> None:
    """A run stopped at step 3 of 6, with weights that change before and after that step, resumes exactly."""
    mixed = mixing(sources, "weight: {0: 3, 2: 1, 5: 0}", "weight: {0: 1, 5: 2}")
    folders = [tmp_path / "whole", tmp_path / "parts"]
    assert train(folders[0], mixed, "trainer.max_steps=6").code == 0
    assert train(folders[1], mixed, "trainer.max_steps=6", *stops_at(3)).code == 75
    assert train(folders[1], mixed, "trainer.max_steps=6", "run.resume=auto").code == 0
    whole, parts = ([without_times(r) for r in rows(f / "metrics.jsonl") if "train/loss" in r] for f in folders)
    assert whole == parts
    # Letters get 9 of the first 12 rows, 9 of the next 18, none of the last 6.
    assert [trained_on(r) for r in whole][1::3] == [[9 * 32, 3 * 32], [18 * 32, 12 * 32]]
    assert trained_on(whole[-1]) == [18 * 32, 18 * 32]
    assert whole[-1]["tokens_seen"] == 36 * 32


def test_other_weights_are_another_run(sources: tuple[Path, Path], tmp_path: Path) -> None:
    first = train(tmp_path / "run", mixing(sources, "weight: {0: 3, 900: 1}"), "trainer.max_steps=1")
    assert first.code == 0
    assert "the weights of step 900 are not reached" in " ".join(first.out.replace("│", "").split())
    again = [tmp_path / "run", mixing(sources, "weight: 2"), "trainer.max_steps=2", "run.resume=auto"]
    refused = train(*again)
    assert refused.code == 2
    assert "data (then sha256:" in message(refused.err)
    assert "data.mixture then [{" in message(refused.err)
    assert train(*again, "run.allow_change=[data]").code == 0
    assert len(list((tmp_path / "cache").glob("letters*"))) == 1, "weights need no other folder"


def corpus_of(tmp_path: Path, *overrides: str) -> Corpus:
    return build_corpus(check(compose([*TINY, f"data.cache_dir={tmp_path}/cache", *overrides])))


def test_a_source_is_prepared_once_for_all_mixtures(sources: tuple[Path, Path], tmp_path: Path) -> None:
    letters, _ = sources
    alone = corpus_of(
        tmp_path, "data=text", f"data.path={letters}", "data.sample_by=document", "data.val_fraction=0.05"
    )
    mixed = corpus_of(tmp_path, "data=mixture", mixing(sources, "format: text, val_fraction: 0.05"))
    assert mixed.folder == alone.folder
    first = mixed.train.read(np.array([[0, 0]]))["input_ids"]
    assert first.tolist() == alone.train.read(np.array([[0, 0]]))["input_ids"].tolist()
    assert mixed.val_bytes_per_token is not None
    assert mixed.val is not None
    assert len(mixed.val) > len(alone.val or ())


@pytest.mark.parametrize("kind", ["char", "bpe"])
def test_a_tokenizer_made_of_text_is_made_of_all_sources(kind: str, sources: tuple[Path, Path], tmp_path: Path) -> None:
    size = ["tokenizer.vocab_size=300"] if kind == "bpe" else []
    corpus = corpus_of(tmp_path, "data=mixture", f"tokenizer={kind}", *size, mixing(sources))
    text = "abcdefgh and so on 0123456789"
    ids = corpus.tokenizer(text)["input_ids"]
    assert corpus.tokenizer.decode(ids) == text
    assert len(ids) < len(text) or kind == "char"
    again = corpus_of(tmp_path, "data=mixture", f"tokenizer={kind}", *size, mixing(sources, "weight: 5"))
    assert again.tokenizer.get_vocab() == corpus.tokenizer.get_vocab()
    assert len(list((tmp_path / "cache").glob("mixture-*"))) == 1


WRONG = {
    "data.mixture=[]": "data.mixture is empty: list sources",
    "data.mixture=[{path: A, wight: 2}]": "data.mixture[0].wight is not known; did you mean weight?",
    "data.mixture=[{weight: 2}]": "data.mixture[0]: give one of path (files), name",
    "data.mixture=[{path: A, name: wikitext}]": "data.mixture[0]: give one of path (files), name",
    "data.mixture=[{path: A, weight: -1}]": "data.mixture[0].weight=-1: a weight is a number from 0 up",
    "data.mixture=[{path: A}, {path: B, weight: {4: 1}}]": "data.mixture[1].weight={4: 1}: say what it is at step 0",
    "data.mixture=[{path: A, weight: {0: 1, x: 2}}]": "'x' is not a step",
    "data.mixture=[{path: A, weight: 0}, {path: B, text_column: body, weight: {0: 1, 3: 0}}]":
        "data.mixture: all weights are 0 from step 3 on",
    "data.mixture=[{path: A, max_epochs: 0}]": "data.mixture[0].max_epochs=0: a number above 0",
    "data.mixture=[{path: A}, {path: nowhere}]": "nowhere: no such file or folder",
    "data.mixture=[{path: A}, {path: B}]": "has no column 'text'",
    "data.mixture=[{path: SHORT, val_fraction: 0}]": "data.mixture, short.txt (",
}  # fmt: skip


@pytest.mark.parametrize(("wrong", "said"), WRONG.items())
def test_what_is_wrong_is_said(wrong: str, said: str, sources: tuple[Path, Path], tmp_path: Path) -> None:
    (tmp_path / "short.txt").write_text("too short")
    for name, path in zip(("A", "B", "SHORT"), (*sources, tmp_path / "short.txt"), strict=True):
        wrong = wrong.replace(f"path: {name}", f"path: {path}")
    with pytest.raises(UserError, match=re.escape(said)):
        corpus_of(tmp_path, "data=mixture", wrong)


def test_a_mixture_that_ends_before_the_run(sources: tuple[Path, Path], tmp_path: Path) -> None:
    mixed = mixing(sources, "max_epochs: 0.01", "weight: 0")
    ended = train(tmp_path / "run", mixed, "trainer.max_steps=2")
    assert "every source that has a weight is used up after 0 of 2 steps" in message(ended.err)


def test_bins_of_different_tokenizers_are_not_mixed(sources: tuple[Path, Path], tmp_path: Path) -> None:
    letters, _ = sources
    made = [corpus_of(tmp_path, "data=text", f"data.path={letters}", f"tokenizer={kind}") for kind in ("bytes", "char")]
    mixture = f"data.mixture=[{{path: {made[0].folder}, source: bins}}, {{path: {made[1].folder}, source: bins}}]"
    ended = train(tmp_path / "run", "tokenizer=char", mixture, "trainer.max_steps=2")
    assert "has another tokenizer than" in message(ended.err)
