"""Validation splits of small data: a larger share is held out, older runs keep theirs, and few rows decide nothing."""

import json
from pathlib import Path

import pytest

from inprocess import run
from lmtrain.config.compose import check, compose
from lmtrain.data.corpus import Corpus, build_corpus
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
