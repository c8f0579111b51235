"""trainer.val_before_training: the untrained model's score is recorded at step 0, and nothing after it changes."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM

from chats import pair, write_chats
from inprocess import run
from lmtrain.callbacks.metrics import without_times
from lmtrain.checkpoints import store
from support import TINY, rows
from tiny_pretrained import SHORT, save_pretrained

LONG = ["data.chat_template=zephyr", "model.max_position_embeddings=1024", "data.seq_len=512", "data.val_fraction=0.2"]
EVERY = ["trainer.max_steps=4", "trainer.val_check_interval=2", "model.dropout=0.1", "export.enabled=false",
         "callbacks.samples.every_n_validations=2", "trainer.save_every_n_steps=2",
         # As if a rising loss were better: if the first one counted, no later one would be better.
         "callbacks.early_stopping.enabled=true", "callbacks.early_stopping.patience=1",
         "callbacks.early_stopping.mode=max"]  # fmt: skip
KINDS = {
    "causal_lm": ["data=text"],
    "sft": ["objective=sft", "data=chat_jsonl", *LONG],
    "dpo": ["objective=dpo", "data=preference_jsonl", *LONG],
}
ON = "trainer.val_before_training=true"


def settings(kind: str, corpus: Path, folder: Path) -> list[str]:
    if kind != "causal_lm":
        corpus = write_chats(folder / "rows.jsonl", [pair(i) for i in range(30)] if kind == "dpo" else 30)
    return [*TINY, *EVERY, *KINDS[kind], f"data.path={corpus}"]


def records(run_dir: Path) -> list[dict[str, Any]]:
    return [without_times(row) for row in rows(run_dir / "metrics.jsonl")]


@pytest.mark.parametrize("kind", KINDS)
def test_training_goes_as_without_it(kind: str, corpus: Path, tmp_path: Path) -> None:
    """Metrics, samples, weights, optimizer and early stopping's count are equal bit for bit."""
    given = settings(kind, corpus, tmp_path)
    for name, extra in (("with", [ON]), ("without", [])):
        done = run("train", *given, *extra, f"run.dir={tmp_path / name}")
        assert done.code == 0, done.err
        assert ("before the first step" in done.out) == (name == "with")
    first, *rest = records(tmp_path / "with")
    assert (first["step"], first["tokens_seen"]) == (0, 0)
    assert "val/loss" in first
    assert rest == records(tmp_path / "without")
    texts = [[row for row in rows(tmp_path / name / "samples.jsonl") if row["step"]] for name in ("with", "without")]
    assert texts[0] == texts[1]
    assert len(rows(tmp_path / "with" / "samples.jsonl")) > len(texts[1]), "the untrained model's texts"

    a, b = (store.load(tmp_path / name / "checkpoints" / "last") for name in ("with", "without"))
    assert all(torch.equal(t, b["state_dict"][name]) for name, t in a["state_dict"].items())
    stopping = next(name for name in a["callbacks"] if name.startswith("EarlyStopping"))
    assert str(a["callbacks"][stopping]) == str(b["callbacks"][stopping])
    kept = [p.name for p in store.scan(tmp_path / "with" / "checkpoints")]
    assert kept == [p.name for p in store.scan(tmp_path / "without" / "checkpoints")]


def test_the_base_models_loss(corpus: Path, tmp_path: Path) -> None:
    """The score equals that of plain transformers on the held-out text."""
    base = save_pretrained(tmp_path / "base")
    text = "".join(f"held out number {i}. " for i in range(40))
    (tmp_path / "val.txt").write_text(text)
    done = run("train", *SHORT, f"data.path={corpus}", f"data.val_path={tmp_path / 'val.txt'}", ON,
               f"model.name_or_path={base}", f"run.dir={tmp_path / 'run'}", "trainer.limit_val_batches=null",
               "export.enabled=false", "trainer.max_steps=1")  # fmt: skip
    assert done.code == 0, done.err
    ids = torch.tensor([*text.encode(), 256])
    rows_ = ids[: 32 * ((len(ids) - 1) // 32) + 1].unfold(0, 33, 32)  # [rows, 33]; neighbors share a token
    with torch.no_grad():
        found = AutoModelForCausalLM.from_pretrained(base).eval()(rows_[:, :-1].contiguous()).logits
    expected = F.cross_entropy(found.flatten(0, 1), rows_[:, 1:].flatten())
    assert records(tmp_path / "run")[0]["val/loss"] == pytest.approx(expected.item(), rel=1e-5)


def test_resumed_before_its_first_checkpoint_it_stands_once(corpus: Path, tmp_path: Path) -> None:
    given = [*settings("causal_lm", corpus, tmp_path), ON]
    assert run("train", *given, f"run.dir={tmp_path / 'whole'}").code == 0
    breaks = ["callbacks.extra=[{_target_: inprocess.Breaks, at: 1}]", "run.allow_target=[inprocess]"]
    again = [f"run.dir={tmp_path / 'run'}", "run.resume=auto"]
    with pytest.raises(ZeroDivisionError):
        run("train", *given, *again, *breaks)
    assert [row["step"] for row in records(tmp_path / "run")] == [0, 1]
    assert run("train", *given, *again).code == 0
    assert records(tmp_path / "run") == records(tmp_path / "whole")
