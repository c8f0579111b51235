"""Reward models against TRL's RewardTrainer on 50 uneven pairs with margins: losses, gradient norms, accuracy."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers_trl import ask_trl, pairs, tiny_llama, tokenizer_on
from test_dpo_trl import BATCH, BETAS, CLIP, LR, PAIRS, in_our_order, ours
from transformers import AutoModelForSequenceClassification
from workload import MARKED_CHATML

from support import rows

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Writes pairs of one to eight turns, and a model with a scalar head."""
    folder = tmp_path_factory.mktemp("pairs")
    found = [{**pair, "margin": i % 4 / 4} for i, pair in enumerate(pairs(PAIRS, real=False))]
    (folder / "pairs.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in found))
    texts = [[*pair["prompt"], *pair["chosen"], *pair["rejected"]] for pair in found]
    tiny_llama(tokenizer_on(texts, folder / "model"), folder / "model")
    torch.manual_seed(0)
    AutoModelForSequenceClassification.from_pretrained(folder / "model", num_labels=1).save_pretrained(folder / "model")
    return folder


@pytest.mark.parametrize(("micro", "centring"), [(5, 0.0), (2, 0.01)])
def test_losses_and_gradient_norms(micro: int, centring: float, data: Path, tmp_path: Path) -> None:
    found = ours(
        data / "pairs.jsonl", data / "model", None, tmp_path / "run", f"data.micro_batch_size={micro}",
        f"objective.center_rewards_coefficient={centring}", options={"objective": "reward", "data": "preference_jsonl"},
    )  # fmt: skip
    spec: dict[str, Any] = {
        "model": str(data / "model"), "tokenizer": str(data / "model"), "template": MARKED_CHATML,
        "rows": in_our_order(rows(data / "pairs.jsonl")), "keywords": {"center_rewards_coefficient": centring},
        "micro_batch_size": micro, "accumulation": BATCH // micro, "lr": LR, "betas": list(BETAS), "clip": CLIP,
        "max_length": 2048,
    }  # fmt: skip
    reference = ask_trl(tmp_path, "reward", **spec)
    assert len(found) == len(reference) == PAIRS // BATCH
    names = {"train/loss": "loss", "grad_norm": "grad_norm", "train/rewards/margin": "margin",
             "train/rewards/mean": "mean_reward"}  # fmt: skip
    for row, theirs in zip(found, reference, strict=True):
        slack = 1e-6 if row["step"] == 1 else 5e-5  # see test_grpo_trl.py
        for mine, other in names.items():
            assert row[mine] == pytest.approx(theirs[other], rel=slack, abs=slack), (row["step"], mine)
        assert row["train/rewards/accuracy"] == pytest.approx(theirs["accuracy"], abs=1e-7), row["step"]
