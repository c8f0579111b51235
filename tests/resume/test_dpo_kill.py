"""A preference run killed anywhere continues bit for bit; its reference is rebuilt, not read from a checkpoint."""

from pathlib import Path

import pytest
from runs import SETTINGS, assert_equal_runs, train_here
from test_kill_matrix import chain

from chats import write_rows
from tiny_pretrained import save_pretrained

REPLACED = ("model.num_", "model.hidden", "model.max_position", "tokenizer=", "data=", "data.seq_len")
PAIRS = ["objective=dpo", "data=preference_jsonl", "data.chat_template=zephyr", "data.val_fraction=0.2",
         "data.seq_len=512", "optimizer.lr=0.01", "model=pretrained"]  # fmt: skip
KINDS = {
    "frozen_copy": ["objective.reference=frozen_copy", "data.micro_batch_size=2"],
    "adapter_off": ["peft=lora", "peft.dropout=0.1", "data.micro_batch_size=3"],
    "precomputed": ["objective.reference=precomputed", "data.micro_batch_size=2"],
}


@pytest.fixture
def settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Replaces the runs' model from scratch by a pretrained model with dropout."""
    base = save_pretrained(tmp_path / "base", attention_dropout=0.1, max_position_embeddings=1024)
    monkeypatch.setattr("runs.SETTINGS", [s for s in SETTINGS if not s.startswith(REPLACED)])
    return [*PAIRS, f"model.name_or_path={base}", f"data.cache_dir={tmp_path / 'cache'}"]


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_dpo_killed_in_a_step_a_save_and_a_validation(kind: str, settings: list[str], tmp_path: Path) -> None:
    """The other places of a save run the same code for every objective: see test_kill_matrix.py."""
    given = [*settings, *KINDS[kind]]
    pairs = write_rows(tmp_path / "pairs.jsonl", "preference_jsonl")
    (tmp_path / "whole").mkdir()
    done = train_here(pairs, tmp_path / "whole" / "run", *given)
    assert done.code == 0, done.err
    chain(pairs, tmp_path / "run", [("mid_step", 1), ("mid_save", 4), ("mid_validation", 9)], *given)
    assert_equal_runs(tmp_path / "whole" / "run", tmp_path / "run")
