"""data.val_sets and data.val_train_rows: metrics of their own beside val/loss, and refusal of what can't be a set."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM, AutoTokenizer

from chats import write_chats
from inprocess import TWO_STEPS, message, run, train_tiny
from lmtrain.config.compose import check, compose
from lmtrain.data.corpus import build_corpus
from lmtrain.data.val_sets import build_val_sets
from lmtrain.planning import budget
from support import EXPORT, TINY, rows
from tiny_pretrained import save_pretrained

SEQ_LEN = 32
CHATS = [*(o for o in TINY if not o.startswith(("tokenizer=", "model.", "data.seq"))), *TWO_STEPS, "objective=sft",
         "data=chat_jsonl", "data.chat_template=vicuna", "data.seq_len=512", "data.val_fraction=0.2",
         "model=pretrained", "callbacks.samples.every_n_validations=0"]  # fmt: skip


@pytest.fixture
def texts(tmp_path: Path) -> dict[str, Path]:
    files = {"wiki": tmp_path / "wiki.txt", "code": tmp_path / "code.jsonl"}
    files["wiki"].write_text("Anarchism is a political philosophy and movement. " * 30)
    lines = [json.dumps({"text": f"def add{i}(a, b):\n    return a + b + {i}\n"}) for i in range(20)]
    files["code"].write_text("\n".join(lines))
    return files


def windows(ids: list[int]) -> torch.Tensor:
    """Returns all rows of SEQ_LEN + 1 tokens; neighboring rows share one token."""
    count = (len(ids) - 1) // SEQ_LEN
    return torch.tensor([ids[i * SEQ_LEN : (i + 1) * SEQ_LEN + 1] for i in range(count)])


def plain_loss(model: torch.nn.Module, block: torch.Tensor) -> float:
    with torch.no_grad():
        logits = model(block[:, :-1]).logits
    return float(cross_entropy(logits.flatten(0, 1), block[:, 1:].flatten()))


def test_a_set_is_used_completely_beside_deduplicated_training_text(corpus: Path, tmp_path: Path) -> None:
    (tmp_path / "again.txt").write_text("the same line of some words\n" * 100)
    words = [*TINY, "data=text", f"data.path={corpus}", "data.sample_by=line", "data.dedup=exact",
             f"data.val_sets={{again: {{path: {tmp_path}/again.txt}}}}", "trainer.accelerator=cpu"]  # fmt: skip
    config = check(compose([*words, "budget.minutes=1"]))
    prepared = build_corpus(config)
    found = build_val_sets(config, prepared)["again"].rows
    ids = [*prepared.tokenizer("the same line of some words")["input_ids"], prepared.tokenizer.eos_token_id]
    assert len(found) == len(windows(ids * 100))
    # The time of a validation that a budget expects is that of all sets.
    config.trainer.limit_val_batches = None
    assert prepared.val is not None
    rows_of_all = len(prepared.val) + len(found)
    assert budget._validation(config, prepared, 1.0) == pytest.approx(0.4 * rows_of_all / config.data.global_batch_size)


def test_each_set_has_the_loss_of_a_plain_loop(corpus: Path, texts: dict[str, Path], tmp_path: Path) -> None:
    sets = f"data.val_sets={{wiki: {{path: {texts['wiki']}}}, code: {{path: {texts['code']}}}}}"
    words = ["trainer.limit_val_batches=null", "data.val_fraction=0.2", "data.val_train_rows=10"]
    ended = train_tiny(corpus, sets, *words, "checkpoint.monitor=val/code/perplexity", f"run.dir={tmp_path / 'run'}",
                       EXPORT, "optimizer.lr=0.01", "trainer.max_steps=4")  # fmt: skip
    assert ended.code == 0, ended.err
    last = [r for r in rows(tmp_path / "run/metrics.jsonl") if "val/loss" in r][-1]
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "run/export")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "run/export")
    documents = {"wiki": [texts["wiki"].read_text()],
                 "code": [json.loads(line)["text"] for line in texts["code"].read_text().splitlines()]}  # fmt: skip
    for name, found in documents.items():
        ids = [i for text in found for i in [*tokenizer(text)["input_ids"], tokenizer.eos_token_id]]
        loss = plain_loss(model, windows(ids))
        assert last[f"val/{name}/loss"] == pytest.approx(loss, abs=1e-5)
        assert last[f"val/{name}/perplexity"] == pytest.approx(math.exp(loss), rel=1e-5)
        size = sum(len(text.encode()) for text in found)
        assert last[f"val/{name}/bits_per_byte"] == pytest.approx(loss / math.log(2) * len(ids) / size, rel=1e-3)
    assert 0 < last["val/train_rows/loss"] < last["val/wiki/loss"]  # the model was trained on these rows
    summary = json.loads((tmp_path / "run/summary.json").read_text())
    assert summary["best_metric"] == {"val/code/perplexity": last["val/code/perplexity"]}


def test_the_run_and_its_own_loss_do_not_change(corpus: Path, texts: dict[str, Path], tmp_path: Path) -> None:
    sets = [f"data.val_sets={{wiki: {{path: {texts['wiki']}}}}}", "data.val_train_rows=4"]
    for name, words in (("with", sets), ("without", [])):
        assert train_tiny(corpus, *words, f"run.dir={tmp_path / name}").code == 0
    ours, theirs = (rows(tmp_path / name / "metrics.jsonl") for name in ("with", "without"))
    for mine, plain in zip(ours, theirs, strict=True):
        for key in ("train/loss", "grad_norm", "val/loss", "val/perplexity", "rows"):
            assert mine.get(key) == plain.get(key)


@pytest.mark.parametrize("packing", ["off", "best_fit_decreasing"])
def test_a_set_is_laid_out_like_the_validation_split(packing: str, texts: dict[str, Path], tmp_path: Path) -> None:
    file = tmp_path / "repeats.jsonl"
    file.write_text("".join(json.dumps({"text": f"text {n % 5} " * (n % 5 + 1)}) + "\n" for n in range(20)))
    c = check(compose([
        "data=jsonl", f"data.path={texts['code']}", "tokenizer=bytes", f"data.seq_len={SEQ_LEN}",
        f"data.val_path={file}", f"data.packing={packing}", "data.dedup=exact",
        f"data.val_sets={{same: {{path: {file}}}}}"]))  # fmt: skip
    corpus = build_corpus(c)
    found = build_val_sets(c, corpus)["same"].rows
    assert corpus.val is not None
    every = np.array([(0, row) for row in range(len(corpus.val))])
    ours, theirs = found.read(every), corpus.val.read(every)
    assert len(found) == len(corpus.val)  # all documents, although data.dedup leaves repeats out of training
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


@pytest.mark.slow
def test_characters_of_a_set_that_the_tokenizer_lacks_are_in_the_plan(corpus: Path, tmp_path: Path) -> None:
    (tmp_path / "other.txt").write_text("ä line ö " * 40)
    words = [word for word in TINY if not word.startswith("tokenizer=")]
    ended = run("train", *words, "tokenizer=char", f"data.path={corpus}", "data.val_fraction=0.1",
                f"data.val_sets={{other: {{path: {tmp_path / 'other.txt'}}}}}", "trainer.max_steps=1",
                f"run.dir={tmp_path / 'run'}")  # fmt: skip
    assert ended.code == 0, ended.err
    plan = " ".join((tmp_path / "run/plan.txt").read_text().replace("│", " ").split())
    assert "data.val_sets.other: 80 tokens stand for characters that the tokenizer lacks" in plan
    assert "data.dedup" not in plan


def test_training_rows_are_the_same_ones_whatever_the_micro_batch(corpus: Path, tmp_path: Path) -> None:
    for size in (1, 3):
        words = ["data.val_train_rows=7", f"data.micro_batch_size={size}", "trainer.limit_val_batches=null"]
        assert train_tiny(corpus, *words, f"run.dir={tmp_path / str(size)}").code == 0
    one, three = ([r["val/train_rows/loss"] for r in rows(tmp_path / n / "metrics.jsonl") if "val/loss" in r]
                  for n in ("1", "3"))  # fmt: skip
    assert one == pytest.approx(three, abs=1e-5)
    assert len(np.unique(one)) == 2


def test_sets_of_conversations(tmp_path: Path) -> None:
    base = save_pretrained(tmp_path / "base", max_position_embeddings=512)
    train, other = (write_chats(tmp_path / f"{name}.jsonl", 30) for name in ("train", "other"))
    ended = run("train", *CHATS, f"model.name_or_path={base}", f"data.path={train}", f"run.dir={tmp_path / 'run'}",
                f"data.val_sets={{other: {{path: {other}}}, again: {{path: {train}}}}}")  # fmt: skip
    assert ended.code == 0, ended.err
    last = [r for r in rows(tmp_path / "run/metrics.jsonl") if "val/loss" in r][-1]
    assert last["val/other/loss"] == last["val/again/loss"] > 0


@pytest.mark.parametrize(("sets", "words"), [
    ("{wiki: {path: missing.txt}}", "data.val_sets.wiki: "),
    ("{wiki: {pth: a.txt}}", "name its data"),
    ("{wiki: {path: WIKI, split_: x}}", "data.val_sets.wiki.split_ is not known; did you mean split?"),
    ("{train_rows: {path: WIKI}}", "other than train_rows"),
    ("{wiki: WIKI}", "name its data"),
    ("{empty: {path: EMPTY}}", "data.val_sets.empty: "),
])  # fmt: skip
def test_what_can_be_no_set(sets: str, words: str, corpus: Path, texts: dict[str, Path], tmp_path: Path) -> None:
    (tmp_path / "empty.txt").write_text("")
    sets = sets.replace("WIKI", str(texts["wiki"])).replace("EMPTY", str(tmp_path / "empty.txt"))
    ended = train_tiny(corpus, f"data.val_sets={sets}", f"run.dir={tmp_path / 'run'}")
    assert ended.code == 2
    assert words in message(ended.err)
    assert not (tmp_path / "run").exists()


def test_a_monitor_of_no_set_is_refused_with_those_there_are(
    corpus: Path, texts: dict[str, Path], tmp_path: Path
) -> None:
    sets = f"data.val_sets={{wiki: {{path: {texts['wiki']}}}}}"
    for words in (["checkpoint.monitor=val/wikki/loss"], ["data.val_fraction=0"]):  # the second gives no val/loss
        ended = train_tiny(corpus, sets, *words, f"run.dir={tmp_path / 'run'}")
        assert ended.code == 2
        assert "val/wiki/loss, val/wiki/perplexity" in message(ended.err)


@pytest.mark.slow
def test_two_ranks_report_the_numbers_of_one(corpus: Path, texts: dict[str, Path], tmp_path: Path) -> None:
    sets = [f"data.val_sets={{wiki: {{path: {texts['wiki']}}}, code: {{path: {texts['code']}}}}}"]
    words = [*sets, "data.val_train_rows=5", "trainer.limit_val_batches=null", "trainer.accelerator=cpu"]
    for devices in (1, 2):
        place = [f"trainer.devices={devices}", "data.micro_batch_size=3", f"run.dir={tmp_path / str(devices)}"]
        assert train_tiny(corpus, *words, *place).code == 0
    one, two = (rows(tmp_path / n / "metrics.jsonl") for n in ("1", "2"))
    for mine, other in zip(one, two, strict=True):
        for key in (k for k in mine if k.startswith("val/")):
            assert mine[key] == pytest.approx(other[key], rel=1e-4), key
    assert "val/code/loss" in one[-1]
