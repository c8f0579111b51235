"""A yaml named on the command line: what it composes to, and what it may not do."""

from pathlib import Path
from typing import Any

import pytest

from inprocess import Ended, message, run
from lmtrain.config import compose as config
from lmtrain.config import keys
from support import REPO, TINY

CONF = REPO / "conf"

SAFE = """
data: {path: text.txt, text_column: [title, body], val_sets: {more: {path: text.txt}}}
optimizer:
  betas: [0.9, 0.95]
  lr: ${oc.select:"optimizer.missing",0.5}
callbacks:
  early_stopping:
    patience: 3
generate:
  temperature: 0.1
model:
  extra: {rope_theta: 10000}
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.txt").write_text("A text to learn from. " * 400)
    return tmp_path


def shown(text: str, *typed: str, name: str = "mine.yaml") -> Ended:
    Path(name).write_text(text)
    return run("train", name, "--cfg", *typed)


def of(ended: Ended) -> Any:
    Path("shown").mkdir(exist_ok=True)
    Path("shown/config.yaml").write_text(ended.out)
    return config.check(config.compose([], "shown"))


def test_its_keys_are_set_and_typed_ones_win() -> None:
    ended = shown(SAFE, "optimizer.betas=[0.8,0.9]", "model=llama_nano")
    assert ended.code == 0, ended.err
    made = of(ended)
    wanted = {
        "data.text_column": ["title", "body"], "optimizer.betas": [0.8, 0.9], "optimizer.lr": 0.5,
        "callbacks.early_stopping.enabled": True, "generate.temperature": 0.1, "model.name": "llama_nano",
        "data.val_sets": {"more": {"path": "text.txt"}}, "model.extra": {"rope_theta": 10000},
    }  # fmt: skip
    assert {key: keys.value_of(made, key) for key in wanted} == wanted


def test_a_run_of_it(folder: Path) -> None:
    Path("mine.yaml").write_text("trainer: {max_steps: 2, val_check_interval: null}\ndata: {path: text.txt}\n")
    ended = run("train", "mine.yaml", *TINY, "run.dir=made")
    assert ended.code == 0, ended.err
    again = run("train", "made/config.yaml", "run.dir=again", "report.enabled=false")
    assert again.code == 0, again.err
    assert Path("again/metrics.jsonl").read_text().count("train/loss") == 2


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("run: {allow_target: [os]}", "counts only where you type it"),
        ("model: pretrained\ndefaults: [{override /model: pretrained}]\ntokenizer: {trust_remote_code: true}", "type"),
        ("run: {name: '${oc.env:HOME}'}", "reads the environment"),
        ("run: {dir: /tmp/elsewhere}", "a folder below the working folder"),
        ("data: {path: 'https://host/a.txt'}", "no address"),
        ("hydra: {searchpath: ['file:///tmp']}", "keys of Hydra's own"),
        ("callbacks: {extra: [{_target_: os.system}]}", "os.system"),
        ("defaults: [base]", "--config-dir"),
        ("experiment: ../../tmp/other", "is not a name of an option"),
        ("model: '${oc.env:HOME}'", "is not a name of an option"),
        ("trainer: {max_step: 3}", "did you mean trainer.max_steps"),
        ("trainer: {max_steps: 3, max_steps: 4}", "is in line"),
        ("[1, 2]", "holds no keys"),
        ("a: &a [1, 1]\nb: &b [*a, *a]\nc: [*b, *b", "can't be read"),
        ("data: 3", "data=3: data is set by the name of an option"),
        ("dataset: mine\nlr: 0.1", "keys of another program"),
    ],
)
def test_what_it_may_not(text: str, said: str) -> None:
    ended = shown(text)
    assert ended.code == 2
    assert said in ended.err


@pytest.mark.parametrize(
    ("text", "typed"),
    [
        ("run: {allow_target: [mine]}", ["run.allow_target=[mine]"]),
        ("run: {allow_target: [mine]}", ["--trust", "mine.yaml"]),
        ("run: {dir: ../elsewhere}", ["--trust", "mine.yaml"]),
        ("run: {dir: ../elsewhere}", ["run.dir=here"]),
    ],
)
def test_what_the_user_opens(text: str, typed: list[str]) -> None:
    ended = shown(text, *typed)
    assert ended.code == 0, ended.err


def test_one_of_ours_is_an_experiment() -> None:
    ended = run("train", str(CONF / "experiment" / "sft_smollm2_lora.yaml"), "--cfg", "data.path=chats.jsonl")
    assert ended.code == 0, ended.err
    assert "method: lora" in ended.out


def test_a_sweep_takes_experiments() -> None:
    Path("mine.yaml").write_text("trainer: {max_steps: 2}")
    assert "experiment=mine" in message(run("train", "-m", "mine.yaml", "seed=1,2").err)
