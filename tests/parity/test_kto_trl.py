"""Unpaired preferences against TRL's KTOTrainer on 50 answers: losses and gradient norms to 1e-4 in fp32."""

import json
from pathlib import Path

import pytest
from helpers_trl import ask_trl, lora_on, pairs, tiny_llama, tokenizer_on
from test_dpo_trl import BATCH, PAIRS, in_our_order, ours, trl_spec

from support import rows

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Writes answers, desirable and undesirable in mixed order, and a tiny model for them."""
    folder = tmp_path_factory.mktemp("answers")
    found = [
        {"prompt": pair["prompt"], "completion": pair["chosen" if good else "rejected"], "label": good}
        for i, pair in enumerate(pairs(PAIRS, real=False))
        for good in [i % 3 != 0]
    ]
    (folder / "answers.jsonl").write_text("".join(json.dumps(row) + "\n" for row in found))
    tiny_llama(
        tokenizer_on([[*row["prompt"], *row["completion"]] for row in found], folder / "model"), folder / "model"
    )
    return folder / "answers.jsonl", folder / "model"


@pytest.mark.parametrize("start", ["full", "lora"])
def test_losses_and_gradients(start: str, data: tuple[Path, Path], tmp_path: Path) -> None:
    path, model = data
    adapter = lora_on(model, tmp_path / "adapter") if start == "lora" else None
    keywords = {"beta": 0.1, "desirable_weight": 1.5, "undesirable_weight": 0.5}
    typed = [f"objective.{name}={v}" for name, v in keywords.items()]
    options = {"objective": "kto", "data": "unpaired_jsonl"}
    found = ours(path, model, adapter, tmp_path / "run", *typed, options=options)
    # TRL's reference point is a micro-batch's, lmtrain's the step's: the same if a step is one micro-batch.
    spec = {**trl_spec(path, model, adapter), "rows": in_our_order(rows(path)), "keywords": keywords}
    spec |= {"micro_batch_size": BATCH, "accumulation": 1}
    reference = ask_trl(tmp_path, "kto", **spec)
    assert len(found) == len(reference) == PAIRS // BATCH
    for row, theirs in zip(found, reference, strict=True):
        assert row["train/loss"] == pytest.approx(theirs["loss"], rel=1e-4, abs=1e-4), row["step"]
        assert row["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=1e-4, abs=1e-4), row["step"]
        assert row["train/kl"] == pytest.approx(theirs["kl"], rel=1e-3, abs=1e-4), row["step"]
        for ours_, of_trl in (("chosen", "chosen"), ("rejected", "rejected"), ("margin", "margins")):
            ours_reward, their_reward = row[f"train/rewards/{ours_}"], theirs[f"rewards/{of_trl}"]
            assert ours_reward == pytest.approx(their_reward, rel=1e-3, abs=1e-4), (row["step"], ours_)
    assert any(row["train/kl"] > 0.01 for row in found), "the reference point was never needed"
