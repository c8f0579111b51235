"""README.md of every export: metadata that the hub reads, code that runs, the run's numbers, and no local paths."""

import contextlib
import io
import re
from pathlib import Path

import pytest
from huggingface_hub import ModelCard

from chats import write_chats
from inprocess import run, train_tiny
from lmtrain.exports import model_card
from support import EXPORT, TINY, rows
from tiny_pretrained import SHORT, save_pretrained


def code_runs(folder: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Runs the card's Python code in its folder and returns what it prints."""
    (code,) = re.findall(r"```python\n(.*?)```", (folder / "README.md").read_text(), flags=re.DOTALL)
    monkeypatch.chdir(folder)
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        exec(code.replace("max_new_tokens=100", "max_new_tokens=5"), {})  # noqa: S102
    return out.getvalue()


def test_a_run_from_scratch(corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert train_tiny(corpus, EXPORT, f"run.dir={tmp_path / 'run'}", "trainer.save_every_n_steps=1").code == 0
    folder = tmp_path / "run" / "export"
    card = ModelCard.load(folder / "README.md")
    assert card.data.library_name == "transformers"
    assert card.data.base_model is None
    validated = {row["step"]: row for row in rows(tmp_path / "run" / "metrics.jsonl") if "val/loss" in row}
    assert {r.metric_type: r.metric_value for r in card.data.eval_results}["loss"] == validated[2]["val/loss"]
    assert "Validation at step 2" in card.text
    assert str(tmp_path) not in card.content
    assert "Once upon a time" in code_runs(folder, monkeypatch)
    assert "| steps | 2 |" in card.text
    assert run("export", f"run_dir={tmp_path / 'run'}", "export.checkpoint=step_00000001").code == 0
    card = ModelCard.load(folder / "README.md")
    assert "| steps | 1 |" in card.text  # of these weights, whatever trainer.max_steps is
    assert {r.metric_type: r.metric_value for r in card.data.eval_results}["loss"] == validated[1]["val/loss"]


def test_the_signature_of_an_address_is_left_out(tmp_path: Path) -> None:
    config = tmp_path / "run" / "config.yaml"
    config.parent.mkdir()
    address = "https://host/texts/book.txt?X-Amz-Signature=secret"
    config.write_text(f"data: {{source: text, path: '{address}'}}\nobjective: {{name: causal_lm}}\n")
    model_card.write(tmp_path, config, chat=False, begins=False, parameters=1, step=2)
    card = (tmp_path / "README.md").read_text()
    assert "`book.txt`" in card
    assert "secret" not in card


def test_an_adapter_and_a_chat_model(corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base = save_pretrained(tmp_path / "base", max_position_embeddings=256)
    lora = ["peft=lora", f"model.name_or_path={base}", f"data.path={corpus}", "export.merge=true"]
    ended = run("train", *SHORT, *lora, f"run.dir={tmp_path / 'lora'}")
    assert ended.code == 0, ended.err
    card = ModelCard.load(tmp_path / "lora" / "export" / "README.md")
    assert card.data.library_name == "peft"
    assert card.data.base_model is None  # a local folder is not a name on the hub
    assert "An adapter of `base`" in card.text
    assert "The adapter's base, `base`, is not on the hub" in card.text
    assert str(tmp_path) not in card.text
    assert code_runs(tmp_path / "lora" / "export", monkeypatch)
    assert ModelCard.load(tmp_path / "lora" / "export_merged" / "README.md").data.library_name == "transformers"
    chats = write_chats(tmp_path / "a|b`<b>.jsonl", 20)
    sft = ["objective=sft", "data=chat_jsonl", f"data.path='{chats}'", "data.chat_template=vicuna", "data.seq_len=256",
           "model.max_position_embeddings=256", "trainer.max_steps=1", f"run.dir={tmp_path / 'sft'}"]  # fmt: skip
    ended = run("train", *TINY, EXPORT, *sft)
    assert ended.code == 0, ended.err
    card = ModelCard.load(tmp_path / "sft" / "export" / "README.md")
    assert "sft" in card.data.tags
    assert "fine-tuned on conversations (`a\\|b'&lt;b>.jsonl`)" in card.text
    assert code_runs(tmp_path / "sft" / "export", monkeypatch)
