"""A pretraining run against a plain PyTorch loop: same batches, losses and gradient norms to 1e-5 in fp32."""

import copy
import math
from pathlib import Path

import pytest
import torch
from rich.console import Console
from torch.nn import functional as F

from lmtrain.config import compose as config
from lmtrain.config.batch import Stages
from lmtrain.data.loaders import StepDataset
from lmtrain.distributed import devices
from lmtrain.run import build
from lmtrain.run_folder import folder as run_dir
from support import TINY, rows

LR, CLIP, WARMUP = 3e-3, 0.5, 3


def lr_at(step: int, total: int) -> float:
    """Returns the rate: linear warmup over WARMUP steps, then half a cosine down to a tenth of the peak at `total`."""
    if step < WARMUP:
        return LR * (step + 1) / (WARMUP + 1)
    progress = (step - WARMUP) / (total - WARMUP)
    return LR * (0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * progress)))


def plain_loop(model: torch.nn.Module, steps: list[list[dict[str, torch.Tensor]]]) -> list[tuple[float, float]]:
    """Returns (loss, gradient norm) per step: the whole global batch at once, one mean over its tokens."""
    matrices = [p for p in model.parameters() if p.ndim >= 2]
    vectors = [p for p in model.parameters() if p.ndim < 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=LR, betas=(0.9, 0.95), eps=1e-8, fused=False, foreach=False)
    out = []
    for step, micro_batches in enumerate(steps):
        for group in optimizer.param_groups:
            group["lr"] = lr_at(step, len(steps))
        input_ids, labels = (torch.cat([m[k] for m in micro_batches]) for k in ("input_ids", "labels"))
        logits = model(input_ids, use_cache=False).logits
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten())
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad()
        out.append((loss.item(), norm.item()))
    return out


@pytest.mark.parametrize("micro_batch_size", [8, 2], ids=["accumulation1", "accumulation4"])
@pytest.mark.parametrize("family", ["gpt_nano", "llama_nano"])
def test_twenty_steps_and_a_ragged_last_one(family: str, micro_batch_size: int, corpus: Path, tmp_path: Path) -> None:
    cfg = config.check(
        config.compose(
            [
                *TINY,
                f"model={family}",
                "data=text",
                f"data.path={corpus}",
                "data.global_batch_size=8",
                f"data.micro_batch_size={micro_batch_size}",
                "data.num_samples=4",
                "data.val_fraction=0",
                f"optimizer.lr={LR}",
                f"schedule.warmup_steps={WARMUP}",
                "schedule.min_lr_ratio=0.1",
                f"trainer.gradient_clip_val={CLIP}",
                "trainer.max_steps=null",
                "trainer.max_epochs=1",
                f"run.dir={tmp_path / 'run'}",
            ]
        )
    )
    torch.set_num_threads(1)
    devices.resolve_auto(cfg)
    run = build.build(cfg, run_dir.open_run(cfg), Console(quiet=True), started=0.0)
    plain = copy.deepcopy(run.objective.model.model)
    plain.set_attn_implementation("eager")  # transformers' own attention, unlike the run
    dataset = StepDataset(
        run.corpus.train,
        seed=cfg.seed,
        sizes=Stages.constant(8),
        micro_batch_size=8,
        max_epochs=1,
        rank=0,
        world_size=1,
    )
    steps = [dataset[s]["micro_batches"] for s in range(run.total_steps)]
    sizes = [sum(len(m["labels"]) for m in step) for step in steps]
    assert len(steps) >= 20
    assert sizes[:-1] == [8] * (len(steps) - 1)
    assert 0 < sizes[-1] < 8, "the last step must be ragged for this test to mean something"

    run.trainer.fit(run.objective, datamodule=run.datamodule)
    ours = [r for r in rows(run.dir.metrics) if "train/loss" in r]
    assert len(ours) == len(steps)
    for row, (loss, norm) in zip(ours, plain_loop(plain, steps), strict=True):
        assert row["train/loss"] == pytest.approx(loss, abs=1e-5), row["step"]
        assert row["grad_norm"] == pytest.approx(norm, rel=1e-4), row["step"]
        assert row["lr"] == pytest.approx(lr_at(row["step"] - 1, len(steps)), rel=1e-9)
    for (name, a), b in zip(run.objective.model.model.named_parameters(), plain.parameters(), strict=True):
        assert torch.allclose(a, b, atol=2e-5), name
