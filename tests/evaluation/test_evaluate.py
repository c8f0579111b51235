"""`lmtrain.evaluate` equals a plain transformers loop and a run's own validation; invalid settings are refused."""

import io
import json
import math
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console
from transformers import AutoModelForCausalLM, AutoTokenizer

from chats import write_chats, write_rows
from inprocess import message, run, train_tiny
from lmtrain.config import compose as rules
from lmtrain.evaluation.results import Evaluated, Results, Scores, _label, interval
from lmtrain.evaluation.scoring import negative_log_likelihoods, window_sizes, windows
from lmtrain.models.language_model import LanguageModel
from support import EXPORT, REPO, TINY, rows
from tiny_pretrained import save_pretrained

HUB = Path(os.environ.get("LMTRAIN_TEST_HUB", REPO.parent / "shared" / "hub"))
CHAT = [*TINY, "data.chat_template=vicuna", "data.seq_len=512", "data.val_fraction=0.3", "trainer.max_steps=3",
        "trainer.val_check_interval=null", "trainer.limit_val_batches=null", "optimizer.lr=0.01", "peft=none",
        "schedule.warmup_steps=0", "callbacks.samples.every_n_validations=0", "model=pretrained"]  # fmt: skip


def plain_loop(model: Any, documents: list[list[int]], start: list[int], context: int, stride: int) -> list[float]:
    """Returns each document's negative log-likelihood over sliding windows, as in transformers' perplexity guide."""
    found = []
    for document in documents:
        ids, nll, done = torch.tensor([start + document]), 0.0, 0
        for begin in range(0, ids.shape[1], stride):
            end = min(begin + context, ids.shape[1])
            labels = ids[:, begin:end].clone()
            labels[:, : -(end - done)] = -100
            with torch.no_grad():
                scored = int((labels[:, 1:] != -100).sum())
                nll += float(model(ids[:, begin:end], labels=labels).loss) * scored if scored else 0.0
            done = end
            if end == ids.shape[1]:
                break
        found.append(nll)
    return found


def evaluate(*argv: str) -> dict[str, Any]:
    ended = run("evaluate", *argv)
    assert ended.code == 0, ended.err
    return json.loads(Path(ended.out.split("written: ")[1].strip()).read_text())


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Writes documents that are between one token and several windows long."""
    folder = tmp_path_factory.mktemp("texts")
    for i, length in enumerate((1, 2, 31, 32, 33, 200, 77)):
        words = " ".join(f"word{(i * 7 + j) % 13}é" for j in range(length))
        (folder / f"{i}.txt").write_text(words[:length])
    return folder


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_pretrained(tmp_path_factory.mktemp("model") / "llama")


@pytest.mark.parametrize(("context", "stride", "batch"), [(64, 32, 8), (20, 5, 3), (33, 32, 1)])
def test_text_equals_a_plain_loop(
    texts: Path, model: Path, tmp_path: Path, context: int, stride: int, batch: int
) -> None:
    sizes = [f"evaluate.context={context}", f"evaluate.stride={stride}", f"evaluate.batch_size={batch}"]
    found = evaluate(f"run_dir={model}", "data=text", f"data.val_path={texts}", *sizes, f"evaluate.dir={tmp_path}")
    tokenizer, documents = AutoTokenizer.from_pretrained(model), []
    for file in sorted(texts.iterdir()):
        documents.append(tokenizer(file.read_text(), add_special_tokens=False)["input_ids"])
    start = [tokenizer.bos_token_id if tokenizer.bos_token_id is not None else tokenizer.eos_token_id]
    nll = plain_loop(AutoModelForCausalLM.from_pretrained(model), documents, start, context, stride)
    tokens, size = sum(map(len, documents)), sum(f.stat().st_size for f in texts.iterdir())
    assert found["scores"]["loss"] == pytest.approx(sum(nll) / tokens, abs=1e-5)
    assert found["scores"]["perplexity"] == pytest.approx(math.exp(sum(nll) / tokens), rel=1e-5)
    assert found["scores"]["bits_per_byte"] == pytest.approx(sum(nll) / math.log(2) / size, abs=1e-5)
    assert (found["data"]["documents"], found["data"]["tokens"], found["data"]["bytes"]) == (7, tokens, size)
    lines = rows(next(tmp_path.glob("*.rows.jsonl")))
    assert [line["nll"] for line in lines] == pytest.approx(nll, abs=1e-3)


def test_bins_without_a_tokenizer_have_no_bytes(tmp_path: Path) -> None:
    """The text that stands for such tokens is their ids in decimal."""
    for split in ("train", "val"):
        np.arange(600, dtype=np.uint16).tofile(tmp_path / f"{split}.bin")
    tiny = [word for word in TINY if not word.startswith("tokenizer=")]
    words = ["data=bins", f"data.path={tmp_path}", "tokenizer=bpe", "trainer.max_steps=2"]
    assert run("train", *tiny, *words, f"run.dir={tmp_path / 'run'}").code == 0
    found = evaluate(f"run_dir={tmp_path / 'run'}")
    assert found["scores"]["loss"] == pytest.approx(math.log(600), abs=0.3)
    assert found["data"]["tokens"] == 599
    assert "bits_per_byte" not in found["scores"]
    assert "bytes" not in found["data"]


@pytest.mark.skipif(not HUB.is_dir(), reason=f"{HUB} is absent: no real model and wikitext here")
def test_a_real_model_on_wikitext(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "hf")
    model, repository = HUB / "models/karpathy/stories260K", HUB / "datasets/Salesforce/wikitext"
    named = ["data=wikitext", f"data.name={repository}", "data.config_name=wikitext-2-raw-v1", "data.val_split=test"]
    found = evaluate(
        f"run_dir={model}", *named, "evaluate.limit=1", "evaluate.batch_size=16", f"evaluate.dir={tmp_path}"
    )
    table = datasets.load_dataset("parquet", data_files=str(repository / "wikitext-2-raw-v1/test*.parquet"))["train"]
    articles: list[str] = []
    for line in table["text"]:  # an article begins with a heading between single equals signs
        if line.startswith(" = ") and not line.startswith(" = ="):
            articles.append("")
        if articles:
            articles[-1] += line
    tokenizer = AutoTokenizer.from_pretrained(model)
    documents = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in articles[:1]]
    tokens = sum(map(len, documents))
    assert found["data"]["tokens"] == tokens
    used = found["settings"]
    nll = plain_loop(AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32), documents,
                     used["start_token"], used["context"], used["stride"])  # fmt: skip
    assert found["scores"]["loss"] == pytest.approx(sum(nll) / tokens, abs=1e-5)


def test_every_token_is_scored_once_and_sees_enough() -> None:
    for length, context, stride in ((1, 8, 4), (8, 8, 4), (9, 8, 7), (100, 8, 1), (23, 10, 3)):
        ids, seen = np.arange(length), []
        for window in windows(ids, 0, context, stride):
            at = window.ids[window.scored]
            assert len(window.ids) <= context
            assert not window.scored[0]
            assert all(t - window.ids[0] >= min(t, context - stride) for t in at)
            seen += at.tolist()
        assert seen == list(range(1, length))


def test_a_run_on_its_own_split_and_against_another(corpus: Path, tmp_path: Path) -> None:
    whole = ["trainer.limit_val_batches=null", "data.val_fraction=0.2"]
    for name, rate in (("a", "0.01"), ("b", "0.001")):
        assert train_tiny(corpus, EXPORT, *whole, f"optimizer.lr={rate}", f"run.dir={tmp_path / name}").code == 0
    found = evaluate(f"run_dir={tmp_path / 'a'}", f"evaluate.against={tmp_path / 'b' / 'export'}")
    file = tmp_path / "a/evaluations/step_00000002-val.json"
    assert json.loads(file.read_text()) == found
    assert found["data"]["documents"] == 4  # every fifth of twenty documents
    other = found["against"]["scores"]["loss"]
    difference = found["difference"]["loss"]
    assert difference["value"] == pytest.approx(found["scores"]["loss"] - other)
    assert difference["low"] <= difference["value"] <= difference["high"]
    assert found["model"]["weights_sha256"] != found["against"]["model"]["weights_sha256"]
    assert found["settings"]["context"] == 32  # the run's data.seq_len


def test_conversations_and_pairs_equal_the_runs_own_validation(tmp_path: Path) -> None:
    base = save_pretrained(tmp_path / "base", max_position_embeddings=512)
    files = {"sft": write_chats(tmp_path / "c.jsonl", 30), "dpo": write_rows(tmp_path / "p.jsonl", "preference_jsonl")}
    for name, file in files.items():
        option = {"sft": "chat_jsonl", "dpo": "preference_jsonl"}[name]
        common = [o for o in CHAT if not o.startswith(("tokenizer=", "model.h", "model.num", "model.max"))]
        ended = run("train", *common, f"model.name_or_path={base}", f"objective={name}", f"data={option}",
                    f"data.path={file}", f"run.dir={tmp_path / name}")  # fmt: skip
        assert ended.code == 0, ended.err
    last = {name: [r for r in rows(tmp_path / name / "metrics.jsonl") if "val/loss" in r][-1] for name in files}
    found = {name: evaluate(f"run_dir={tmp_path / name}", "evaluate.answers=4", "evaluate.max_new_tokens=8",
                            "evaluate.batch_size=3") for name in files}  # fmt: skip
    assert found["sft"]["scores"]["loss"] == pytest.approx(last["sft"]["val/loss"], abs=1e-5)
    assert {"exact_match", "bleu", "rouge"} <= set(found["sft"]["scores"])
    assert found["sft"]["data"]["answers"] == 4
    assert found["dpo"]["scores"]["loss"] == pytest.approx(last["dpo"]["val/loss"], abs=1e-5)
    for ours, theirs in (("accuracy", "accuracy"), ("margin", "margin"), ("chosen_reward", "chosen")):
        assert found["dpo"]["scores"][ours] == pytest.approx(last["dpo"][f"val/rewards/{theirs}"], abs=1e-5)
    named = ["data=preference_jsonl", f"data.path={files['dpo']}", "data.chat_template=vicuna"]
    refused = run("evaluate", f"run_dir={base}", *named)
    assert refused.code == 2
    assert "objective=dpo" in message(refused.err)


def test_an_answer_stands_beside_its_own_conversation(tmp_path: Path) -> None:
    base = save_pretrained(tmp_path / "base", max_position_embeddings=512)
    answers = ["No. " * 60, "One.", "Two and", "Three and more."]
    lines = [{"messages": [{"role": "user", "content": f"Question {n}?"}, {"role": "assistant", "content": answer}]}
             for n, answer in enumerate(answers)]  # fmt: skip
    file = tmp_path / "c.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    named = [f"run_dir={base}", "data=chat_jsonl", f"data.path={file}", "data.chat_template=zephyr",
             "data.max_length=120", "data.on_too_long=split", f"evaluate.dir={tmp_path}"]  # fmt: skip
    short = ["evaluate.max_new_tokens=4", "evaluate.metrics=[exact_match]"]
    for more, asked in (([], [0, 3, 4, 5]), (["evaluate.answers=2"], [0, 3]), (["evaluate.limit=4"], [0, 3])):
        assert evaluate(*named, *short, *more)["data"]["answers"] == len(asked)
        scored = rows(tmp_path / "base-c.jsonl.rows.jsonl")
        assert [n for n, row in enumerate(scored) if "answer" in row] == asked
        known = json.loads((tmp_path / "base-c.jsonl.json").read_text())["data"]
        assert known["examples of conversations"] == len(scored)
        assert "conversations" not in known
        for row, number in zip(asked, range(4), strict=False):
            assert scored[row]["prompt"] == f"Question {number}?"
            assert scored[row]["answers"] == 1
            if number:  # the answer's bytes and the end of the turn
                assert scored[row]["tokens"] == len(answers[number]) + 1


def test_models_that_leave_out_different_rows_are_not_compared_row_by_row(tmp_path: Path) -> None:
    """One model's template writes questions twice and the other's answers, so each drops another row as too long."""
    models = {}
    for name, doubled in (("a", "user"), ("b", "assistant")):
        models[name] = save_pretrained(tmp_path / name, max_position_embeddings=512)
        tokenizer = AutoTokenizer.from_pretrained(models[name])
        tokenizer.chat_template = (
            "{% for m in messages %}{% set text = m.content * (2 if m.role == '" + doubled + "' else 1) %}"
            "{% if m.role == 'user' %}{{ text }}{% else %}{% generation %}{{ text + eos_token }}{% endgeneration %}"
            "{% endif %}{% endfor %}"
        )
        tokenizer.save_pretrained(models[name])
    texts = [("q" * 30, "a"), ("q", "a" * 30), ("q", "a")]
    turns = [[{"role": "user", "content": q}, {"role": "assistant", "content": a}] for q, a in texts]
    file = tmp_path / "c.jsonl"
    file.write_text("".join(json.dumps({"messages": messages}) + "\n" for messages in turns))
    named = [f"run_dir={models['a']}", f"evaluate.against={models['b']}", "data=chat_jsonl", f"data.path={file}",
             "data.on_too_long=drop", f"evaluate.dir={tmp_path}", "evaluate.answers=0"]  # fmt: skip
    refused = run("evaluate", *named, "data.max_length=50")
    assert refused.code == 2, refused.err
    assert "which of their rows belong together" in message(refused.err)
    assert "difference" in evaluate(*named, "data.max_length=100")
    assert len(rows(tmp_path / "a-c.jsonl-2.rows.jsonl")) == 3  # beside the scores of a alone


def test_results_of_another_evaluation_are_kept(tmp_path: Path) -> None:
    """Files of one name in two folders, two models of one folder name, and a comparison have files of their own."""

    def written(name: str, data: str, against: str | None = None, folder: Path | None = None) -> str:
        scored = Evaluated(Scores({"nll": np.ones(2), "n": np.ones(2)}, {"loss": ("nll", "n")}), {"documents": 2}, {})
        who = [SimpleNamespace(name=n, label="export", folder=folder, tokenizer=SimpleNamespace(get_vocab=dict),
                               identity=lambda n=n: {"name": n, "checkpoint": "export"})
               for n in (name, against) if n is not None]  # fmt: skip
        config = rules.check(rules.compose(["evaluate.resamples=10", *([f"evaluate.dir={tmp_path}"] * (not folder))]))
        models: Any = [(one, scored) for one in who]
        return Results(config, f"all of {data}", models).write().name

    (tmp_path / "export-test.txt-3.json").write_text("[]")
    wanted = {("a", "x/test.txt", None): "", ("a", "y/test.txt", None): "-2", ("b", "x/test.txt", None): "-4",
              ("a", "x/test.txt", "b"): "-5"}  # fmt: skip
    for _ in range(2):
        assert {key: written(*key) for key in wanted} == {k: f"export-test.txt{n}.json" for k, n in wanted.items()}
    for name in ("outputs/a", "moved/a"):
        assert written(name, "x/test.txt", folder=tmp_path / "run") == "export-test.txt.json"


def test_the_bootstrap_covers_what_it_should() -> None:
    """In 95 % of samples, the interval of a mean holds the true mean (here: at least 88 of 100)."""
    generator = np.random.default_rng(0)
    hits = 0
    for seed in range(100):
        values = generator.normal(3.0, 1.0, 60)
        found = interval(Scores({"x": values, "n": np.ones(60)}, {"mean": ("x", "n")}), "mean", 300, seed)
        hits += found.low <= 3.0 <= found.high
    assert 88 <= hits <= 100


@pytest.mark.parametrize("documents", [1, 2])
def test_one_document_has_no_interval(documents: int) -> None:
    """Drawing from one document gives that document each time, an interval of no width."""

    def one(nll: float) -> tuple[Any, Evaluated]:
        columns = {"nll": np.full(documents, nll), "tokens": np.full(documents, 10.0)}
        tokenizer = SimpleNamespace(get_vocab=dict)
        who = SimpleNamespace(name="a", label="a", tokenizer=tokenizer, identity=dict)
        return who, Evaluated(Scores(columns, {"loss": ("nll", "tokens")}), {"documents": documents}, {})

    two = Results(rules.check(rules.compose([])), "all of a.txt", [one(30.0), one(29.0)])
    for results in (two, Results(two.config, two.words, two.models[:1])):
        tree, console = results.as_dict(), Console(width=200, file=io.StringIO())
        with console.capture() as shown:
            console.print(results.table())
        assert ("loss" in tree["intervals_95"]) == (documents > 1)
        assert (" to " in shown.get()) == (documents > 1)
    assert two.as_dict()["difference"]["loss"]["value"] == pytest.approx(0.1)
    assert ("low" in two.as_dict()["difference"]["loss"]) == (documents > 1)


@pytest.mark.parametrize(("words", "name"), [
    ("all of data/a.txt, data/b.txt", "a.txt-b.txt"),
    ("all of data/b.txt", "b.txt"),
    ("all of https://host/a.txt?key=1, https://host/b.txt?key=2", "a.txt-b.txt"),
    ("Salesforce/wikitext, split validation", "wikitext-split-validation"),
    ("validation split of the run", "val"),
    ("tasks hellaswag, arc_easy", "tasks-hellaswag-arc_easy"),
])  # fmt: skip
def test_results_are_named_after_all_files(words: str, name: str) -> None:
    assert _label(words) == name


@pytest.mark.parametrize(("argv", "words"), [
    (["evaluate.stride=64", "evaluate.context=64", "data=text", "data.val_path={texts}"], "less than evaluate.context"),
    (["evaluate.context=100", "data=text", "data.val_path={texts}"], "has positions for 64 tokens"),
    ([], "evaluate on what?"),
])  # fmt: skip
def test_what_cannot_be_is_refused(argv: list[str], words: str, model: Path, texts: Path) -> None:
    ended = run("evaluate", f"run_dir={model}", *(word.format(texts=texts) for word in argv))
    assert ended.code == 2
    assert words in message(ended.err)


@pytest.mark.parametrize(("given", "sizes"), [
    ([], (64, 32)),
    (["evaluate.context=40"], (40, 20)),
    (["evaluate.context=41"], (41, 20)),
    (["evaluate.stride=7"], (64, 7)),
    (["evaluate.context=64", "evaluate.stride=63"], (64, 63)),
])  # fmt: skip
def test_half_a_context_is_the_default_stride(given: list[str], sizes: tuple[int, int], model: Path) -> None:
    who = SimpleNamespace(name="it", own=None, model=SimpleNamespace(model=AutoModelForCausalLM.from_pretrained(model)))
    assert window_sizes(who, rules.check(rules.compose(given))) == sizes


def test_one_device_scores_all_windows_and_several_their_parts(model: Path) -> None:
    wrapped = LanguageModel(AutoModelForCausalLM.from_pretrained(model).eval())
    ids = [np.arange(length) * 7 % 200 for length in (5, 30, 12, 9, 21)]
    spans = [window for row, some in enumerate(ids) for window in windows(some, row, 16, 8)]
    whole = sorted(negative_log_likelihoods(wrapped, spans, 2))
    parts = [list(negative_log_likelihoods(wrapped, spans, 2, part=(rank, 2))) for rank in range(2)]
    assert all(parts)
    assert sum(tokens for _, _, tokens in whole) == sum(len(some) - 1 for some in ids)
    for ours, theirs in zip(sorted([*parts[0], *parts[1]]), whole, strict=True):
        assert ours == (theirs[0], pytest.approx(theirs[1], rel=1e-5), theirs[2])
