"""From words to a config: what is proposed beside ten lists of words, why, and what Hydra composes of both.

Each expectation is written by hand: options come first, an experiment's keys over those of its options, typed keys
last.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from inprocess import message, run
from lmtrain.config.compose import composition
from lmtrain.config.keys import at
from lmtrain.config.overrides import parse
from lmtrain.errors import UserError
from tiny_pretrained import save_pretrained

MODEL = "outputs/my_sft/export"
# Words -> (what is proposed with a part of its reason, some values of the config).
WORDS: dict[str, tuple[dict[str, str], dict[str, Any]]] = {
    # of the README
    "experiment=python_stdlib": (
        {},
        {"model.num_hidden_layers": 4, "data.source": "python_stdlib", "budget.minutes": 5, "optimizer.name": "muon",
         "optimizer.momentum": 0.9, "callbacks.samples.max_new_tokens": 160},
    ),
    "my_book.txt budget.minutes=10": (
        {"experiment=dial": "my_book.txt is plain text: experiment=dial data=text", "data=text": "as above",
         "data.path=my_book.txt": "as above"},
        {"model.name": "dial", "data.source": "files", "data.format": "text", "data.seq_len": 256,
         "budget.minutes": 10, "trainer.max_epochs": None},
    ),
    "experiment=sft_smollm2_lora data.path=chats.jsonl": (
        {},
        {"objective.name": "sft", "data.source": "files", "peft.r": 16, "budget.updates": "auto",
         "model.name_or_path": "HuggingFaceTB/SmolLM2-135M-Instruct", "data.seq_len": 1024, "trainer.max_epochs": None},
    ),
    "experiment=dpo_smollm2_lora data.path=pairs.jsonl": (
        {},
        {"objective.name": "dpo", "data.rows": "pairs", "peft.learning_rate": 5e-5, "optimizer.lr": 5e-5},
    ),
    "objective=grpo data.path=prompts.jsonl model=outputs/my_sft reward=exact_number reward.column=answer": (
        {"model=pretrained": f"model=outputs/my_sft trains {MODEL} further",
         f'model.name_or_path="{MODEL}"': "as above", "data=prompts_jsonl": "data.path=prompts.jsonl chose its reader",
         "trainer.max_epochs=3": "no length was given", "data.seq_len=64": "as many as it has positions"},
        {"model.name_or_path": MODEL, "data.rows": "lmtrain.data.examples.prompt_rows.PromptRowEncoder",
         "data.seq_len": 64, "trainer.max_epochs": 3, "trainer.max_steps": 1000, "reward.column": "answer"},
    ),
    # a file beside a model
    "chats.jsonl model=gpt_nano": (
        {"objective=sft": "chats.jsonl holds conversations", "budget.updates=auto": "as above",
         "data=chat_jsonl": "as above", "tokenizer=bytes": "as above",
         "data.seq_len=${model.max_position_embeddings}": "as above", "data.chat_template=alpaca": "as above",
         "data.path=chats.jsonl": "as above"},
        {"objective.name": "sft", "tokenizer.kind": "bytes", "data.seq_len": 256, "data.chat_template": "alpaca",
         "budget.updates": "auto", "trainer.max_epochs": None},
    ),
    # a model of the hub alone
    "model=Qwen/Qwen3-0.6B": (
        {"model=pretrained": "model=Qwen/Qwen3-0.6B trains Qwen/Qwen3-0.6B further",
         'model.name_or_path="Qwen/Qwen3-0.6B"': "as above", "data.seq_len=1024": "the usual number"},
        {"model.init": "pretrained", "model.name_or_path": "Qwen/Qwen3-0.6B", "data.seq_len": 1024,
         "tokenizer.name_or_path": "Qwen/Qwen3-0.6B", "data.source": "python_stdlib"},
    ),
    # an experiment, another option of a group, and one of two keys that exclude each other
    "experiment=shakespeare_char optimizer=adamw schedule.warmup_steps=20": (
        {"schedule.warmup_ratio=null": "schedule.warmup_steps says how long the warmup is"},
        {"optimizer.name": "adamw", "optimizer.lr": 6e-3, "optimizer.weight_decay": 0.0, "optimizer.momentum": None,
         "schedule.warmup_steps": 20, "schedule.warmup_ratio": None, "schedule.decay_ratio": 0.6},
    ),
    # the rules of model=dial at a typed depth: 24 x 4/6 rows, 8640 x (4/6)^2 steps
    "experiment=dial model.depth=4 budget.minutes=1": (
        {},
        {"model.num_hidden_layers": 4, "data.global_batch_size": 16, "data.micro_batch_size": 16, "data.seq_len": 256,
         "trainer.max_steps": 3840},
    ),
    # keys that switch on what they belong to, and a share that is exact
    "my_book.txt callbacks.ema.decay=0.9 data.val_fraction=0.1 trainer.max_steps=7": (
        {"data=text": "my_book.txt is plain text: data=text", "data.path=my_book.txt": "as above",
         "callbacks.ema.enabled=true": "callbacks.ema.decay was typed",
         "data.min_val_rows=0": "data.val_fraction was typed"},
        {"callbacks.ema.enabled": True, "callbacks.ema.decay": 0.9, "data.min_val_rows": 0, "trainer.max_epochs": None,
         "trainer.max_steps": 7},
    ),
}  # fmt: skip


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("my_book.txt").write_text("A text to learn from. " * 50)
    Path("chats.jsonl").write_text(json.dumps({"prompt": "Hi", "response": "Hello"}) + "\n")
    save_pretrained(Path(MODEL), "gpt2", n_positions=64)


@pytest.mark.parametrize("words", WORDS)
def test_what_is_proposed_and_composed(words: str) -> None:
    proposed, values = WORDS[words]
    ended = run("train", *words.split(), "--why", "--cfg")
    assert ended.code == 0, ended.err
    reasons, _, config = ended.out.partition("\n\n")
    told = dict(line.split("  ", 1) for line in reasons.splitlines())
    typed = [word for word, reason in told.items() if reason.strip() == "typed"]
    assert typed == [word for word in words.split() if "=" in word]
    assert [word for word in told if word not in typed] == list(proposed)
    assert all(told[word].strip().startswith(reason) or reason in told[word] for word, reason in proposed.items())
    tree = yaml.safe_load(config)
    assert {key: at(tree, key.split(".")) for key in values} == values


@pytest.mark.parametrize(("word", "said"), [
    ("sweep.jobs=2", "sweep.jobs has no effect on a single run"),
    ("hydra.run.dir=x", "here it is run.dir"),
    ("data.ranking=x", "there is no key 'data.ranking'"),
    ("~trainer.max_steps", "it can't be left out: set trainer.max_steps="),
    ("data.path=a 'b' c", "needs quotes twice, for the shell and for Hydra"),
])  # fmt: skip
def test_a_word_that_sets_nothing_is_refused(word: str, said: str) -> None:
    ended = run("train", word, "--why")
    assert ended.code == 2
    assert said in message(ended.err)


def test_python_composes_what_the_command_line_does() -> None:
    words = ["model=Qwen/Qwen3-0.6B", "schedule.warmup_ratio=0.1"]
    made = composition(words)
    told = run("train", *words, "--why").out
    assert [line.partition("  ")[0] for line in told.splitlines()[:-1]] == [
        *(p.override for p in made.proposals),
        *words,
    ]


@pytest.mark.parametrize(("typed", "value"), [
    ("run.name=1.10", "1.10"), ("data.path=~/ä.txt", "~/ä.txt"), ("data.path=[~/ä.txt, b.txt]", ["~/ä.txt", "b.txt"]),
    ("data.path='a,b'", "a,b"), ("data.text_column=[007, x]", ["007", "x"]), ("run.name='007'", "007"),
    ("optimizer.groups=[{pattern: a|(b), lr: 1e-4}]", [{"pattern": "a|(b)", "lr": 1e-4}]),
    ("trainer.compile=off", False), ("trainer.compile=auto", "auto"), ("generate.prompt=a, b", "a, b"),
    ("generate.prompt=null", None), ("data.columns={\"a b\": 'c'}", {"a b": "c"}), ("trainer.max_steps=1_000", 1000),
    ("data.path=https://host/a?b=1,2", "https://host/a?b=1,2"),
])  # fmt: skip
def test_values_are_read_by_the_type_of_their_key(typed: str, value: Any) -> None:
    assert parse(typed).value == value
    assert parse(parse(typed).text).value == value  # what Hydra is given means the same once more


@pytest.mark.parametrize(
    "typed", ["data.path=[a", "data.path=a=b", "data.columns={a: b", "optimizer.lr", "data.path='a"]
)
def test_what_would_have_to_be_guessed_is_refused(typed: str) -> None:
    with pytest.raises(UserError, match=r"^cannot read .*(needs quotes|in double quotes)"):
        parse(typed)


def test_a_text_of_aliases_is_not_expanded() -> None:
    bomb = "[&a [x,x,x,x,x,x,x,x,x,x]" + "".join(
        f", &{new} [{','.join([f'*{old}'] * 10)}]" for old, new in zip("abcdefg", "bcdefgh", strict=True)
    )
    with pytest.raises(UserError, match="its aliases"):
        parse(f"data.mixture={bomb}]")
