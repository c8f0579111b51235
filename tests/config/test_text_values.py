"""A key whose type is text keeps the characters that were typed, however much they look like a number or boolean."""

from pathlib import Path

import pytest

import lmtrain
from inprocess import run
from lmtrain.config import compose as rules
from lmtrain.config import safe_yaml
from lmtrain.config.keys import Key
from lmtrain.config.override_text import written
from lmtrain.config.overrides import leaves
from lmtrain.config.sections import all_keys
from lmtrain.files import write_atomic
from lmtrain.stages import definition, plan
from lmtrain.sweeps import search

TEXTS = ["1.10", "1e3", "007", "2026_11_27", "2026-11-27", "0x10", "0o17", "1_000", "11:50:00", ".5", "5.", "-3", "+7",
         "yes", "no", "on", "off", "True", "false", "inf", "-inf", "nan", ".inf", ".nan", "1e400"]  # fmt: skip
KEYS = [key for key in all_keys() if key.is_text]
ONE = [key for key in KEYS if "list[" not in str(key.type) and "dict[" not in str(key.type)]
LISTS = [key for key in KEYS if "list[" in str(key.type)]


def test_the_keys_that_take_text() -> None:
    names = {key.name for key in KEYS}
    assert {"run.name", "data.revision", "data.path", "tokenizer.add_tokens", "data.columns", "run.time_limit"} <= names
    assert not names & {"seed", "trainer.devices", "optimizer.lr", "trainer.compile", "data.mixture", "reward"}
    assert (len(ONE), len(LISTS)) >= (90, 5)


def test_every_key_on_the_command_line_and_in_a_sweep() -> None:
    for number, key in enumerate(ONE):
        texts = TEXTS[number % 5 :: 5]  # every key, and every text with a fifth of the keys
        assert [leaves([f"{key.name}={text}"])[key.name] for text in texts] == texts, key.name
        (swept,) = search.parse([f"{key.name}={','.join(TEXTS[:5])}"])
        assert [leaves([choice])[key.name] for choice in search.choices(swept)] == TEXTS[:5], key.name
        assert leaves([f"{key.name}=null"])[key.name] is None
    for key in LISTS:
        assert leaves([f"{key.name}=[{','.join(TEXTS)}]"])[key.name] == TEXTS, key.name
        assert leaves([f"{key.name}=[<|a|>, 1.10]"])[key.name] == ["<|a|>", "1.10"], key.name
    assert leaves(["data.columns={prompt: 1.10}"])["data.columns"] == {"prompt": "1.10"}
    assert leaves(["data.columns.prompt=007"])["data.columns.prompt"] == "007"
    assert leaves(["optimizer.lr=1e-3", "trainer.devices=2", "trainer.compile=yes"]) == {
        "optimizer.lr": 1e-3, "trainer.devices": 2, "trainer.compile": True,
    }  # fmt: skip


def in_yaml(key: Key, text: str) -> str:
    value = f"[{text}, {text}]" if key in LISTS else f"{{prompt: {text}}}" if key.name == "data.columns" else text
    sections = key.name.split(".")
    return "".join(f"{'  ' * depth}{name}:\n" for depth, name in enumerate(sections))[:-1] + f" {value}\n"


@pytest.mark.parametrize("text", [*TEXTS, "null"])
def test_every_key_in_yaml(text: str) -> None:
    for key in KEYS:
        tree = safe_yaml.parse(in_yaml(key, text), "it")
        for name in key.name.split("."):
            tree = tree[name]
        one = None if text == "null" else text
        assert tree == ([one, one] if key in LISTS else {"prompt": one} if key.name == "data.columns" else one)


YAML = """
run: {name: 1.10, time_limit: 11:50:00}
tokenizer: {add_tokens: [1e3, 007]}
data: {columns: {prompt: 2026}, revision: 1e3}
estimate: {device: no}
optimizer: {lr: 1.0e-3}
"""
WANTED = {"run.name": "1.10", "run.time_limit": "11:50:00", "tokenizer.add_tokens": ["1e3", "007"],
          "data.columns": {"prompt": "2026"}, "data.revision": "1e3", "estimate.device": "no",
          "optimizer.lr": 1e-3}  # fmt: skip


def found_in(tree: dict) -> dict:
    def at(name: str) -> object:
        node = tree
        for part in name.split("."):
            node = node[part]
        return node

    return {name: at(name) for name in WANTED}


def test_of_a_file_of_ones_own(tmp_path: Path) -> None:
    """As an experiment in a folder of configs, as a file that is named, and as the config.yaml of a run."""
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment" / "mine.yaml").write_text(f"# @package _global_\n{YAML}")
    (tmp_path / "named.yaml").write_text(YAML)
    of_ours = ["objective=sft", "data=chat_jsonl", "data.path=x", "data.seq_len=64", "--cfg"]
    for words in (["--config-dir", str(tmp_path), "experiment=mine"], [str(tmp_path / "named.yaml")]):
        ended = run("train", *words, *of_ours)
        assert ended.code == 0, ended.err
        assert found_in(safe_yaml.parse(ended.out, "it")) == WANTED
    (tmp_path / "config.yaml").write_text(ended.out.replace("'1.10'", "1.10").replace("'11:50:00'", "11:50:00"))
    assert "name: 1.10" in (tmp_path / "config.yaml").read_text()
    assert found_in(rules.read(tmp_path / "config.yaml")) == WANTED


def test_control_characters_are_read_back_from_the_runs_config(tmp_path: Path) -> None:
    signs = [chr(code) for code in (*range(1, 0x20), *range(0x7F, 0xA1), 0xAD, 0x2028, 0x2029, 0xFEFF, 0xFFFE)]
    prompts = [text for sign in signs for text in (f"a{sign}b", sign, f"{sign} {'of words ' * 20}\n{sign}")]
    config = lmtrain.compose([f"callbacks.samples.prompts={written(prompts)}"])
    assert config.callbacks.samples.prompts == prompts
    write_atomic(tmp_path / "config.yaml", rules.dump(config))
    assert rules.load(tmp_path / "config.yaml", {}, own=True) == config


def test_of_an_environment_python_and_pipelines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VERSION", "1.10")
    assert lmtrain.compose(["run.name=${oc.env:VERSION}"]).run.name == "1.10"
    config = lmtrain.compose(["run.name=1.10", "callbacks.samples.prompts=[1e3,no]", "run.cooldown_from=null"])
    assert (config.run.name, config.callbacks.samples.prompts) == ("1.10", ["1e3", "no"])
    assert config.run.cooldown_from is None
    assert lmtrain.compose([]).run.name is None
    (tmp_path / "stages.yaml").write_text(
        "stages:\n  one:\n    overrides: [run.time_limit=0090, data=text, data.path=2026_11]\n"
    )
    pipeline = definition.read(tmp_path / "stages.yaml")
    typed = definition.sort(["pipeline=x", "one.export.push_to=1e3", "run.name=1.10"], pipeline)
    (stage,) = plan.make(pipeline, typed, None).stages
    found = stage.config
    assert (found.run.time_limit, found.data.path, found.export.push_to) == ("0090", "2026_11", "1e3")
    assert stage.run.parent.name == "1.10"
