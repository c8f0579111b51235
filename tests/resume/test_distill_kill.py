"""A distillation killed in a step and in a save continues bit for bit; its teacher is loaded again, not saved."""

import json
from pathlib import Path

import pytest
from runs import SETTINGS, assert_equal_runs, train_here
from test_kill_matrix import chain
from transformers import AutoModelForCausalLM, AutoTokenizer

from tiny_pretrained import save_pretrained

REPLACED = ("model.num_", "model.hidden", "model.max_position", "tokenizer=", "data=", "data.seq_len")
DISTILL = ["objective=distill", "data=chat_jsonl", "data.chat_template=zephyr", "data.packing=off",
           "data.val_fraction=0.2", "data.seq_len=128", "data.micro_batch_size=3", "model=pretrained",
           "optimizer.lr=0.01", "objective.beta=0.5", "objective.on_policy=0.5",
           "objective.max_new_tokens=8"]  # fmt: skip


@pytest.mark.slow
def test_killed_in_a_step_and_a_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Half of the steps train on the student's own completions."""
    student = save_pretrained(tmp_path / "student", attention_dropout=0.1, max_position_embeddings=128)
    teacher = AutoModelForCausalLM.from_pretrained(student)
    teacher.lm_head.weight.data.mul_(1.5)
    teacher.save_pretrained(tmp_path / "teacher")
    AutoTokenizer.from_pretrained(student).save_pretrained(tmp_path / "teacher")
    chats = tmp_path / "chats.jsonl"
    turns = ([{"role": "user", "content": f"and {i}?"}, {"role": "assistant", "content": f"{i} it is" * (1 + i % 3)}]
             for i in range(30))  # fmt: skip
    chats.write_text("".join(json.dumps({"messages": messages}) + "\n" for messages in turns))
    monkeypatch.setattr("runs.SETTINGS", [s for s in SETTINGS if not s.startswith(REPLACED)])
    settings = [*DISTILL, f"model.name_or_path={student}", f"objective.teacher={tmp_path / 'teacher'}",
                f"data.cache_dir={tmp_path / 'cache'}"]  # fmt: skip
    (tmp_path / "whole").mkdir()
    done = train_here(chats, tmp_path / "whole" / "run", *settings)
    assert done.code == 0, done.err
    chain(chats, tmp_path / "run", [("mid_step", 3), ("mid_save", 8)], *settings)
    assert_equal_runs(tmp_path / "whole" / "run", tmp_path / "run")
