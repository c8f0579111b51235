"""Distillation against TRL's GKDTrainer on the same conversations: losses and gradient norms."""

import json
from pathlib import Path

import pytest
import torch
from helpers_trl import ask_trl, pairs, tiny_llama, tokenizer_on
from test_dpo_trl import BATCH, BETAS, CLIP, LR, MICRO_BATCH, PAIRS, in_our_order, ours
from transformers import AutoModelForCausalLM, AutoTokenizer
from workload import MARKED_CHATML

from support import rows

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Writes conversations of two turns, a student, and a teacher with other weights."""
    folder = tmp_path_factory.mktemp("conversations")
    found = [{"messages": [{"role": "user", "content": pair["prompt"][-1]["content"]}, *pair["chosen"]]}
             for pair in pairs(PAIRS, real=False)]  # fmt: skip
    (folder / "chats.jsonl").write_text("".join(json.dumps(row) + "\n" for row in found))
    tokenizer = tokenizer_on([row["messages"] for row in found], folder / "student")
    tiny_llama(tokenizer, folder / "student")
    teacher = AutoModelForCausalLM.from_pretrained(folder / "student")
    torch.manual_seed(4)
    with torch.no_grad():
        for p in teacher.parameters():
            p += 0.05 * torch.randn_like(p)
    teacher.save_pretrained(folder / "teacher")
    AutoTokenizer.from_pretrained(folder / "student").save_pretrained(folder / "teacher")
    return folder


@pytest.mark.parametrize("beta", [0.0, 0.5, 1.0])
def test_losses_and_gradient_norms(beta: float, data: Path, tmp_path: Path) -> None:
    found = ours(
        data / "chats.jsonl", data / "student", None, tmp_path / "run", f"objective.teacher={data / 'teacher'}",
        f"objective.beta={beta}", "data.packing=off", options={"objective": "distill", "data": "chat_jsonl"},
    )  # fmt: skip
    spec = {"model": str(data / "student"), "teacher": str(data / "teacher"), "tokenizer": str(data / "student"),
            "template": MARKED_CHATML, "rows": in_our_order(rows(data / "chats.jsonl")), "keywords": {"beta": beta},
            "micro_batch_size": MICRO_BATCH, "accumulation": BATCH // MICRO_BATCH, "lr": LR, "betas": list(BETAS),
            "clip": CLIP, "max_length": 2048, "adapter": None}  # fmt: skip
    reference = ask_trl(tmp_path, "gkd", **spec)
    assert len(found) == len(reference) == PAIRS // BATCH
    for row, theirs in zip(found, reference, strict=True):
        slack = 1e-6 if row["step"] == 1 else 5e-5  # see test_grpo_trl.py
        assert row["train/loss"] == pytest.approx(theirs["loss"], rel=slack, abs=slack), row["step"]
        assert row["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=slack, abs=slack), row["step"]
