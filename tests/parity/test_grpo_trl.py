"""Policy gradients against TRL's GRPOTrainer and RLOOTrainer on the same completions: losses and gradient norms."""

import json
import os
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers_trl import ask_trl, tiny_llama, tokenizer_on

import fixed_rollouts
from inprocess import run
from lmtrain.data.order import step_rows
from support import REPO, Run, rows

pytestmark = pytest.mark.slow

PROMPTS, STEP, GROUP, SEED, LR, MOST = 24, 6, 4, 7, 2e-3, 24
STEPS = PROMPTS // STEP
IMPORTS = {"PYTHONPATH": os.pathsep.join([str(REPO / "src"), str(REPO / "tests" / "helpers")])}  # of the ranks
# lmtrain's settings, TRL's trainer and its settings, and for how many steps a rollout is trained on.
CASES: dict[str, tuple[list[str], str, dict[str, Any], int]] = {
    "grpo": (["objective.loss=grpo"], "grpo", {"loss_type": "grpo"}, 1),
    "grpo_off_policy": (["objective.loss=grpo", "objective.clip_low=0.02", "objective.clip_high=0.02"], "grpo",
                        {"loss_type": "grpo", "epsilon": 0.02}, 2),
    "grpo_kl": (["objective.loss=grpo", "objective.kl_coef=0.3"], "grpo",
                {"loss_type": "grpo", "beta": 0.3, "use_bias_correction_kl": False}, 2),
    "grpo_kl_by_ratio": (["objective.loss=grpo", "objective.kl_coef=0.3", "objective.kl_by_ratio=true"], "grpo",
                         {"loss_type": "grpo", "beta": 0.3, "use_bias_correction_kl": True}, 2),
    "dr_grpo": (["objective.loss=dr_grpo", "objective.clip_low=0.02", "objective.clip_high=0.05"], "grpo",
                {"loss_type": "dr_grpo", "scale_rewards": "none", "epsilon": 0.02, "epsilon_high": 0.05}, 2),
    "dapo": (["objective.loss=dapo", "objective.overlong_buffer=0", "objective.resample=0"], "grpo",
             {"loss_type": "dapo", "epsilon_high": 0.28}, 1),
    "dapo_cut_off": (["objective.loss=dapo", "objective.overlong_buffer=0", "objective.resample=0",
                      "objective.mask_cut_off=true"], "grpo",
                     {"loss_type": "dapo", "epsilon_high": 0.28, "mask_truncated_completions": True}, 1),
    "gspo": (["objective.loss=gspo", "objective.clip_low=0.003", "objective.clip_high=0.004"], "grpo",
             {"loss_type": "grpo", "importance_sampling_level": "sequence", "epsilon": 0.003, "epsilon_high": 0.004},
             2),
    "temperature": (["objective.loss=grpo", "objective.temperature=0.7"], "grpo",
                    {"loss_type": "grpo", "temperature": 0.7}, 1),
    "rloo": (["objective.loss=rloo", "objective.clip_low=0.1", "objective.clip_high=0.1"], "rloo",
             {"epsilon": 0.1, "beta": 0.0}, 2),
    "rloo_kl": (["objective.loss=rloo", "objective.kl_coef=0.2", "objective.kl_estimator=k1"], "rloo",
                {"beta": 0.2}, 2),
}  # fmt: skip


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Writes prompts, a tiny model for them, and their completions: of uneven lengths, some cut off."""
    folder = tmp_path_factory.mktemp("rollouts")
    texts = [f"Count {i} birds and {3 * i} boxes in room {i % 7}" + ", please" * (i % 5) for i in range(PROMPTS)]
    tokenizer = tokenizer_on([[{"role": "user", "content": text}] for text in texts], folder / "model")
    tokenizer.chat_template = None  # prompts are text
    tokenizer.save_pretrained(folder / "model")
    tiny_llama(tokenizer, folder / "model")
    rng, known = random.Random(5), {}
    for text in texts:
        completions = []
        for sample in range(GROUP):
            ids = [rng.randrange(10, 200) for _ in range(MOST if sample == 1 else rng.randint(1, MOST - 1))]
            completions.append(ids if sample == 1 else [*ids, tokenizer.eos_token_id])
        known[" ".join(map(str, tokenizer(text)["input_ids"]))] = completions
    (folder / "completions.json").write_text(json.dumps(known))
    (folder / "prompts.jsonl").write_text("".join(json.dumps({"prompt": text}) + "\n" for text in texts))
    return folder


def settings(data: Path, run_dir: Path, updates: int, *argv: str) -> list[str]:
    return [
        "objective=grpo", "objective._target_=fixed_rollouts.FixedGRPO", "objective.name=custom",
        "run.allow_target=[fixed_rollouts]", "reward=custom", "reward._target_=fixed_rollouts.OfIds",
        f"data.path={data / 'prompts.jsonl'}", "data.val_fraction=0", "data.seq_len=256",
        f"data.global_batch_size={STEP}", "model=pretrained", f"model.name_or_path={data / 'model'}",
        f"optimizer.lr={LR}", "optimizer.betas=[0.9,0.999]", "optimizer.weight_decay=0.0", "schedule=constant",
        "schedule.warmup_steps=0", f"trainer.max_steps={STEPS}", "trainer.gradient_clip_val=1.0",
        "trainer.precision=32-true", "trainer.log_every_n_steps=1", "logger=none", f"seed={SEED}",
        "export.enabled=false", "report.enabled=false", "run.resume=none", f"run.dir={run_dir}",
        f"objective.group_size={GROUP}", f"objective.max_new_tokens={MOST}",
        f"objective.updates_per_rollout={updates}", *argv,
    ]  # fmt: skip


def steps_of(run_dir: Path) -> list[dict[str, float]]:
    return [row for row in rows(run_dir / "metrics.jsonl") if "train/loss" in row]


def reference(data: Path, folder: Path, name: str) -> list[dict[str, float]]:
    _, trainer, keywords, updates = CASES[name]
    order = np.concatenate([step_rows(s, rows=PROMPTS, global_batch_size=STEP, seed=SEED) for s in range(STEPS)])[:, 1]
    prompts = rows(data / "prompts.jsonl")
    spec = {"trainer": trainer, "keywords": keywords, "rows": [prompts[i] for i in order], "model": str(data / "model"),
            "tokenizer": str(data / "model"), "adapter": None, "completions": str(data / "completions.json"),
            "micro_batch_size": 2 * GROUP, "accumulation": STEP // 2, "updates": updates, "lr": LR,
            "betas": [0.9, 0.999], "clip": 1.0, "group": GROUP, "most": MOST}  # fmt: skip
    return ask_trl(folder, "grpo", **spec)


@pytest.mark.parametrize("name", CASES)
def test_losses_and_gradient_norms(
    name: str, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, forked_lmtrain: Run
) -> None:
    """They agree for micro-batches of one prompt and of three, and on two ranks."""
    monkeypatch.setenv(fixed_rollouts.FILE, str(data / "completions.json"))
    argv, updates = CASES[name][0], CASES[name][3]
    theirs = reference(data, tmp_path, name)
    for micro in (1, 3):
        ended = run("train", *settings(data, tmp_path / str(micro), updates, f"data.micro_batch_size={micro}", *argv))
        assert ended.code == 0, ended.err
        compare(steps_of(tmp_path / str(micro)), theirs, (name, micro))
    done = forked_lmtrain("train", *settings(data, tmp_path / "ranks", updates, "data.micro_batch_size=1",
                                      "trainer.devices=2", "trainer.accelerator=cpu", *argv), env=IMPORTS)  # fmt: skip
    assert done.returncode == 0, done.stderr
    compare(steps_of(tmp_path / "ranks"), theirs, (name, "two ranks"))


def compare(found: list[dict[str, float]], theirs: list[dict[str, float]], name: Any) -> None:
    assert len(found) == len(theirs) == STEPS
    for ours, trl in zip(found, theirs, strict=True):
        # From the second step on, the weights include AdamW's updates; the first have the size of the learning rate
        # for any gradient: where a gradient is nothing but rounding, so is the update.
        slack = 1e-6 if ours["step"] == 1 else 5e-5
        assert ours["train/loss"] == pytest.approx(trl["loss"], rel=slack, abs=slack), (name, ours["step"])
        assert ours["grad_norm"] == pytest.approx(trl["grad_norm"], rel=slack, abs=slack), (name, ours["step"])
        if name[0] in ("gspo", "rloo", "rloo_kl"):  # TRL's is a share of completions, lmtrain's of tokens
            continue
        # TRL averages the token means of micro-batches, lmtrain all tokens of the step.
        assert ours["train/clip_fraction"] == pytest.approx(trl["clipped"], abs=0.02), (name, ours["step"])
