"""Twenty LoRA steps against TRL's SFTTrainer: same rows and order, step losses and gradient norms to 1e-3 in fp32."""

import json
from pathlib import Path

import numpy as np
import pytest
from helpers_trl import Messages, ask_trl, dialogues, lora_on, smollm2_weights, tiny_llama, tokenizer_on
from workload import MARKED_CHATML

from inprocess import run
from lmtrain.data.order import step_rows
from support import rows

pytestmark = pytest.mark.slow

STEPS, BATCH, MICRO_BATCH, SEED, LR, BETAS, CLIP = 20, 8, 4, 7, 1e-3, (0.9, 0.999), 0.5


def in_our_order(conversations: list[Messages]) -> list[Messages]:
    steps = [step_rows(s, rows=len(conversations), global_batch_size=BATCH, seed=SEED) for s in range(STEPS)]
    return [conversations[row] for row in np.concatenate(steps)[:, 1]]


def ours(conversations: list[Messages], model: Path, adapter: Path, folder: Path, *argv: str) -> list[dict[str, float]]:
    data = folder / "chats.jsonl"
    data.write_text("".join(json.dumps({"messages": turns}) + "\n" for turns in conversations))
    settings = {
        "objective": "sft",
        "data": "chat_jsonl",
        "data.path": data,
        "data.val_fraction": 0,
        "data.seq_len": 512,
        "data.chat_template": "chatml",
        "data.packing": "off",
        "data.global_batch_size": BATCH,
        "data.micro_batch_size": MICRO_BATCH,
        "model": "pretrained",
        "model.name_or_path": model,
        "peft": "lora",
        "peft.adapter": adapter,
        "optimizer.lr": LR,
        "optimizer.betas": list(BETAS),
        "optimizer.weight_decay": 0.0,
        "schedule": "constant",
        "trainer.max_steps": STEPS,
        "trainer.gradient_clip_val": CLIP,
        "trainer.precision": "32-true",
        "trainer.log_every_n_steps": 1,
        "logger": "none",
        "seed": SEED,
        "export.enabled": "false",
        "run.dir": folder / "run",
    }
    ended = run("train", *(f"{key}={value}" for key, value in settings.items()), *argv)
    assert ended.code == 0, ended.err
    return [row for row in rows(folder / "run" / "metrics.jsonl") if "train/loss" in row]


@pytest.mark.parametrize("which", ["tiny_llama", "smollm2"])
def test_twenty_lora_steps(which: str, tmp_path: Path) -> None:
    real = which == "smollm2"
    model = smollm2_weights() if real else tmp_path / "model"
    # SmolLM2 gets only the first turns of real dialogues, so that it takes minutes.
    conversations = [turns[:4] if real else turns for turns in dialogues(STEPS * BATCH, real=real)]
    if not real:
        tiny_llama(tokenizer_on(conversations, model), model)
    adapter = lora_on(model, tmp_path / "adapter")
    reference = ask_trl(
        tmp_path,
        "sft",
        rows=in_our_order(conversations),
        model=str(model),
        tokenizer=str(model),
        adapter=str(adapter),
        template=MARKED_CHATML,
        max_length=512,
        micro_batch_size=MICRO_BATCH,
        accumulation=BATCH // MICRO_BATCH,
        lr=LR,
        betas=BETAS,
        clip=CLIP,
    )
    found = ours(conversations, model, adapter, tmp_path)
    assert len(found) == len(reference) == STEPS
    for row, theirs in zip(found, reference, strict=True):
        assert row["train/loss"] == pytest.approx(theirs["loss"], abs=1e-3), row["step"]
        assert row["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=1e-3), row["step"]
        assert row["lr"] == pytest.approx(theirs["learning_rate"])
    assert found[-1]["train/loss"] < found[0]["train/loss"] - 0.1, "nothing was learned, so little was compared"
    assert any(row["grad_norm"] > CLIP for row in found), "nothing was clipped"
