"""Help per verb, the version, a sweep that is only shown, and where a value comes from."""

import io
from pathlib import Path
from typing import Any

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import OmegaConf

from inprocess import message, run, snapshot
from lmtrain import __version__, cli
from lmtrain.config.compose import check, compose
from lmtrain.config.override_text import as_typed, bare_or_quoted, written
from lmtrain.config.overrides import parse
from support import REPO


def test_generates_help_begins_with_its_own_keys() -> None:
    text = run("generate", "--help").out
    assert text.index("generate.prompt=") < text.index("--prompt ") < text.index("groups and their options")
    keys = [line.split(":")[0] for line in (REPO / "conf/generate/default.yaml").read_text().splitlines()[1:]]
    assert all(f"\n  generate.{key}=" in text for key in keys)
    for verb in cli.VERBS:
        if verb in ("train", "prepare", "inspect", "export", "generate", "verify"):
            assert f"examples:\n  python -m lmtrain.{verb}" in run(verb, "--help").out


def test_the_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out.startswith(f"lmtrain {__version__} ")
    assert run("train", "--version").out.startswith(f"lmtrain {__version__} ")


def test_a_sweep_with_cfg_is_shown_and_not_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    ended = run("train", "-m", "--cfg", "optimizer.lr=1e-3,1e-4", "seed=1,2,3")
    assert ended.code == 0, ended.err
    assert ended.out.startswith("# a sweep of 6 trials in ")
    assert "# optimizer.lr=1e-3,1e-4\n# seed=1,2,3\n" in ended.out
    assert "\n  lr: 0.001\n" in ended.out
    assert snapshot(tmp_path) == {}


def test_where_a_value_comes_from(tmp_path: Path) -> None:
    default = run("explain", "data.seq_len").out
    assert default.startswith("data.seq_len=256\n")
    assert "conf/data/common.yaml, line " in default
    assert ": ${model.max_position_embeddings}" in default
    assert "Tokens per row" in default
    assert "refused on resume" in default
    typed = run("explain", "data.seq_len", "data.seq_len=64").out
    assert "from      the command line" in typed
    assert "instead of ${model.max_position_embeddings} in " in typed
    recipe = run("explain", "trainer.max_steps", "experiment=shakespeare_char").out
    assert "conf/experiment/shakespeare_char.yaml, line " in recipe
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "mine.yaml").write_text("defaults: [gpt_nano, _self_]\nhidden_size: 96\n")
    mine = run("explain", "--config-dir", str(tmp_path), "model=mine", "model.hidden_size").out
    assert f"{tmp_path}/model/mine.yaml, line 2" in mine
    assert f"instead of 192 in {REPO}/conf/model/gpt_nano.yaml" in mine


def test_a_bare_path_brings_the_values_of_the_data_it_chooses(tmp_path: Path) -> None:
    """The line that explain names for a value has that value, also in groups that depend on the chosen data."""
    (tmp_path / "my.txt").write_text("hello")
    path = f"data.path={tmp_path / 'my.txt'}"
    for key in ("data.global_batch_size", "optimizer.name", "data.source"):
        ended = run("explain", key, path)
        value = ended.out.splitlines()[0].partition("=")[2]
        file, _, line = ended.out.split("from      ")[1].splitlines()[0].partition(", line ")
        assert Path(file).read_text().splitlines()[int(line) - 1].partition(": ")[2].split(" #")[0] == value, ended.out
    assert "the command line: " + path in run("explain", path).out


def test_the_whole_composition() -> None:
    ended = run("explain", "model=gpt_small", "optimizer.lr=1e-4")
    lines = ended.out.splitlines()
    assert any(line.startswith("  model ") and line.endswith("conf/model/gpt_small.yaml") for line in lines)
    assert "the command line: model=gpt_small optimizer.lr=1e-4" in ended.out
    assert next(x for x in lines if x.startswith("optimizer.lr=")).split() == [
        "optimizer.lr=0.0001",
        "the",
        "command",
        "line",
    ]
    section = run("explain", "schedule").out.splitlines()
    assert section
    assert all(line.startswith("schedule.") for line in section)


def test_explain_refuses_what_train_refuses() -> None:
    for argv, said in (
        (["data.seq_len", "optimizer.lrr=1"], "did you mean optimizer.lr"),
        (["lr"], "here it is optimizer.lr"),
    ):
        ended = run("explain", *argv)
        assert ended.code == 2
        assert said in message(ended.err)


PROMPTS = [
    "a, b and c",
    "x=1",
    'she said "hi"',
    "it's {a} [b] ${seed}",
    "back\\slash \\",
    "été, naïve",
    "1,2",
    "-m",
    "two\nlines",
]


@pytest.mark.parametrize("prompt", PROMPTS)
def test_any_prompt_arrives_as_it_is(prompt: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for argv in ([f"--prompt={prompt}"], ["--prompt", "-"]):
        monkeypatch.setattr("sys.stdin", io.StringIO(f"{prompt}\n"))
        args = cli.parse("generate", argv)
        assert check(compose(args.overrides)).generate.prompt == prompt
    assert check(compose([as_typed("generate.prompt", prompt)])).generate.prompt == prompt


def test_a_prompt_with_commas_needs_no_quotes() -> None:
    for typed, meant in (
        ("a, b", "a, b"),
        ("a,b", "a,b"),
        ('"a, b"', "a, b"),
        ("'a'", "a"),
        ("${run.root}", "outputs"),
    ):
        assert check(compose([f"generate.prompt={typed}"])).generate.prompt == meant


TEXTS = ["bücher.txt", "日本", "a\\b.txt", "end\\", "a\\'b", 'it\'s "x"', "a b", "a,b", "", "null", "7", "a/b-c.d"]


@pytest.mark.parametrize("text", TEXTS)
def test_written_values_are_read_back(text: str) -> None:
    """Hydra's grammar reads written values back unchanged: a file name alone, in a list and in a mapping."""

    def read(words: str) -> Any:
        found = OverridesParser.create().parse_override(f"key={words}").value()
        return OmegaConf.to_container(OmegaConf.create([found]))[0]

    for value in (text, [text, 1, None], {"weight": 2.5, "path": text}):
        assert read(written(value)) == value
    if text not in ("", "null", "7"):
        assert read(bare_or_quoted(text)) == text


def test_keys_of_a_mapping_may_have_quotes() -> None:
    columns = ["objective=sft", "data=chat_jsonl", "data.path=a.jsonl", "model=gpt_small"]
    for typed in ('{"a b": c}', "{'a b': c}", "{a b: c}"):
        assert check(compose([*columns, f"data.columns={typed}"])).data.columns == {"a b": "c"}
    ended = run("train", *columns, "data.columns={a: b")
    assert ended.code == 2
    assert "++" not in message(ended.err)
    assert parse("data.columns={a: b}").text == "++data.columns={a: b}"
