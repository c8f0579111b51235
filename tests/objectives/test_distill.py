"""Distillation runs on the data and on the student's own answers, and refused teachers."""

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from inprocess import Ended, run
from lmtrain.objectives.distill import Distill
from support import REPO, Run, rows
from tiny_pretrained import save_pretrained

DISTILL = [
    "objective=distill", "data=chat_jsonl", "data.chat_template=zephyr", "data.packing=off", "data.val_fraction=0",
    "data.seq_len=128", "data.global_batch_size=8", "data.micro_batch_size=4", "model=pretrained", "schedule=constant",
    "schedule.warmup_steps=0", "optimizer.lr=3e-3", "optimizer.weight_decay=0", "trainer.precision=32-true",
    "trainer.max_steps=12", "trainer.log_every_n_steps=1", "logger=none", "export.enabled=false",
    "report.enabled=false", "run.resume=none",
]  # fmt: skip
SHORT = "objective.max_new_tokens=12"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Writes questions and answers, a student, and a teacher whose weights differ slightly from the student's."""
    path = tmp_path_factory.mktemp("distill")
    student = save_pretrained(path / "student", max_position_embeddings=128)
    teacher = AutoModelForCausalLM.from_pretrained(student)
    torch.manual_seed(1)
    with torch.no_grad():
        for p in teacher.parameters():
            p += 0.03 * torch.randn_like(p)
    teacher.save_pretrained(path / "teacher")
    AutoTokenizer.from_pretrained(student).save_pretrained(path / "teacher")
    turns = ([{"role": "user", "content": f"and {i}?"}, {"role": "assistant", "content": f"{i} it is" * (1 + i % 3)}]
             for i in range(32))  # fmt: skip
    (path / "chats.jsonl").write_text("".join(json.dumps({"messages": messages}) + "\n" for messages in turns))
    return path


def distill(folder: Path, run_dir: Path, *argv: str) -> Ended:
    return run("train", *DISTILL, f"data.path={folder / 'chats.jsonl'}", f"model.name_or_path={folder / 'student'}",
               f"objective.teacher={folder / 'teacher'}", f"run.dir={run_dir}", *argv)  # fmt: skip


def losses(run_dir: Path) -> list[dict[str, float]]:
    return [row for row in rows(run_dir / "metrics.jsonl") if "train/loss" in row]


def test_the_student_comes_nearer_on_its_own_answers(folder: Path, tmp_path: Path) -> None:
    """With reverse KL and half of the steps on the data, the loss falls, and the batch split doesn't change the run."""
    found = {}
    for micro in (4, 2):
        ended = distill(folder, tmp_path / str(micro), "objective.beta=1", "objective.on_policy=0.5", SHORT,
                        f"data.micro_batch_size={micro}")  # fmt: skip
        assert ended.code == 0, ended.err
        found[micro] = losses(tmp_path / str(micro))
    shares = [row["train/on_policy"] for row in found[4]]
    assert {round(share, 6) for share in shares} == {0.0, 1.0}
    for whole, split in zip(found[4], found[2], strict=True):
        assert whole["train/loss"] == pytest.approx(split["train/loss"], rel=1e-4)
        assert whole["grad_norm"] == pytest.approx(split["grad_norm"], rel=1e-3)
    own = [row["train/loss"] for row in found[4] if row["train/on_policy"]]
    assert own[-1] < 0.8 * own[0]


def test_rows_with_one_prompt_get_answers_of_their_own(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Eight rows ask the same: their sampled answers differ, and are the same however the step is split."""
    row = {"messages": [{"role": "user", "content": "and?"}, {"role": "assistant", "content": "so"}]}
    (tmp_path / "same.jsonl").write_text("".join(json.dumps(row) + "\n" for _ in range(8)))
    written, compute = list[list[int]](), Distill._written

    def kept(*args: Any) -> list[list[int]]:
        written.extend(answers := compute(*args))
        return answers

    monkeypatch.setattr(Distill, "_written", kept)
    for micro in (8, 2):
        ended = distill(folder, tmp_path / str(micro), "objective.on_policy=1", SHORT, "trainer.max_steps=1",
                        f"data.path={tmp_path}/same.jsonl", f"data.micro_batch_size={micro}")  # fmt: skip
        assert ended.code == 0, ended.err
    assert written[:8] == written[8:]
    assert len(set(map(tuple, written))) == 8


def test_the_routers_of_a_student_are_balanced(folder: Path, tmp_path: Path) -> None:
    """A student that equals its teacher has no divergence to learn from: its gradient is that of the routers' loss."""
    student = save_pretrained(tmp_path / "mixture", "qwen3_moe", max_position_embeddings=128, router_aux_loss_coef=0.1)
    argv = [f"model.name_or_path={student}", f"objective.teacher={student}", "objective.on_policy=0.5", SHORT]
    ended = distill(folder, tmp_path / "run", *argv, "trainer.max_steps=4")
    assert ended.code == 0, ended.err
    first, *_ = found = losses(tmp_path / "run")
    assert first["train/loss"] == pytest.approx(0, abs=1e-6)
    assert first["grad_norm"] > 1e-3
    assert all(0.9 < row["train/router/load_balance"] < 2.1 for row in found)
    assert {row["train/on_policy"] for row in found} == {0.0, 1.0}


def test_answers_that_a_model_has_no_positions_for_are_refused(folder: Path, tmp_path: Path) -> None:
    student = save_pretrained(tmp_path / "gpt2", "gpt2", n_positions=128)
    argv = [f"model.name_or_path={student}", f"objective.teacher={student}"]
    ended = distill(folder, tmp_path / "run", *argv, "objective.on_policy=1", "objective.max_new_tokens=125")
    assert ended.code == 2, ended.err
    assert re.search(r"a prompt has \d+ tokens, and the models' 128 positions leave room for 3: lower", ended.err)
    assert distill(folder, tmp_path / "run", *argv, "trainer.max_steps=1").code == 0  # the data's answers fit


def test_rows_of_the_embeddings_that_no_token_uses_are_not_sampled(folder: Path, tmp_path: Path) -> None:
    """The teacher has no embeddings for the rows by which the student's are padded."""
    student = save_pretrained(tmp_path / "padded", spare_rows=255, max_position_embeddings=128)
    argv = [f"model.name_or_path={student}", "objective.on_policy=1", SHORT, "trainer.max_steps=2"]
    ended = distill(folder, tmp_path / "run", *argv)
    assert ended.code == 0, ended.err


def test_predictions_are_of_the_data() -> None:
    """Outside training, as in trainer.predict, the answers are not replaced by samples."""
    objective = Distill.__new__(Distill)
    pl.LightningModule.__init__(objective)
    objective.seed, objective._trainer = 0, SimpleNamespace(global_step=0)
    objective.options = SimpleNamespace(on_policy=1.0)
    batch = {"input_ids": torch.tensor([[1, 2, 3]]), "labels": torch.tensor([[-100, 3, 4]])}
    objective.eval().look_ahead([batch], torch.tensor(2))
    assert not objective.is_on_policy
    assert batch["labels"].tolist() == [[-100, 3, 4]]


@pytest.mark.slow
def test_two_ranks_learn_what_one_does(folder: Path, tmp_path: Path, forked_lmtrain: Run) -> None:
    """Loss and gradients equal those of one rank, in steps on the data and on the student's own answers."""
    given = [*DISTILL, f"data.path={folder / 'chats.jsonl'}", f"model.name_or_path={folder / 'student'}",
             f"objective.teacher={folder / 'teacher'}", "objective.on_policy=0.5", "objective.beta=0.5", SHORT,
             "trainer.max_steps=4", "trainer.accelerator=cpu", "data.micro_batch_size=2"]  # fmt: skip
    for devices in (1, 2):
        done = forked_lmtrain("train", *given, f"trainer.devices={devices}", f"run.dir={tmp_path / str(devices)}",
                       env={"PYTHONPATH": str(REPO / "src")})  # fmt: skip
        assert done.returncode == 0, done.stderr
    one, two = losses(tmp_path / "1"), losses(tmp_path / "2")
    assert len(one) == len(two) == 4
    assert {row["train/on_policy"] for row in one} == {0.0, 1.0}
    for ours, theirs in zip(one, two, strict=True):
        slack = 1e-6 if ours["step"] == 1 else 2e-5  # AdamW's first updates divide by gradients near 0
        for key in ("train/loss", "train/on_policy", "grad_norm"):
            assert ours[key] == pytest.approx(theirs[key], rel=slack, abs=slack), (ours["step"], key)


def test_a_teacher_with_another_tokenizer_is_refused(folder: Path, tmp_path: Path) -> None:
    other = AutoTokenizer.from_pretrained(folder / "student")
    other.add_tokens(["<|more|>"])
    teacher = tmp_path / "other"
    AutoModelForCausalLM.from_pretrained(folder / "teacher").save_pretrained(teacher)
    other.save_pretrained(teacher)
    ended = distill(folder, tmp_path / "run", f"objective.teacher={teacher}")
    assert ended.code == 2
    assert "has another tokenizer" in ended.err
    ended = distill(folder, tmp_path / "run", "objective.on_policy=1", "data.packing=greedy")
    assert ended.code == 2
    assert "Set data.packing=off" in ended.err
