"""First commands of users of transformers, TRL, nanoGPT, Lightning or axolotl, or of users who just have a file.

Each composes what was meant or is answered with the right command; none composes something else. Nothing is trained.
"""

import contextlib
import io
import json
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from inprocess import Ended, run
from lmtrain import cli
from lmtrain.config import keys

CHATS = {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]}
SHAREGPT = {"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello"}]}
PAIR = {"prompt": "Hi", "chosen": "Hello", "rejected": "Go away"}
AXOLOTL = """
base_model: HuggingFaceTB/SmolLM2-135M
datasets:
  - path: chats.jsonl
    type: chat_template
sequence_len: 2048
micro_batch_size: 2
gradient_accumulation_steps: 4
num_epochs: 3
learning_rate: 0.0002
adapter: lora
lora_r: 16
val_set_size: 0.05
output_dir: ./out
"""
LLAMA_FACTORY = """
model_name_or_path: Qwen/Qwen3-0.6B
stage: sft
do_train: true
finetuning_type: lora
lora_target: all
template: qwen3
cutoff_len: 2048
max_samples: 1000
num_train_epochs: 3.0
lr_scheduler_type: cosine
bf16: true
"""
TRL_FILE = """
model_name_or_path: Qwen/Qwen3-0.6B
dataset_name: trl-lib/Capybara
learning_rate: 2.0e-5
num_train_epochs: 1
packing: true
max_length: 1024
"""
OURS = """
model: llama_nano
data:
  path: my_book.txt
  seq_len: 128
optimizer:
  lr: 1.0e-3
trainer: {max_steps: 7}
"""
EXPERIMENT = """# @package _global_
defaults:
  - override /model: llama_nano
  - override /optimizer: lion
  - _self_
trainer:
  max_steps: 8
"""


def lines(*entries: dict[str, Any]) -> str:
    return "".join(json.dumps(entry) + "\n" for entry in entries)


FILES = {
    "my_book.txt": "Once upon a time there was a king.\n" * 40,
    "notes.md": "# Notes\nSome words.\n",
    "notes.rst": "Notes\n=====\n",
    "texts/a.txt": "One text.",
    "texts/b.txt": "Another.",
    "docs/a.md": "# A",
    "train.log": "plain text of another name",
    "chats.jsonl": lines(CHATS, CHATS),
    "sharegpt.json": json.dumps([SHAREGPT, SHAREGPT]),
    "pairs.jsonl": lines(PAIR),
    "labels.jsonl": lines({"prompt": "Hi", "completion": "Hello", "label": True}),
    "alpaca.json": json.dumps([{"instruction": "Say hi", "input": "", "output": "Hi"}]),
    "completions.jsonl": lines({"prompt": "Hi", "completion": "Hello"}),
    "pages.jsonl": lines({"id": "a" * 40, "url": "http://x", "body": "A long text, longer than all else. " * 3}),
    "table.csv": "id,title,review\n1,Good,It was a very good film and I liked it\n2,Bad,No\n",
    "questions.csv": "question,answer\nWhat?,That\n",
    "picture.bin": "\0\1\2",
    "my.yaml": OURS,
    "experiment.yaml": EXPERIMENT,
    "axolotl.yml": AXOLOTL,
    "llama_factory.yaml": LLAMA_FACTORY,
    "sft.yaml": TRL_FILE,
    "train.py": "print('mine')",
    "outputs/first/config.yaml": "run: {name: first}\n",
    "outputs/first/export/config.json": '{"max_position_embeddings": 64}',
    "base/config.json": '{"max_position_embeddings": 64}',
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns a working folder with files of many kinds, a run and a model."""
    made = tmp_path_factory.mktemp("desk")
    for name, text in FILES.items():
        (made / name).parent.mkdir(parents=True, exist_ok=True)
        (made / name).write_text(text)
    return made


Said = Callable[[str], tuple[Any, Ended]]


@pytest.fixture
def typed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Said:
    """Returns a function that runs a command and returns its verb's config (None if it is refused) and its output."""
    monkeypatch.chdir(folder)
    seen: list[Any] = []
    run = cli.run

    def stopped(verb: str, _action: Any, argv: list[str] | None = None) -> int:
        return run(verb, lambda config, *_: seen.append(config) or 0, argv)

    monkeypatch.setattr(cli, "run", stopped)

    def type_(command: str) -> tuple[Any, Ended]:
        out, err = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            code = cli.main(shlex.split(command))
        return (seen.pop() if seen else None), Ended(code, out.getvalue(), err.getvalue(), 0.0)

    return type_


SMOL = "HuggingFaceTB/SmolLM2-135M-Instruct"
COMPOSED: dict[str, dict[str, Any]] = {
    # a data file
    "train my_book.txt": {"data.path": "my_book.txt", "objective.name": "causal_lm", "trainer.max_epochs": 15},
    "train data.path=my_book.txt": {"data.format": "text", "trainer.max_epochs": 15, "trainer.max_steps": 1000},
    "train my_book.txt trainer.max_steps=90": {"trainer.max_epochs": None, "trainer.max_steps": 90},
    "train notes.md": {"data.path": "notes.md", "data.format": "text"},
    "train notes.rst": {"data.path": "notes.rst", "data.format": "text"},
    "train train.log": {"data.path": "train.log", "data.format": "text"},
    "train texts": {"data.path": "texts", "data.format": "text"},
    "train docs/": {"data.path": "docs/", "data.format": "text"},
    "train texts/a.txt texts/b.txt": {"data.path": ["texts/a.txt", "texts/b.txt"]},
    "train my_book.txt model=llama_nano trainer.max_steps=5": {"model.name": "llama_nano", "trainer.max_steps": 5},
    "train my_book.txt experiment=shakespeare_char": {"data.path": "my_book.txt", "data.seq_len": 128},
    "train chats.jsonl": {"objective.name": "sft", "model.name_or_path": SMOL, "peft.r": 16},
    "train sharegpt.json": {"objective.name": "sft", "data.rows": "conversations", "data.path": "sharegpt.json"},
    "train alpaca.json": {"objective.name": "sft", "data.path": "alpaca.json"},
    "train completions.jsonl": {"objective.name": "sft"},
    "train questions.csv": {"objective.name": "sft", "data.path": "questions.csv"},
    "train pairs.jsonl": {"objective.name": "dpo", "data.rows": "pairs", "model.name_or_path": SMOL},
    "train labels.jsonl": {"objective.name": "kto", "model.name_or_path": SMOL, "peft.r": 16},
    "train chats.jsonl model=Qwen/Qwen3-0.6B": {
        "budget.updates": "auto", "trainer.max_epochs": None, "model.name_or_path": "Qwen/Qwen3-0.6B"},
    "train pairs.jsonl model=base peft=lora": {"objective.name": "dpo", "model.name_or_path": "base"},
    "train chats.jsonl model=gpt_nano": {"objective.name": "sft", "data.chat_template": "alpaca", "data.seq_len": 256},
    "train chats.jsonl experiment=sft_smollm2": {"objective.name": "sft", "peft.r": None},
    "train chats.jsonl experiment=sft_smollm2 model=gpt_nano data.chat_template=alpaca data.seq_len=128": {
        "model.init": "scratch"},
    "train objective=sft data.path=chats.jsonl data.chat_template=alpaca data.seq_len=128": {
        "data.rows": "conversations"},
    "train experiment=dpo_smollm2 objective=sft data=chat_jsonl data.path=chats.jsonl": {"objective.name": "sft"},
    "train pages.jsonl": {"data.text_column": "body", "data.rows": "text"},
    "train table.csv": {"data.text_column": "review", "objective.name": "causal_lm"},
    "train table.csv data.text_column=title": {"data.text_column": "title"},
    "prepare my_book.txt": {"data.path": "my_book.txt"},
    "inspect chats.jsonl": {"objective.name": "sft", "data.path": "chats.jsonl"},
    "estimate my_book.txt": {"data.path": "my_book.txt"},
    # a config file
    "train my.yaml": {"model.name": "llama_nano", "data.path": "my_book.txt", "optimizer.lr": 1e-3,
                      "trainer.max_steps": 7},
    "train --config my.yaml trainer.max_steps=9": {"trainer.max_steps": 9, "data.seq_len": 128},
    "train experiment.yaml my_book.txt": {"data.path": "my_book.txt", "model.name": "llama_nano"},
    "train experiment.yaml": {"model.name": "llama_nano", "optimizer.name": "lion", "trainer.max_steps": 8},
    "train experiment.yaml optimizer=adamw": {"optimizer.name": "adamw", "model.name": "llama_nano"},
    # a model by name
    "train model=Qwen/Qwen3-0.6B data.path=my_book.txt": {"model.name_or_path": "Qwen/Qwen3-0.6B"},
    "train model=outputs/first data.path=my_book.txt": {"model.name_or_path": "outputs/first/export"},
    "train model=./base my_book.txt": {"model.name_or_path": "base", "data.seq_len": 64},
    # runs, folders and hub names
    "chat outputs/first": {"run_dir": "outputs/first"},
    "chat Qwen/Qwen3-0.6B": {"run_dir": "Qwen/Qwen3-0.6B"},
    "chat run_dir=outputs/first": {"run_dir": "outputs/first"},
    "evaluate outputs/first": {"run_dir": "outputs/first"},
    "evaluate Qwen/Qwen3-0.6B data.val_path=my_book.txt data=text": {"run_dir": "Qwen/Qwen3-0.6B"},
    "export outputs/first": {"run_dir": "outputs/first"},
    "export outputs/first export.dtype=bfloat16": {"run_dir": "outputs/first", "export.dtype": "bfloat16"},
    'generate outputs/first "Once upon a time"': {"run_dir": "outputs/first", "generate.prompt": "Once upon a time"},
    'generate outputs/first "x = 1, y = ${z}"': {"generate.prompt": "x = 1, y = ${z}"},
    "generate outputs/first --prompt Once": {"run_dir": "outputs/first", "generate.prompt": "Once"},
    'generate run_dir=base "def main"': {"run_dir": "base", "generate.prompt": "def main"},
}  # fmt: skip

ANSWERED: dict[str, tuple[str, ...]] = {
    # transformers and TRL
    "train --model_name_or_path Qwen/Qwen3-0.6B --dataset_name trl-lib/Capybara --learning_rate 2e-5 --bf16": (
        "python -m lmtrain.train model=Qwen/Qwen3-0.6B data.name=trl-lib/Capybara optimizer.lr=2e-5 "
        "trainer.precision=bf16-mixed",),
    "train --train_file my_book.txt --num_train_epochs 3 --do_train": (
        "data.path=my_book.txt trainer.max_epochs=3", "python -m lmtrain.train"),
    "train --lr 0.001": ("optimizer.lr=0.001",),
    "train model_name_or_path=Qwen/Qwen3-0.6B": ("model=Qwen/Qwen3-0.6B",),
    "train num_train_epochs=3": ("trainer.max_epochs",),
    "sft --model_name_or_path Qwen/Qwen3-0.6B": ("lmtrain train objective=sft",),
    "train model=gpt2": ("model=gpt_small", "model=pretrained model.name_or_path=gpt2"),
    "train gpt2": ("model=openai-community/gpt2 data.path=",),
    "chat gpt2": ("python -m lmtrain.chat openai-community/gpt2",),
    # nanoGPT
    "train config/train_shakespeare_char.py": ("python -m lmtrain.train experiment=shakespeare_char",),
    "train --batch_size=12 --block_size=64 --max_iters=2000": ("data.seq_len=64", "trainer.max_steps=2000"),
    "train train.py": ("data.format=text data.path=train.py",),
    "sample --out_dir=outputs/first": ("lmtrain generate",),
    # Lightning
    "fit --config my.yaml": ("lmtrain train --config my.yaml",),
    "train --trainer.max_epochs 3 --optimizer.lr 0.001": ("trainer.max_epochs=3 optimizer.lr=0.001",),
    "test": ("lmtrain evaluate",),
    "validate outputs/first": ("lmtrain evaluate outputs/first",),
    # config files of axolotl, LLaMA-Factory and TRL
    "train axolotl.yml": ("model=HuggingFaceTB/SmolLM2-135M", "data.seq_len=2048", "trainer.max_epochs=3",
                          "data.micro_batch_size=2", "optimizer.lr=0.0002", "peft.r=16", "data.val_fraction=0.05"),
    "train llama_factory.yaml": ("model=Qwen/Qwen3-0.6B", "objective", "peft", "data.chat_template",
                                 "data.seq_len=2048", "data.num_samples=1000", "trainer.precision=bf16-mixed"),
    "train --config sft.yaml": ("model=Qwen/Qwen3-0.6B", "data.name=trl-lib/Capybara", "trainer.max_epochs=1"),
    # words that are none of these
    "my_book.txt": ("lmtrain train my_book.txt",),
    "trian my_book.txt": ("lmtrain train my_book.txt",),
    "train gpt_small": ("python -m lmtrain.train model=gpt_small",),
    "train sft": ("python -m lmtrain.train objective=sft",),
    "train shakespeare_char": ("experiment=shakespeare_char",),
    "train Qwen/Qwen3-0.6B": ("model=Qwen/Qwen3-0.6B data.path=", "data.name=Qwen/Qwen3-0.6B"),
    "train outputs/first": ("run.resume=auto", "model=outputs/first data.path="),
    "train my_bok.txt": ("did you mean python -m lmtrain.train my_book.txt?",),
    "train trainer.max_steps 100": ("python -m lmtrain.train trainer.max_steps=100",),
    "train picture.bin": ("neither text nor a table",),
    "train base": ("model=base data.path=",),
    "train nowhere.yaml": ("no such file",),
    "chat first": ("python -m lmtrain.chat outputs/first",),
    "chat outputs/frist": ("did you mean python -m lmtrain.chat outputs/first?",),
    "chat outputs/first hello": ("python -m lmtrain.chat outputs/first",),
    "generate outputs/first Once upon a time": ('python -m lmtrain.generate outputs/first "Once upon a time"',),
    'generate "Once upon a time"': ('python -m lmtrain.generate outputs/first "Once upon a time"',),
    "generate first Once": ('python -m lmtrain.generate outputs/first "Once"',),
    "evaluate outputs/first my_book.txt": ("python -m lmtrain.evaluate outputs/first data.val_path=my_book.txt",),
    "evaluate outputs/first/config.yaml": ("lmtrain.evaluate", "outputs/first"),
    "export Qwen/Qwen3-0.6B": ("python -m lmtrain.export outputs/NAME",),
    "export base": ("is not a run",),
    # commands without their first word
    "chat": ("which model? python -m lmtrain.chat outputs/",),
    "generate": ("which model? python -m lmtrain.generate outputs/", '"Once upon a time"'),
    "chat model=outputs/first": ("python -m lmtrain.chat outputs/first",),
    "report": ("which run? python -m lmtrain.report outputs/NAME",),
    "sweep_report": ("python -m lmtrain.sweep_report FOLDER",),
    "new": ("python -m lmtrain.new reward my_thing",),
    "new environment": ("python -m lmtrain.new environment my_thing",),
    "new objectiv x": ("did you mean objective?",),
    "pipeline": ("pipeline=laptop",),
    # values and spaces
    "train --device=cpu --compile=False --batch_size=12": (
        "python -m lmtrain.train trainer.accelerator=cpu trainer.compile=False data.global_batch_size=12 "
        "data.micro_batch_size=12",),
    "train trainer.max_steps = 10": ("python -m lmtrain.train trainer.max_steps=10",),
    "train trainer.max_steps =10 seed=1": ("python -m lmtrain.train trainer.max_steps=10 seed=1",),
    "train trainer.max_steps= 10": ("python -m lmtrain.train trainer.max_steps=10",),
    "train trainer.max_steps=1e3": ("write trainer.max_steps=1000",),
    "train my_bok.txt optimizer.lrr=3": ("did you mean python -m lmtrain.train my_book.txt optimizer.lrr=3?",),
    "train data.path=my_bok.txt trainer=gpu": ("no such file or folder; did you mean data.path=my_book.txt?",),
}  # fmt: skip


def plain(value: Any) -> Any:
    return list(value) if isinstance(value, list | tuple) else value


# Commands that take the same path as others.
ALIKE = ("notes.rst", "docs/", "alpaca.json", "completions.jsonl", "questions.csv", "data.text_column=title",
         "optimizer=adamw", "experiment=sft_smollm2", "export.dtype=bfloat16",
         "model=llama_nano trainer.max_steps=5")  # fmt: skip
QUICK = [pytest.param(c, marks=[pytest.mark.slow] * c.endswith(ALIKE)) for c in COMPOSED]


@pytest.mark.parametrize("command", QUICK)
def test_does_what_was_meant(command: str, typed: Said) -> None:
    config, ended = typed(command)
    assert ended.code == 0, ended.err
    assert {key: plain(keys.value_of(config, key)) for key in COMPOSED[command]} == COMPOSED[command]


@pytest.mark.parametrize("command", ANSWERED)
def test_is_answered_with_the_command_that_does(command: str, typed: Said) -> None:
    config, ended = typed(command)
    assert config is None
    assert (ended.code, ended.out) == (2, "")
    for part in ANSWERED[command]:
        assert part in ended.err, ended.err


def test_a_pipeline_is_named_by_its_first_word() -> None:
    assert run("pipeline", "laptop", "--cfg").out == run("pipeline", "pipeline=laptop", "--cfg").out != ""


def test_names_with_a_space_can_be_pasted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "outputs" / "my run").mkdir(parents=True)
    (tmp_path / "outputs" / "my run" / "config.yaml").write_text("{}")
    assert "did you mean python -m lmtrain.chat 'outputs/my run'?" in run("chat", "outputs/my_run").err
    said = run("train", "outputs/my run").err.partition("to continue it: ")[2].partition(";")[0]
    assert shlex.split(said)[3:6] == ["--config-dir", "outputs/my run", 'run.dir="outputs/my run"']


def test_there_are_sixty() -> None:
    assert len(COMPOSED) + len(ANSWERED) >= 60
