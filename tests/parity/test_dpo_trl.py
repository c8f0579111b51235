"""Preference optimization against TRL's DPOTrainer on 50 pairs: losses, rewards and gradient norms to 1e-4 in fp32."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers_trl import ask_trl, lora_on, pairs, tiny_llama, tokenizer_on
from workload import MARKED_CHATML

from inprocess import run
from lmtrain.data.order import step_rows
from support import rows

pytestmark = pytest.mark.slow

PAIRS, BATCH, MICRO_BATCH, SEED, LR, BETAS, CLIP = 50, 10, 5, 7, 4e-3, (0.9, 0.999), 5.0

# The losses that both implement: name, lmtrain's settings, TRL's.
LOSSES: list[tuple[str, list[str], dict[str, Any]]] = [
    ("sigmoid", [], {}),
    ("beta", ["objective.beta=0.5"], {"beta": 0.5}),
    ("robust", ["objective.loss=robust", "objective.label_smoothing=0.1"],
     {"loss_type": ["robust"], "label_smoothing": 0.1}),
    # TRL's sigmoid loss ignores label_smoothing. cDPO is 2 (1 - eps) sigmoid - (1 - 2 eps) robust, here with eps = 0.1.
    ("cdpo", ["objective.label_smoothing=0.1"],
     {"loss_type": ["sigmoid", "robust"], "loss_weights": [1.8, -0.8], "label_smoothing": 0.1}),
    ("ipo", ["objective.loss=ipo"], {"loss_type": ["ipo"]}),
    ("hinge", ["objective.loss=hinge"], {"loss_type": ["hinge"]}),
    ("apo_zero", ["objective.loss=apo_zero"], {"loss_type": ["apo_zero"]}),
    ("apo_down", ["objective.loss=apo_down"], {"loss_type": ["apo_down"]}),
    ("per_token", ["objective.length_normalize=true", "objective.beta=1"],
     {"loss_type": ["sigmoid_norm"], "beta": 1.0}),
]  # fmt: skip
# TRL averages this term over a forward pass's tokens, the paper over an answer's: the same for a single pair.
SFT_TERM = ("rpo", ["objective.sft_weight=0.5"], {"loss_type": ["sigmoid", "sft"], "loss_weights": [1.0, 0.5]})


def in_our_order(found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    steps = [step_rows(s, rows=PAIRS, global_batch_size=BATCH, seed=SEED) for s in range(PAIRS // BATCH)]
    return [found[row] for row in np.concatenate(steps)[:, 1]]


PREFERENCES = {"objective": "dpo", "data": "preference_jsonl"}


def ours(
    data: Path, model: Path, adapter: Path | None, run_dir: Path, *argv: str, options: dict[str, str] = PREFERENCES
) -> list[dict[str, float]]:
    """Returns the logged steps of a run set up as `trl_spec` sets up TRL; `options` name the objective and its data."""
    settings: dict[str, Any] = {
        **options,
        "data.path": data,
        "data.val_fraction": 0,
        "data.seq_len": 2048,
        "data.chat_template": "chatml",
        "data.train_on": "completion",
        "data.global_batch_size": BATCH,
        "data.micro_batch_size": MICRO_BATCH,
        "model": "pretrained",
        "model.name_or_path": model,
        "optimizer.lr": LR,
        "optimizer.betas": list(BETAS),
        "optimizer.weight_decay": 0.0,
        "schedule": "constant",
        "trainer.max_steps": PAIRS // BATCH,
        "trainer.gradient_clip_val": CLIP,
        "trainer.precision": "32-true",
        "trainer.log_every_n_steps": 1,
        "logger": "none",
        "seed": SEED,
        "export.enabled": "false",
        "run.dir": run_dir,
        **({"peft": "lora", "peft.adapter": adapter} if adapter else {}),
    }
    ended = run("train", *(f"{key}={value}" for key, value in settings.items()), *argv)
    assert ended.code == 0, ended.err
    return [row for row in rows(run_dir / "metrics.jsonl") if "train/loss" in row]


def compare(found: list[dict[str, float]], reference: list[dict[str, float]], name: str) -> None:
    assert len(found) == len(reference) == PAIRS // BATCH
    names = {
        "train/loss": "loss",
        "grad_norm": "grad_norm",
        "train/rewards/chosen": "rewards/chosen",
        "train/rewards/rejected": "rewards/rejected",
        "train/rewards/margin": "rewards/margins",
        "train/logps/chosen": "logps/chosen",
        "train/logps/rejected": "logps/rejected",
    }
    for row, theirs in zip(found, reference, strict=True):
        for mine, other in names.items():
            assert row[mine] == pytest.approx(theirs[other], rel=1e-4, abs=1e-4), (name, row["step"], mine)
        # A margin near zero may have either sign.
        accuracy = theirs["rewards/accuracies"]
        assert row["train/rewards/accuracy"] == pytest.approx(accuracy, abs=1.01 / BATCH), (name, row["step"])
    assert max(abs(row["train/rewards/margin"]) for row in found[1:]) > 0.01, "the policy never left its reference"


@pytest.fixture(scope="module", params=[pytest.param("real", marks=pytest.mark.nightly), "made"])
def data(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Writes pairs to a file, and a tiny model for them."""
    folder = tmp_path_factory.mktemp("pairs")
    found = pairs(PAIRS, real=request.param == "real")
    (folder / "pairs.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in found))
    texts = [[*pair["prompt"], *pair["chosen"], *pair["rejected"]] for pair in found]
    tiny_llama(tokenizer_on(texts, folder / "model"), folder / "model")
    return folder / "pairs.jsonl", folder / "model"


@pytest.mark.parametrize("start", ["full", "lora", "continued_lora"])
def test_losses_rewards_and_gradients(start: str, data: tuple[Path, Path], tmp_path: Path) -> None:
    path, model = data
    adapter = None if start == "full" else lora_on(model, tmp_path / "adapter", trained=start == "continued_lora")
    losses = LOSSES if start == "lora" else LOSSES[:1]
    spec = trl_spec(path, model, adapter)
    reference = ask_trl(tmp_path, "dpo", losses={name: keywords for name, _, keywords in losses}, **spec)
    for name, argv, _ in losses:
        compare(ours(path, model, adapter, tmp_path / name, *argv), reference[name], name)


def test_with_an_sft_term(data: tuple[Path, Path], tmp_path: Path) -> None:
    path, model = data
    adapter = lora_on(model, tmp_path / "adapter")
    name, argv, keywords = SFT_TERM
    spec = {**trl_spec(path, model, adapter), "micro_batch_size": 1, "accumulation": BATCH}
    (reference,) = ask_trl(tmp_path, "dpo", losses={name: keywords}, **spec).values()
    compare(ours(path, model, adapter, tmp_path / name, *argv), reference, name)


def trl_spec(path: Path, model: Path, adapter: Path | None) -> dict[str, Any]:
    return {
        "rows": in_our_order(rows(path)),
        "model": str(model),
        "tokenizer": str(model),
        "adapter": str(adapter) if adapter else None,
        "template": MARKED_CHATML,
        "max_length": 2048,
        "micro_batch_size": MICRO_BATCH,
        "accumulation": BATCH // MICRO_BATCH,
        "lr": LR,
        "betas": BETAS,
        "clip": CLIP,
    }
