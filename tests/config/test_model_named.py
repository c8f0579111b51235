"""`model=` takes a folder, a run or a hub name; the options of conf/model keep their meaning."""

from pathlib import Path

import pytest

from inprocess import TWO_STEPS, message, run
from lmtrain.config.compose import compose, composition
from lmtrain.config.proposers import ROW
from support import TINY, rows
from tiny_pretrained import save_pretrained

POSITIONS = 64


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Changes to a working folder with a model named base and a run with an export, and returns it."""
    monkeypatch.chdir(tmp_path)
    save_pretrained(tmp_path / "base", "gpt2", n_positions=POSITIONS)
    save_pretrained(tmp_path / "outputs" / "first" / "export", "gpt2", n_positions=POSITIONS)
    save_pretrained(tmp_path / "outputs" / "merged" / "export_merged", "gpt2", n_positions=POSITIONS)
    for run_dir in ("adapter", "merged"):
        export = tmp_path / "outputs" / run_dir / "export"
        export.mkdir(parents=True)
        (export / "adapter_config.json").write_text("{}")
    return tmp_path


@pytest.mark.parametrize(
    ("typed", "name", "seq_len"),
    [
        ("model=Qwen/Qwen3-0.6B", "Qwen/Qwen3-0.6B", ROW),
        ("model='Qwen/Qwen3-0.6B'", "Qwen/Qwen3-0.6B", ROW),
        ("model=base", "base", POSITIONS),
        ("model=./base", "base", POSITIONS),
        ("model=outputs/first", "outputs/first/export", POSITIONS),
        ("model=outputs/merged", "outputs/merged/export_merged", POSITIONS),
    ],
)
def test_a_name_or_a_folder(typed: str, name: str, seq_len: int, folder: Path) -> None:
    made = compose([typed, "data=wikitext"])
    assert (made.model.init, made.model.name_or_path, made.data.seq_len) == ("pretrained", name, seq_len)
    assert made.tokenizer.name_or_path == name
    assert compose([typed, "data.seq_len=32"]).data.seq_len == 32
    assert compose([f"model={folder}/base"]).model.name_or_path == f"{folder}/base"


@pytest.mark.parametrize(
    "data",
    [
        "chat_jsonl objective=sft",
        "preference_jsonl objective=dpo",
        "prompts_jsonl objective=grpo reward=length",
        "unpaired_jsonl objective=kto",
    ],
)
def test_rows_of_every_kind_fit_the_positions(data: str, folder: Path) -> None:
    words = [*f"data={data}".split(), "data.path=rows.jsonl"]
    for model in (["model=base"], ["model=pretrained", "model.name_or_path=base"]):
        made = compose([*model, *words])
        assert (made.data.seq_len, made.data.max_length) == (POSITIONS, POSITIONS)
        notes = " ".join(composition([*model, *words]).reasons)
        assert "rows of 64 tokens (data.seq_len, as many as it has positions)" in notes
        assert compose([*model, *words, "data.seq_len=100"]).data.seq_len == 100  # typed: refused when the model loads
    assert compose(["model=Qwen/Qwen3-0.6B", *words]).data.seq_len == ROW
    assert compose([*words, "model=base", "+model.extra={max_position_embeddings: 2048}"]).data.seq_len == ROW


def test_options_stay_what_they_are(folder: Path) -> None:
    (folder / "gpt_small").mkdir()
    assert compose(["model=gpt_small"]).model.init == "scratch"


@pytest.mark.parametrize(
    ("typed", "said"),
    [
        ("model=gpt2", "model=pretrained model.name_or_path=gpt2"),
        ("model=./nowhere", "no such folder"),
        ("model=a/b/c", "no such folder"),
        ("model=empty", "python -m lmtrain.export run_dir=empty"),
        ("model=outputs/adapter", "python -m lmtrain.export run_dir=outputs/adapter export.merge=true"),
    ],
)
def test_what_names_no_model(typed: str, said: str, folder: Path) -> None:
    (folder / "empty").mkdir()
    ended = run("train", typed)
    assert ended.code == 2
    assert said in message(ended.err)


def test_a_run_from_a_folder_that_is_named(folder: Path, corpus: Path) -> None:
    words = [w for w in TINY if not w.startswith(("model", "tokenizer", "data.seq_len"))]
    ended = run("train", "model=base", f"data.path={corpus}", *words, *TWO_STEPS, "run.dir=second")
    assert ended.code == 0, ended.err
    assert len(rows(folder / "second" / "metrics.jsonl")) >= 2
    plan = " ".join((folder / "second" / "plan.txt").read_text().split())
    assert "model=base trains base further" in plan
    assert f"base is trained in rows of {POSITIONS} tokens (data.seq_len, as many as it has positions)" in plan
