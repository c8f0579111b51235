"""Sampled answers in training: deterministic, ended with the turn, scored against references, no effect on training."""

import json
import os
import random
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from torchmetrics import Metric
from torchmetrics.text import BERTScore
from transformers import AutoTokenizer, BertConfig, BertModel, BertTokenizerFast

from chats import conversation, pair, write_chats
from family_variants import LAYERS, Variant, build, config_of
from inprocess import Ended, message, run
from lmtrain.callbacks.metrics import without_times
from lmtrain.config import compose as rules
from lmtrain.config.schema_data import TokenizerConfig
from lmtrain.data import tokenizers
from lmtrain.data.chat.special_text import AnswerDecoder
from lmtrain.data.chat.templates import end_ids, own_template
from lmtrain.generation.conversation import Talk
from lmtrain.generation.sampling import sample_text, sample_texts
from lmtrain.generation.text_metrics import TextMetrics
from lmtrain.run_folder import trained
from support import EXPORT, REPO, SAMPLES, TINY, Run, rows

CHAT = [*TINY, SAMPLES, "data.chat_template=vicuna", "model.max_position_embeddings=1024", "data.seq_len=512",
        "data.val_fraction=0.2", "trainer.max_steps=3", "trainer.val_check_interval=1", "model.dropout=0.1",
        "callbacks.samples.max_new_tokens=12", "optimizer.lr=0.01", "schedule.warmup_steps=0"]  # fmt: skip
SFT = [*CHAT, "objective=sft", "data=chat_jsonl"]


def test_a_greedy_text_is_that_of_its_prompt_alone() -> None:
    model = build(config_of(Variant("bart", {"decoder_layers": LAYERS})))  # whose positions would count padding
    numbers, prompts = tokenizers.numbers(64), [[5, 6, 7, 8, 9], [10, 11], [12, 13]]
    settings: dict[str, Any] = {"max_new_tokens": 6, "temperature": 0.0, "end_ids": [63]}
    alone = [sample_text(model, numbers, prompt, **settings) for prompt in prompts]
    assert sample_texts(model, numbers, prompts, **settings) == alone


class Length(Metric):
    """A user's own metric: the mean number of characters of answers and of references."""

    def __init__(self, scale: float) -> None:
        super().__init__()
        self.scale = scale
        self.add_state("answers", torch.tensor(0.0), dist_reduce_fx="sum")
        self.add_state("references", torch.tensor(0.0), dist_reduce_fx="sum")

    def update(self, preds: list[str], target: list[str]) -> None:
        self.answers += self.scale * sum(map(len, preds)) / len(preds)
        self.references += self.scale * sum(map(len, target)) / len(target)

    def compute(self) -> dict[str, torch.Tensor]:
        return {"answer": self.answers, "reference": self.references}


OPEN = {"run.allow_target": ["test_answers"]}


@pytest.fixture(scope="module")
def chats(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_chats(tmp_path_factory.mktemp("chats") / "chats.jsonl", 30)


def sft(chats: Path, run_dir: Path, *argv: str) -> Ended:
    return run("train", *SFT, f"data.path={chats}", f"run.dir={run_dir}", *argv)


@pytest.fixture(scope="module")
def whole(chats: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Ended]:
    """Trains a run with all options of samples and scores enabled."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    own = "{_target_: test_answers.Length, scale: 2.0}"
    scores = [f"callbacks.samples.metrics=[bleu,rouge,exact_match,{own}]", "run.allow_target=[test_answers]"]
    monitor = ["checkpoint.monitor=val/rouge", "checkpoint.mode=max", "callbacks.samples.rows=3"]
    stop = ["callbacks.early_stopping.enabled=true", "callbacks.early_stopping.monitor=val/exact_match",
            "callbacks.early_stopping.mode=max"]  # fmt: skip
    asked = ["callbacks.samples.prompts=['how far is Oslo?']", "logger=tensorboard", EXPORT]
    ended = sft(chats, folder, *scores, *monitor, *stop, *asked)
    assert ended.code == 0, ended.err
    return folder, ended


def test_training_is_not_disturbed(whole: tuple[Path, Ended], chats: Path, tmp_path: Path) -> None:
    ended = sft(chats, tmp_path / "run", "callbacks.samples.every_n_validations=0")
    assert ended.code == 0, ended.err
    plain = [without_times(row) for row in rows(tmp_path / "run" / "metrics.jsonl")]
    scores = ("val/bleu", "val/rouge", "val/exact_match", "val/Length_answer", "val/Length_reference")
    found = [without_times(row) for row in rows(whole[0] / "metrics.jsonl")]
    assert [{k: v for k, v in row.items() if k not in scores} for row in found] == plain
    assert all(set(scores) <= row.keys() for row in found if "val/loss" in row)


def test_answers_and_scores_are_those_of_the_saved_weights(whole: tuple[Path, Ended], chats: Path) -> None:
    """Answers can be generated again from the last checkpoint, and their scores equal those computed by hand."""
    folder, _ = whole
    model, tokenizer = trained.load(str(folder), "last", OPEN)
    kept = [row for row in rows(folder / "samples.jsonl") if row["step"] == 3]
    own = {"step", "prompt", "text", "is_answer"}
    assert [set(row) - {"cut_off"} for row in kept] == [own] + [own | {"reference"}] * 3
    assert kept[0]["prompt"] == "how far is Oslo?"
    known = {turn["content"] for i in range(30) for turn in conversation(i)["messages"]}
    for row in kept[1:]:
        assert {row["prompt"], row["reference"]} <= known
        asked = (
            c["messages"][:-1] for c in map(conversation, range(30)) if c["messages"][-1]["content"] == row["reference"]
        )
        given = next(turns for turns in asked if turns[-1]["content"] == row["prompt"])
        ids = tokenizer.apply_chat_template(given, add_generation_prompt=True, tokenize=False)
        stop = end_ids(tokenizer, own_template(tokenizer))
        again = sample_text(model, tokenizer, ids, max_new_tokens=12, temperature=0.0, end_ids=stop)
        assert again == row["text"]
        longer = sample_text(model, tokenizer, ids, max_new_tokens=60, temperature=0.0, end_ids=stop)
        assert row.get("cut_off", False) == (longer != again), "an answer that would have gone on was cut off"
    last = [row for row in rows(folder / "metrics.jsonl") if "val/loss" in row][-1]
    answers, references = [[row[key] for row in kept[1:]] for key in ("text", "reference")]
    exact = sum(a.strip() == r.strip() for a, r in zip(answers, references, strict=True)) / 3
    assert last["val/exact_match"] == pytest.approx(exact)
    assert last["val/Length_answer"] == pytest.approx(2 * sum(map(len, answers)) / 3)
    assert last["val/Length_reference"] == pytest.approx(2 * sum(map(len, references)) / 3)


def test_what_is_shown_and_logged(whole: tuple[Path, Ended]) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    folder, ended = whole
    assert ended.out.count("answer at step ") == 12, "four answers, a line each in a log, at each of three validations"
    assert " | how far is Oslo? | " in ended.out
    events = next(folder.rglob("events.out.*"))
    board = EventAccumulator(str(events.parent)).Reload()
    assert "val/rouge" in board.Tags()["scalars"]
    assert any(tag.startswith("sample/3") for tag in board.Tags()["tensors"])
    best = json.loads((folder / "summary.json").read_text())["best_metric"]
    assert set(best) == {"val/rouge"}


def test_the_export_stops_at_the_end_of_a_turn(whole: tuple[Path, Ended]) -> None:
    folder, _ = whole
    tokenizer = AutoTokenizer.from_pretrained(folder / "export")
    said = json.loads((folder / "export" / "generation_config.json").read_text())["eos_token_id"]
    said = said if isinstance(said, list) else [said]
    assert set(end_ids(tokenizer, own_template(tokenizer))) <= set(said)
    assert tokenizer.chat_template


def test_generate_asks_in_the_chat_template(whole: tuple[Path, Ended]) -> None:
    folder, _ = whole
    ask = [f"run_dir={folder}", "generate.prompt='how far is Oslo?'", "generate.temperature=0",
           "generate.max_new_tokens=12", "generate.checkpoint=last", "run.allow_target=[test_answers]"]  # fmt: skip
    answer = run("generate", *ask)
    assert answer.code == 0, answer.err
    model, tokenizer = trained.load(str(folder), "last", OPEN)
    turn = [{"role": "user", "content": "how far is Oslo?"}]
    text = tokenizer.apply_chat_template(turn, add_generation_prompt=True, tokenize=False)
    stop = end_ids(tokenizer, own_template(tokenizer))
    expected = sample_text(model, tokenizer, text, max_new_tokens=12, temperature=0.0, end_ids=stop)
    assert answer.out == expected + "\n"
    plain = run("generate", *ask, "generate.chat=false")
    assert plain.out.startswith("how far is Oslo?")
    refused = run("generate", f"run_dir={folder}", "generate.chat=true", "run.allow_target=[test_answers]")
    assert "generate.prompt is empty" in message(refused.err)


def test_an_answer_ends_with_its_turn() -> None:
    """For a model that always predicts one token, generation stops at that token if and only if it ends a turn."""
    from transformers import AutoModelForCausalLM, GPT2Config

    from lmtrain.config.schema_data import TokenizerConfig
    from lmtrain.data import tokenizers

    cfg = TokenizerConfig(kind="bytes")
    tokenizer: Any = tokenizers.load_or_train(cfg, lambda _: iter(()), tokenizers.identity(cfg))
    model = AutoModelForCausalLM.from_config(GPT2Config(vocab_size=257, n_embd=8, n_layer=1, n_head=1, n_positions=32))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
        model.transformer.ln_f.bias.fill_(1.0)
        model.transformer.wte.weight[ord("!")] = 1.0
    text = sample_text(model, tokenizer, "hi", max_new_tokens=5, temperature=0.0)
    assert text == "!!!!!"
    assert sample_text(model, tokenizer, "hi", max_new_tokens=5, temperature=0.0, end_ids=[ord("!")]) == "!"
    assert sample_text(model, tokenizer, list(b"hi"), max_new_tokens=5, temperature=0.0, end_ids=[256]) == text


def test_metrics_against_values_worked_out_by_hand() -> None:
    scores = TextMetrics(["bleu", "rouge", "exact_match"]).score(["the cat sat down", " a "], ["the cat sat up", "a"])
    # LCS: 3 of 4 words both ways, and 1 of 1. Matched n-grams: 4/5, 2/3, 1/2 and 0/1.
    assert scores["rouge"] == pytest.approx((0.75 + 1) / 2)
    assert scores["exact_match"] == pytest.approx(0.5)
    assert scores["bleu"] == 0.0
    four = TextMetrics(["bleu"]).score(["a b c d e"], ["a b c d f"])["bleu"]
    assert four == pytest.approx((4 / 5 * 3 / 4 * 2 / 3 * 1 / 2) ** 0.25, rel=1e-5)
    assert TextMetrics([{"_target_": "torchmetrics.text.BLEUScore"}]).names() == ["BLEUScore"]


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (["callbacks.samples.metrics=[blue]"], "did you mean bleu?"),
        (["callbacks.samples.metrics=[{_target_: os.system}]"], "run.allow_target=[os]"),
        (["callbacks.samples.metrics=[{_target_: torchmetrics.text.SQuAD}]"], "SQuAD is not a metric of answers"),
        (["callbacks.samples.metrics=[bleu]", "callbacks.samples.rows=0"], "callbacks.samples.rows"),
        (["callbacks.samples.rows=1000"], "at most 256"),
        (["checkpoint.monitor=val/bleu"], "this run's validations report val/loss"),
        (["checkpoint.monitor=val/bleu", "callbacks.samples.metrics=[bleu]", "callbacks.samples.every_n_validations=2"],
         "every_n_validations=1"),
    ],
)  # fmt: skip
def test_wrong_settings(wrong: list[str], said: str, chats: Path, tmp_path: Path) -> None:
    ended = sft(chats, tmp_path / "run", *wrong)
    assert ended.code == 2
    assert said in message(ended.err)


def test_text_is_compared_with_what_follows_in_the_data(corpus: Path, tmp_path: Path) -> None:
    own = "{_target_: torchmetrics.text.EditDistance, reduction: none}"  # one number per row
    text = [
        f"callbacks.samples.metrics=[bleu,{own}]",
        "callbacks.samples.rows=3",
        "checkpoint.monitor=val/EditDistance",
    ]
    small = ["data=text", f"data.path={corpus}", "trainer.max_steps=2", "trainer.limit_val_batches=1", SAMPLES]
    ended = run("train", *TINY, *small, *text, "callbacks.samples.max_new_tokens=8", f"run.dir={tmp_path}/run")
    assert ended.code == 0, ended.err
    kept = rows(tmp_path / "run" / "samples.jsonl")
    texts = [p.read_text() for p in corpus.glob("*.txt")]
    held_out = {a + b for a in texts for b in texts}  # a row may end one text and begin another
    assert len(kept) == 3
    assert all(any(row["prompt"] + row["reference"] in two for two in held_out) for row in kept)
    distances = [edit_distance(row["text"], row["reference"]) for row in kept]
    last = rows(tmp_path / "run" / "metrics.jsonl")[-1]
    assert last["val/EditDistance"] == pytest.approx(sum(distances) / 3)
    prompted = run("train", *TINY, *small, *text, "callbacks.samples.prompts=[line]", f"run.dir={tmp_path}/other")
    assert prompted.code == 2
    assert "leave one of the two out" in message(prompted.err)


def edit_distance(a: str, b: str) -> int:
    """Returns the Levenshtein distance by its recursion."""
    row = list(range(len(b) + 1))
    for i, x in enumerate(a, 1):
        before, row = row, [i]
        for j, y in enumerate(b, 1):
            row.append(min(before[j] + 1, row[-1] + 1, before[j - 1] + (x != y)))
    return row[-1]


@pytest.mark.parametrize(
    "settings",
    [
        {"_target_": "torchmetrics.text.CHRFScore", "return_sentence_level_score": True},
        {"_target_": "torchmetrics.text.TranslationEditRate", "return_sentence_level_score": True},
        {"_target_": "torchmetrics.text.ExtendedEditDistance", "return_sentence_level_score": True},
        {"_target_": "torchmetrics.text.EditDistance", "reduction": "none"},
        {"_target_": "torchmetrics.text.WordErrorRate"},
    ],
    ids=lambda s: s["_target_"].rpartition(".")[2],
)
def test_metrics_with_a_number_for_each_row(settings: dict[str, Any]) -> None:
    metrics = TextMetrics([settings])
    (same,) = metrics.score(["a cat sat", "on the mat"], ["a cat sat", "on the mat"]).values()
    (other,) = metrics.score(["a cat sat", "on the mat"], ["a dog lay", "in a bed"]).values()
    assert same == pytest.approx(1.0 if "CHRF" in settings["_target_"] else 0.0, abs=0.03)
    assert other != same


def test_preferences_have_answers_too(tmp_path: Path) -> None:
    path = write_chats(tmp_path / "pairs.jsonl", [pair(i) for i in range(12)])
    words = ["objective=dpo", "data=preference_jsonl", f"data.path={path}", "callbacks.samples.metrics=[rouge]"]
    ended = run("train", *CHAT, *words, "trainer.max_steps=1", f"run.dir={tmp_path}/run")
    assert ended.code == 0, ended.err
    kept = rows(tmp_path / "run" / "samples.jsonl")
    good = {pair(i)["chosen"][0]["content"] for i in range(12)}
    assert len(kept) == 2
    assert {row["reference"] for row in kept} <= good
    assert "val/rouge" in rows(tmp_path / "run" / "metrics.jsonl")[-1]


@pytest.mark.slow
def test_two_ranks_score_as_one(chats: Path, tmp_path: Path, forked_lmtrain: Run) -> None:
    """Each rank generates a part of the answers and rank 0 scores all; a metric that synchronized ranks would hang."""
    for devices in (1, 2):
        settings = ["data.global_batch_size=8", "model.dropout=0", f"trainer.devices={devices}"]
        scores = ["callbacks.samples.metrics=[bleu,rouge]", f"run.dir={tmp_path}/{devices}", f"data.path={chats}"]
        done = forked_lmtrain("train", *SFT, *settings, *scores)
        assert done.returncode == 0, done.stdout + done.stderr
    one, two = ((tmp_path / n / "samples.jsonl").read_text() for n in ("1", "2"))
    assert one == two
    for a, b in zip(*(rows(tmp_path / n / "metrics.jsonl") for n in ("1", "2")), strict=True):
        assert a.get("val/rouge") == b.get("val/rouge")


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Saves a randomly initialised two-layer BERT and a tokenizer of letters."""
    folder = tmp_path_factory.mktemp("encoder")
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *"abcdefghijklmnopqrstuvwxyz"]
    (folder / "vocab.txt").write_text("\n".join(words))
    BertTokenizerFast(str(folder / "vocab.txt")).save_pretrained(folder)
    torch.manual_seed(0)
    shape = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    BertModel(BertConfig(vocab_size=len(words), **shape)).save_pretrained(folder)
    return folder


def test_bertscore_is_torchmetrics_pair_by_pair(encoder: Path) -> None:
    """The reference scores single pairs: of several, torchmetrics compares answers with other pairs' references."""
    answers, references = ["a b c d", "x y", "k l m n o p"], ["a b d", "x y z", "k l m o"]
    theirs = []
    for answer, reference in zip(answers, references, strict=True):
        metric = BERTScore(model_name_or_path=str(encoder))
        metric.update([answer], [reference])
        theirs.append(float(metric.compute()["f1"]))
    found = TextMetrics([f"bertscore:{encoder}"]).score(answers, references)
    assert found["bertscore"] == pytest.approx(sum(theirs) / 3, abs=1e-5)
    assert TextMetrics([f"bertscore:{encoder}"]).score(["", "a"], ["a", "a"])["bertscore"] == pytest.approx(0.5)


@pytest.mark.parametrize(("metrics", "words"), [
    ("['bertscore:/no/such/encoder']", "/no/such/encoder"),
    ("[bertscore]", "bertscore needs an encoder"),
    ("[rougue]", "did you mean rouge"),
])  # fmt: skip
def test_a_metric_that_cannot_be_is_refused_before_training(
    metrics: str, words: str, chats: Path, tmp_path: Path
) -> None:
    for key in ("callbacks.samples.metrics", *(["evaluate.metrics"] if "/" not in metrics else [])):
        ended = sft(chats, tmp_path / "run", f"{key}={metrics}")
        assert ended.code == 2
        assert words in ended.err.splitlines()[-1]
        assert ended.err.splitlines()[-1].startswith("error: ")
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_bleu_and_rouge_are_sacrebleus_and_rouge_scores(tmp_path: Path) -> None:
    """The 200 pairs range from hardly a word in common to nearly identical."""
    command = Path(os.environ.get("LMTRAIN_LM_EVAL_PYTHON", REPO / ".venv-lm-eval" / "bin" / "python"))
    if not command.exists():
        pytest.skip(f"needs sacrebleu and rouge-score: make env-lm-eval ({command} isn't there)")
    draw = random.Random(0)
    words = ["the", "cat", "sat", "on", "a", "mat,", "3", "dogs", "(very", "old!)", "it", "wasn't", "--", "2.5"]
    references = [" ".join(draw.choices(words, k=draw.randint(4, 25))) for _ in range(200)]
    answers = [
        " ".join(w if draw.random() < i / 200 else draw.choice(words) for w in text.split()[: 4 + i % 20])
        for i, text in enumerate(references)
    ]
    (tmp_path / "pairs.json").write_text(json.dumps([answers, references]))
    script = Path(__file__).with_name("reference_scores.py")
    done = subprocess.run([command, script, tmp_path / "pairs.json"], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    theirs = json.loads(done.stdout)
    ours = TextMetrics(["bleu", "rouge", "rouge1", "rouge2"]).score(answers, references)
    assert ours == pytest.approx(theirs, abs=1e-6)
    assert 0.1 < theirs["bleu"] < 0.9


@pytest.mark.parametrize("kind", [pytest.param("completion", marks=pytest.mark.slow), "chat"])
def test_tags_that_are_tokens_are_read_by_samples_metrics_chat_and_rewards(kind: str, tmp_path: Path) -> None:
    """tokenizer.add_tokens makes special tokens, and a decoder that skips special tokens would hide them everywhere."""
    said = "<think>so</think><answer>1</answer>"
    completion = {"prompt": "one? ", "completion": said}
    turns = [
        {"role": role, "content": completion[key]} for role, key in (("user", "prompt"), ("assistant", "completion"))
    ]
    one = completion if kind == "completion" else {"messages": turns}
    (tmp_path / "rows.jsonl").write_text("\n".join(json.dumps(one) for _ in range(60)))
    (tmp_path / "prompts.jsonl").write_text("\n".join(json.dumps({"prompt": "one? "}) for _ in range(10)))
    words = [*TINY, "objective=sft", "data=chat_jsonl", f"data.path={tmp_path}/rows.jsonl", "data.val_fraction=0.2",
             EXPORT, SAMPLES, "tokenizer.add_tokens=[<think>,</think>,<answer>,</answer>]", "data.chat_template=zephyr",
             "data.seq_len=64", "optimizer.lr=0.01", "trainer.max_steps=30", "schedule.warmup_steps=0",
             f"run.dir={tmp_path}/run"]  # fmt: skip
    ended = run("train", *words, "callbacks.samples.metrics=[exact_match]", "callbacks.samples.max_new_tokens=10")
    assert ended.code == 0, ended.err
    kept = rows(tmp_path / "run" / "samples.jsonl")[-1]
    assert (kept["text"], kept["reference"]) == (said, said)
    assert rows(tmp_path / "run" / "metrics.jsonl")[-1]["val/exact_match"] == 1
    ended = run("evaluate", f"run_dir={tmp_path}/run", "evaluate.answers=4", "evaluate.metrics=[exact_match]",
                "evaluate.max_new_tokens=10", f"evaluate.dir={tmp_path}/scores")  # fmt: skip
    assert ended.code == 0, ended.err
    assert "exact_match 1" in " ".join(ended.out.replace("│", " ").split())
    if kind == "completion":
        return
    streamed: list[str] = []
    settings = rules.check(rules.compose(["generate.temperature=0"])).generate
    talk = Talk(*trained.load(f"{tmp_path}/run", "last", {}), settings, 0)
    assert talk.ask("one? ", streamed.append, print) == said
    assert "".join(streamed) == said
    rewarded = ["objective=grpo", f"model={tmp_path}/run", f"data.path={tmp_path}/prompts.jsonl", "reward=format",
                "data.val_fraction=0.2", "data.seq_len=64", "data.global_batch_size=2", "data.micro_batch_size=2",
                "trainer.max_steps=1", "objective.group_size=2", "objective.max_new_tokens=10", "logger=none",
                "objective.temperature=0.1", "export.enabled=false", f"run.dir={tmp_path}/grpo"]  # fmt: skip
    ended = run("train", *rewarded)
    assert ended.code == 0, ended.err
    assert rows(tmp_path / "grpo" / "metrics.jsonl")[0]["train/reward"] == 1


def test_only_tokens_that_begin_end_or_pad_are_left_out() -> None:
    """A base model's tokenizer may mark <think> and <tool_call> as special; they are part of what was written."""
    cfg = TokenizerConfig(kind="bytes")
    tokenizer = tokenizers.load_or_train(cfg, lambda _: iter(()), tokenizers.identity(cfg))
    tokenizer.add_special_tokens({"bos_token": "<s>", "pad_token": "<pad>", "eos_token": "</s>"})
    tokenizer.add_special_tokens({"additional_special_tokens": ["<think>", "<tool_call>", "<|im_end|>"]})
    said = "<think>a , b</think> <tool_call>{}"
    ids = tokenizer(f"<s>{said}<|im_end|></s><pad><pad>")["input_ids"]
    (end,) = tokenizer("<|im_end|>")["input_ids"]
    decoder = AnswerDecoder(tokenizer, [end])
    assert decoder.decode(ids) == decoder.as_decoded(f"<s>{said}<|im_end|></s>") == said
    assert tokenizer.decode(ids, skip_special_tokens=True) == "a , b</think> {}"
    assert AnswerDecoder(tokenizer, []).decode(ids) == f"{said}<|im_end|>"  # a stop token of the user's is text, too
