"""Two ranks (gloo) give the numbers of one process for DPO with precomputed reference log-probabilities and for KTO."""

import json
from pathlib import Path

import pytest

from chats import write_rows
from support import TINY, Run, rows

SETTINGS = [
    *TINY, "objective=dpo", "data=preference_jsonl", "data.chat_template=zephyr", "model.max_position_embeddings=1024",
    "data.seq_len=512", "data.val_fraction=0.2", "data.global_batch_size=8", "data.micro_batch_size=2",
    "trainer.max_steps=5", "trainer.val_check_interval=2", "optimizer.lr=1e-2", "schedule=constant",
    "callbacks.samples.every_n_validations=0", "export.enabled=false",
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_numbers_do_not_depend_on_the_ranks(strategy: str, tmp_path: Path, forked_lmtrain: Run) -> None:
    pairs = write_rows(tmp_path / "pairs.jsonl", "preference_jsonl")
    for devices, how in ((1, "auto"), (2, strategy)):
        settings = [f"trainer.devices={devices}", f"trainer.strategy={how}", "objective.reference=precomputed"]
        fixed = [
            f"data.path={pairs}",
            f"run.dir={tmp_path / str(devices)}",
            f"data.cache_dir={tmp_path / f'cache_{devices}'}",
        ]
        done = forked_lmtrain("train", *SETTINGS, *settings, *fixed, "trainer.accelerator=cpu", timeout=600)
        assert done.returncode == 0, done.stdout + done.stderr
        assert ("reference log-probabilities on 2 ranks" in done.stdout) is (devices == 2)
    one, two = (rows(tmp_path / n / "metrics.jsonl") for n in ("1", "2"))
    assert one[0]["train/rewards/margin"] == 0
    assert one[-1]["val/rewards/margin"] > 0
    for a, b in zip(one, two, strict=True):
        for key in a:
            if key.startswith(("train/", "val/", "grad")):
                assert b[key] == pytest.approx(a[key], rel=1e-4, abs=1e-5), (a["step"], key)
    assert json.loads((tmp_path / "2" / "summary.json").read_text())["status"] == "finished"


@pytest.mark.slow
def test_unpaired_answers_do_not_depend_on_the_ranks(tmp_path: Path, forked_lmtrain: Run) -> None:
    """The KL reference point and the means over each kind of answer are computed over all ranks."""
    answers = write_rows(tmp_path / "answers.jsonl", "unpaired_jsonl")
    changed = ["objective=kto", "data=unpaired_jsonl", "data.global_batch_size=6", "trainer.max_steps=4"]
    for devices, how, micro in ((1, "auto", 6), (2, "ddp", 1)):
        settings = [f"trainer.devices={devices}", f"trainer.strategy={how}", f"data.micro_batch_size={micro}"]
        fixed = [f"data.path={answers}", f"run.dir={tmp_path / str(devices)}", "trainer.limit_val_batches=null"]
        done = forked_lmtrain("train", *SETTINGS, *changed, *settings, *fixed, "trainer.accelerator=cpu", timeout=600)
        assert done.returncode == 0, done.stdout + done.stderr
    one, two = (rows(tmp_path / n / "metrics.jsonl") for n in ("1", "2"))
    assert one[-1]["val/kl"] > 0
    assert "train/rewards/margin" in one[-2]
    for a, b in zip(one, two, strict=True):
        assert [key for key in a if "rewards" in key] == [key for key in b if "rewards" in key]
        for key in a:
            if key.startswith(("train/", "val/", "grad")):
                assert b[key] == pytest.approx(a[key], rel=1e-4, abs=1e-5), (a["step"], key)
