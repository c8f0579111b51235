"""The plan states what will be computed, also where that differs from the request."""

import json
import math
import re
from pathlib import Path

import pytest

import lmtrain
from inprocess import train_tiny
from lmtrain.callbacks.time_budget import for_budget
from lmtrain.config import compose as rules
from lmtrain.run.advice import advice, for_repeats
from lmtrain.run.data import out_of_epochs


def test_a_cpu_has_no_16_mixed(corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    quick = ["trainer.max_steps=1", "export.enabled=false", "report.enabled=false"]
    assert train_tiny(corpus, "run.name=half", "trainer.precision=16-mixed", *quick).code == 0
    plan = re.sub(r"\s+", " ", (tmp_path / "outputs" / "half" / "plan.txt").read_text())
    assert "16-mixed, computed as bf16-mixed (Lightning has no 16-mixed on a CPU), on 1 x" in plan


def test_a_depth_that_the_text_cannot_feed_is_named_with_the_one_that_it_can(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "book.txt").write_text("".join(f"{n} squared is {n * n}.\n" for n in range(3000)))
    words = ["model=dial", "model.depth=4", "data=text", "data.path=book.txt", "tokenizer=bytes",
             "data.seq_len=64",
             "data.global_batch_size=800", "data.micro_batch_size=8", "trainer.max_steps=2", "trainer.accelerator=cpu",
             "trainer.limit_val_batches=1", "export.enabled=false", "report.enabled=false"]  # fmt: skip
    run = lmtrain.build(lmtrain.compose(["run.name=deep", *words]))
    notes = " ".join(advice(run._run))
    fed = math.floor((1.25 * run._run.corpus.epoch_tokens / (12 * 32**2)) ** (1 / 3))
    assert f"seen 1.6 times, are too many: it will memorize them; model.depth={fed} is what" in notes


def test_the_last_step_of_the_last_epoch_may_be_short(corpus: Path, tmp_path: Path) -> None:
    """Two epochs are two, also where they end in the middle of a step."""
    words = ["trainer.max_steps=null", "trainer.max_epochs=2", "data.global_batch_size=300",
             "data.micro_batch_size=100", "export.enabled=false"]  # fmt: skip
    assert train_tiny(corpus, *words, f"run.dir={tmp_path}/run").code == 0
    plan = re.sub(r"[\s│]+", " ", (tmp_path / "run" / "plan.txt").read_text())
    assert "= 2.00 epochs of" in plan
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    length = re.search(r"length ([\d,]+) steps x ([\d,]+) ", plan)
    assert length is not None
    steps, tokens = (int(text.replace(",", "")) for text in length.groups())
    assert rows[-1]["tokens_seen"] < steps * tokens


def test_further_validation_sets_are_a_validation(corpus: Path, tmp_path: Path) -> None:
    words = ["data.val_fraction=0", f"data.val_sets={{other: {{path: {corpus}/file_00.txt}}}}", "trainer.max_steps=1",
             "checkpoint.monitor=val/other/loss", "export.enabled=false"]  # fmt: skip
    assert train_tiny(corpus, *words, f"run.dir={tmp_path}/run").code == 0
    plan = re.sub(r"[\s│]+", " ", (tmp_path / "run" / "plan.txt").read_text())
    assert "validation of other, every" in plan
    assert "no validation split" not in plan
    assert (tmp_path / "run" / "checkpoints" / "best").is_symlink()


@pytest.mark.parametrize(
    ("words", "epochs", "said"),
    [
        (["experiment=dial"], 3, ""),
        (
            ["experiment=dial", "model.depth=2"],
            9,
            "expect overfitting (less with optimizer.weight_decay=0.56 and model.dropout=0.1; trainer.max_epochs=4",
        ),
        (
            ["experiment=dial", "model.depth=2", "optimizer.weight_decay=0.4"],
            9,
            "9 passes over the training data: expect overfitting (less with model.dropout=0.1; ",
        ),
        (
            ["experiment=dial", "model.depth=2", "optimizer.weight_decay=0.4", "model.dropout=0.1"],
            9,
            "9 epochs over the training data, with optimizer.weight_decay=0.4 and model.dropout=0.1 against memorizing",
        ),
        (
            ["experiment=dial", "model.depth=2", "optimizer.weight_decay=0.4"],
            5,
            "5 epochs over the training data, with optimizer.weight_decay=0.4 against memorizing it",
        ),
        (["model=gpt_nano"], 9, "expect overfitting (trainer.max_epochs=4 ends earlier;"),
    ],
)
def test_many_passes_ask_for_what_helps_the_model_at_hand(words: list[str], epochs: float, said: str) -> None:
    config = rules.check(rules.compose([*words, "data=text", "data.path=book.txt"]))
    notes = " ".join(for_repeats(config, epochs, 1580))
    assert said in notes
    assert bool(notes) is bool(said)


@pytest.mark.parametrize(
    ("words", "steps", "said"),
    [
        (["budget.tokens=1e6"], 30, "budget.tokens=1e+06 chose 30 steps"),
        (["budget.minutes=10"], 30, "budget.minutes=10 chose 30 steps from the measured time"),
        # 15 epochs of 100 rows in steps of 16 rows take 93.75 steps.
        (["budget.minutes=10"], 94, "the data is small for budget.minutes=10: the run ends after 15 passes over it"),
        (["trainer.max_steps=9"], 9, ""),
    ],
)
def test_a_budget_says_what_ends_the_run(words: list[str], steps: int, said: str) -> None:
    config = rules.check(rules.compose(["experiment=dial", "data=text", "data.path=book.txt", *words]))
    config.trainer.max_epochs = 15
    notes = for_budget(config, steps, out_of_epochs(config, steps, range(100)))
    assert said in "".join(notes)
    assert ("passes over it" in "".join(notes)) is ("passes over it" in said)
    assert bool(notes) is bool(said)
