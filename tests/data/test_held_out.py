"""Validation splits of small data: a larger share is held out, older runs keep theirs, and few rows decide nothing."""

import json
import shutil
from pathlib import Path

import pytest

from inprocess import run
from lmtrain.config.compose import check, compose
from lmtrain.config.fingerprint import short_hash
from lmtrain.data.corpus import Corpus, build_corpus
from lmtrain.data.store import bins
from support import TINY

STEPS = ["trainer.max_steps=3", "trainer.val_check_interval=1", "trainer.save_every_n_steps=1", "run.name=a"]
SPLIT = ["data.path=book.txt", "data.val_fraction=0.02"]


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "book.txt").write_text("".join(f"line number {i} of a book\n" for i in range(400)))
    return tmp_path


def corpus_of(here: Path, *words: str) -> Corpus:
    return build_corpus(check(compose([*TINY, "data=text", f"data.cache_dir={here}/cache", *words])))


def rename_to_earlier(corpus: Corpus) -> None:
    """Turns a prepared folder into one of an earlier version, whose key has no data.min_val_rows."""
    meta = bins.load_meta(corpus.folder)
    del meta["key"]["min_val_rows"]
    bins.save_meta(meta, corpus.folder)
    name = corpus.folder.name.rpartition("-")[0]
    corpus.folder.rename(corpus.folder.with_name(f"{name}-{short_hash(meta['key'])[:12]}"))


def test_folders_of_earlier_versions_are_found_where_the_split_is_the_same(here: Path) -> None:
    (here / "large.txt").write_text("a line of a large book\n" * 20_000)
    large = corpus_of(here, "data.path=large.txt")
    rename_to_earlier(large)
    assert not large.folder.exists()
    assert corpus_of(here, "data.path=large.txt").fingerprint == large.fingerprint
    assert not large.folder.exists(), "found, not prepared again"

    typed = corpus_of(here, *SPLIT)  # holds out 2 % of a small text, as an earlier version did
    now = corpus_of(here, "data.path=book.txt")
    assert typed.val is not None
    assert now.val is not None
    assert len(typed.val) < len(now.val)


def test_a_run_of_an_earlier_version_keeps_its_split(here: Path) -> None:
    """A resumed run without data.min_val_rows in its config.yaml keeps its split, even if its tokens left the cache."""
    words = ["data=text", "data.path=book.txt", *TINY, *STEPS, f"data.cache_dir={here}/cache"]
    assert run("train", *words, "data.min_val_rows=0").code == 0
    saved = here / "outputs/a/config.yaml"
    lines = saved.read_text().splitlines()
    saved.write_text("\n".join(line for line in lines if line != "  min_val_rows: 0") + "\n")
    shutil.rmtree(here / "cache")
    ended = run("train", *words, "trainer.max_steps=4")
    assert ended.code == 0, ended.err
    assert "validation rows are held out as when this run began: data.min_val_rows=0" in " ".join(ended.out.split())
    other = run("train", *words, "trainer.max_steps=5", "data.min_val_rows=20")
    assert other.code == 2
    assert "data.min_val_rows then 0, now 20" in " ".join(other.err.split())


@pytest.mark.parametrize(("few", "best"), [(10, 3), (0, 1)])
def test_scores_of_a_few_rows_decide_nothing(here: Path, few: int, best: int) -> None:
    """With few validation rows the last checkpoint counts as best, although the learning rate worsens each step."""
    (here / "book.txt").write_text("x" * 3000)
    worse = ["optimizer.lr=0.5", "schedule=constant", "schedule.warmup_steps=0", f"checkpoint.min_val_rows={few}"]
    ended = run("train", "data=text", "data.path=book.txt", *TINY, *STEPS, *worse, "checkpoint.keep_last=5")
    assert ended.code == 0, ended.err
    summary = json.loads((here / "outputs/a/summary.json").read_text())
    scores = {row["step"]: row["val/loss"] for row in map(json.loads, (here / "outputs/a/metrics.jsonl").open())
              if "val/loss" in row}  # fmt: skip
    expected = best if few else min(scores, key=scores.__getitem__)
    assert summary["best"] == f"checkpoints/step_{expected:08}"
    assert (here / "outputs/a/checkpoints/best").resolve().name == f"step_{expected:08}"
    assert summary["best_metric"] == {"val/loss": scores[expected]}
    assert ("the last checkpoint is taken for the best" in " ".join(ended.out.replace("│", " ").split())) is bool(few)
