"""Growing rows and steps: tokens, positions and counts are right, resuming is exact, and mistakes are reported."""

import math
import re
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM

from inprocess import Ended, message, run, stops_at
from lmtrain.callbacks.metrics import without_times
from lmtrain.config.batch import Stages, check_reached, row_lengths, step_sizes
from lmtrain.config.compose import check, compose
from lmtrain.data import order
from lmtrain.data.corpus import build_corpus
from lmtrain.data.loaders import StepDataset
from lmtrain.errors import UserError
from lmtrain.planning.trial import config_of
from lmtrain.run import verify
from support import TINY, rows

SEQ_LEN, ROWS = 32, 6  # as in TINY
LENGTHS = ["data.curriculum.by=length", "data.curriculum.start_length=8", "data.curriculum.steps=5"]
GROWN = Stages((0, 2, 5), (8, 16, 32))  # the length 8 + 24 * step / 5 reaches 16 after 1 2/3 steps
SIZES = ["data.batch_warmup.start_size=2", "data.batch_warmup.steps=3"]
RUN = [*TINY, "data=text", "trainer.limit_val_batches=1", "callbacks.samples.every_n_validations=0",
       "export.enabled=false", "trainer.save_every_n_steps=3"]  # fmt: skip


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns a file of paragraphs of different lengths, each a document with sample_by=paragraph."""
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text("\n\n".join(f"{'abcdefgh' * (1 + i % 9)} number {i} ends" for i in range(300)))
    return path


def train(text: Path, folder: Path, *overrides: str) -> Ended:
    cache = f"data.cache_dir={text.parent}/cache"
    return run("train", *RUN, f"data.path={text}", cache, f"run.dir={folder}", *overrides)


def dataset(text: Path, lengths: Stages | None, *overrides: str, rank: int = 0, world: int = 1) -> Any:
    config = check(compose([*RUN, f"data.path={text}", f"data.cache_dir={text.parent}/cache", *overrides]))
    sizes = step_sizes(config.data)
    return StepDataset(build_corpus(config).train, seed=3, sizes=sizes, micro_batch_size=2, max_epochs=None, rank=rank,
                       world_size=world, lengths=lengths)  # fmt: skip


@pytest.mark.parametrize(("first", "last", "steps"), [(8, 32, 5), (1, 96, 50), (3, 21, 4), (5, 10, 1), (64, 1024, 3)])
def test_stages_are_a_line_rounded_down_to_few_divisors(first: int, last: int, steps: int) -> None:
    stages = Stages.growing(first, last, steps)
    assert all(last % value == 0 and value % first == 0 for value in stages.values)
    assert len(stages.values) <= math.log2(last / first) + 2
    for step in range(steps + 3):
        line = first + Fraction(last - first, steps) * min(step, steps)
        assert stages.at(step) == max(value for value in stages.values if value <= line)
        assert stages.before(step) == sum(stages.at(earlier) for earlier in range(step))
    owners = [step for step in range(steps + 3) for _ in range(stages.at(step))]
    assert [stages.step_of(item) for item in range(len(owners))] == owners
    assert [stages.steps_for(count) for count in range(len(owners) + 1)] == [0, *(owner + 1 for owner in owners)]


def test_short_rows_are_the_tokens_of_the_long_ones(text: Path) -> None:
    """Short rows equal rows rebuilt from the text: bytes, with the end-of-document id after each paragraph."""
    isolate = ["data.isolate_documents=true", "data.sample_by=paragraph"]
    whole = dataset(text, None, *isolate)
    stream = whole.rows.shards[0].read(0, whole.rows.shards[0].tokens).astype(np.int64)
    end = build_corpus(check(compose([*RUN, f"data.path={text}", f"data.cache_dir={text.parent}/cache", *isolate]))
                       ).tokenizer.eos_token_id  # fmt: skip
    begins = np.concatenate([[0], np.flatnonzero(stream == end) + 1])  # first tokens of documents
    grown = dataset(text, GROWN, *isolate)
    for step in range(7):
        length = GROWN.at(step)
        chosen = order.step_rows(step, rows=len(whole.rows), global_batch_size=ROWS, seed=3)
        assert grown[step]["rows"] == whole[step]["rows"], "the same windows make up the step"
        pieces = [(piece, batch) for batch in grown[step]["micro_batches"] for piece in range(len(batch["input_ids"]))]
        assert len(pieces) == ROWS * SEQ_LEN // length
        for number, (piece, batch) in enumerate(pieces):
            _, window = whole.rows._locate(*map(int, chosen[number * length // SEQ_LEN]))
            at = window + number * length % SEQ_LEN + np.arange(length)
            document = begins[np.searchsorted(begins, at, side="right") - 1]
            learned = ~np.isin(at + 1, begins)  # a document's first token is not predicted
            assert batch["input_ids"][piece].tolist() == stream[at].tolist()
            assert batch["labels"][piece].tolist() == np.where(learned, stream[at + 1], -100).tolist()
            assert batch["position_ids"][piece].tolist() == (at - np.maximum(document, at[0])).tolist()
        for batch in grown[step]["micro_batches"]:
            starts = torch.nonzero(batch["position_ids"].flatten() == 0)[:, 0].tolist()
            assert batch["cu_seqlens"].tolist() == [*starts, batch["input_ids"].numel()]


def test_two_ranks_share_the_short_rows(text: Path) -> None:
    alone = dataset(text, GROWN)
    ranks = [dataset(text, GROWN, rank=rank, world=2) for rank in range(2)]
    for step in range(6):
        found = sorted(r for ranked in ranks for b in ranked[step]["micro_batches"] for r in b["input_ids"].tolist())
        assert found == sorted(r for b in alone[step]["micro_batches"] for r in b["input_ids"].tolist())
        assert len({len(ranked[step]["micro_batches"]) for ranked in ranks}) == 1


def test_the_loss_is_that_of_the_short_rows(text: Path, tmp_path: Path) -> None:
    """Losses are those that transformers computes on the short rows; a learning rate of 0 keeps the model unchanged."""
    done = train(text, tmp_path / "run", *LENGTHS, "trainer.max_steps=6", "optimizer.lr=0", "export.enabled=true")
    assert done.code == 0, done.err
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "export").eval()
    items = dataset(text, None)
    items.seed = check(compose(RUN)).seed
    for step, record in enumerate(r for r in rows(tmp_path / "run" / "metrics.jsonl") if "train/loss" in r):
        windows = torch.cat([torch.cat([b["input_ids"], b["labels"][:, -1:]], 1) for b in items[step]["micro_batches"]])
        length, nll = GROWN.at(step), 0.0
        for start in range(0, SEQ_LEN, length):
            piece = windows[:, start : start + length + 1]
            with torch.no_grad():
                logits = model(piece[:, :-1]).logits
            nll += float(cross_entropy(logits.flatten(0, 1), piece[:, 1:].flatten(), reduction="sum"))
        assert record["train/loss"] == pytest.approx(nll / (ROWS * SEQ_LEN), rel=1e-5)


def test_a_run_that_grows_goes_on_exactly(text: Path, tmp_path: Path) -> None:
    """A run stopped at 16-token rows and full-size steps resumes exactly; its tokens are right."""
    grows = [*LENGTHS, *SIZES, "trainer.max_steps=7", "schedule=constant"]
    folders = [tmp_path / "whole", tmp_path / "parts"]
    assert train(text, folders[0], *grows).code == 0
    assert train(text, folders[1], *grows, *stops_at(4)).code == 75
    ended = train(text, folders[1], *grows, "run.resume=auto", "data.num_workers=1")
    assert ended.code == 0, ended.err
    whole, parts = ([without_times(r) for r in rows(f / "metrics.jsonl") if "train/loss" in r] for f in folders)
    assert whole == parts
    assert [r["row_length"] for r in whole] == [8, 8, 16, 16, 16, 32, 32]
    sizes = [2, 2, 2, 6, 6, 6, 6]
    assert [r["step_rows"] for r in whole] == sizes
    assert [r["tokens_seen"] for r in whole] == [32 * sum(sizes[: n + 1]) for n in range(7)]
    assert {r["lr"] for r in whole} == {whole[-1]["lr"]}
    plan = " ".join((folders[0] / "plan.txt").read_text().replace("│", "").split())
    assert "row length 8, 16 from step 2 on, 32 from step 5 on" in plan
    assert "rows a step 2, 6 from step 3 on" in plan
    assert "7 steps = 960 tokens" in plan


def test_growing_steps_take_every_row_once_an_epoch(tmp_path: Path) -> None:
    text = tmp_path / "short.txt"
    text.write_text("".join(f"line {i}\n" for i in range(130)))
    items = dataset(text, None, *SIZES)
    count = len(items.rows)
    steps = step_sizes(check(compose([*RUN, *SIZES])).data).steps_for(count)
    items.max_epochs = 1
    taken = [items.row_ids(step) for step in range(steps + 1)]
    assert [len(chosen) for chosen in taken[:5]] == [2, 2, 2, 6, 6]
    assert len(taken[-2]) > 0
    assert len(taken[-1]) == 0
    assert sorted(np.concatenate(taken)[:, 1].tolist()) == list(range(count))
    done = train(text, tmp_path / "run", *SIZES, "trainer.max_epochs=1", "trainer.max_steps=null")
    assert done.code == 0, done.err
    last = [r for r in rows(tmp_path / "run" / "metrics.jsonl") if "train/loss" in r][-1]
    assert (last["step"], last["tokens_seen"]) == (steps, count * SEQ_LEN)


def test_a_mixture_grows_too(text: Path, tmp_path: Path) -> None:
    """Weights of a mixture hold from their steps on, however many rows the earlier steps had."""
    mixture = f"data.mixture=[{{path: {text}, weight: {{0: 1, 2: 0}}}}, {{path: {text}, weight: {{0: 0, 2: 1}}}}]"
    settings = ["data=mixture", mixture, *SIZES, *LENGTHS, "trainer.max_steps=6"]
    ended = run("train", *RUN, *settings, f"data.cache_dir={text.parent}/cache", f"run.dir={tmp_path}/run")
    assert ended.code == 0, ended.err
    seen = [r for r in rows(tmp_path / "run" / "metrics.jsonl") if "train/loss" in r]
    assert [r["tokens_seen/text.txt"] for r in seen] == [32 * n for n in (2, 4, 4, 4, 4, 4)]
    assert [r["tokens_seen/text.txt#2"] for r in seen] == [32 * n for n in (0, 0, 2, 8, 14, 20)]


WRONG = {
    "data.curriculum.by=length": "data.curriculum.start_length=null does not go with data.curriculum.by=length",
    "data.curriculum.by=size": "data.curriculum.by=size is not known",
    "data.curriculum={by: length, start_length: 8}": "Set data.curriculum.steps=...",
    "data.curriculum={by: length, start_length: 7, steps: 4}":
        "data.curriculum.start_length=7 has to be smaller than data.seq_len=32 and to divide it: set "
        "data.curriculum.start_length=8",
    "data.curriculum={by: length, start_length: 64, steps: 4}": "set data.curriculum.start_length=16",
    "data.curriculum={by: length, start_length: 0, steps: 4}": "data.curriculum.start_length=0: at least 1",
    "data.curriculum={by: length, start_length: 8, end_length: 16, steps: 4}":
        "data.curriculum.end_length=16: rows grow up to data.seq_len=32",
    "data.curriculum={by: length, start_length: 8, steps: 4} data.packing=off":
        "data.packing=off does not go with data.curriculum.by=length",
    "data.batch_warmup.start_size=4 data.batch_warmup.steps=4":
        "data.batch_warmup.start_size=4 has to be smaller than data.global_batch_size=6 and to divide it: set "
        "data.batch_warmup.start_size=3",
    "data.batch_warmup.start_size=2": "Set data.batch_warmup.steps=...",
}  # fmt: skip


@pytest.mark.parametrize(("wrong", "said"), WRONG.items())
def test_what_is_wrong_is_said(wrong: str, said: str) -> None:
    with pytest.raises(UserError, match=re.escape(said)):
        check(compose([*RUN, *re.split(" (?=data)", wrong)]))


def test_a_run_that_ends_before_it_has_grown_up(text: Path, tmp_path: Path) -> None:
    ended = train(text, tmp_path / "run", *LENGTHS, "trainer.max_steps=5")
    assert ended.code == 2
    assert message(ended.err).startswith("data.curriculum.steps=5: the run ends after 5 steps, before that: set data.")
    config = check(compose([*RUN, *SIZES]))
    check_reached(config, 4)
    with pytest.raises(UserError, match=re.escape("data.batch_warmup.steps=3: the run ends after 3 steps")):
        check_reached(config, 3)
    tried = train(text, tmp_path / "try", *LENGTHS, *SIZES, "trainer.fast_dev_run=true")
    assert tried.code == 0, tried.err


def test_a_key_without_its_curriculum(text: Path, tmp_path: Path) -> None:
    ended = train(text, tmp_path / "run", "data.curriculum.steps=3", "trainer.max_steps=3")
    assert message(ended.err) == ("data.curriculum.steps has no effect here: set data.curriculum.by=length too")


def test_trials_have_what_most_of_the_run_has(tmp_path: Path) -> None:
    """Range tests and micro-batch searches use the final row length and step size; `verify` covers all row lengths."""
    config = check(compose([*RUN, *LENGTHS, *SIZES]))
    trial = config_of(config, tmp_path, 4)
    assert row_lengths(trial.data) is None
    assert step_sizes(trial.data) == Stages.constant(ROWS)
    proof = check(compose([*RUN, *LENGTHS, *SIZES, *verify.growing(config)]))
    check_reached(proof, verify.STEPS)
    assert {row_lengths(proof.data).at(step) for step in range(verify.STEPS)} == {8, 16, 32}  # type: ignore[union-attr]
