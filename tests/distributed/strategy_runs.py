"""Runs of one process and of two ranks, whose numbers are compared."""

import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from inprocess import run
from ranks_again import TORCHRUN, run_ranks
from support import EXPORT, SAMPLES, TINY, rows

BATCH = ["data.global_batch_size=8", "data.micro_batch_size=2", "trainer.max_steps=20", "trainer.val_check_interval=10",
         "trainer.limit_val_batches=3", "trainer.save_every_n_steps=10", "checkpoint.keep_last=2",
         "trainer.gradient_clip_val=0.5", EXPORT, SAMPLES]  # fmt: skip
CAUSAL = [*TINY, *BATCH, "data=text"]
SFT = [*TINY, *BATCH, "objective=sft", "data=chat_jsonl", "data.chat_template=vicuna", "data.packing=off",
       "model.max_position_embeddings=512", "data.seq_len=256", "data.val_fraction=0.2"]  # fmt: skip
LORA = [*SFT, "model=pretrained", "peft=lora", "peft.r=4", "optimizer.lr=1e-2"]
DPO = [*TINY, *BATCH, "objective=dpo", "data=preference_jsonl", "data.chat_template=vicuna", "data.val_fraction=0.2",
       "data.seq_len=512", "model=pretrained", "optimizer.lr=3e-3"]  # fmt: skip
DPO_LORA = [*DPO, "peft=lora", "peft.r=4"]
EXACT = 1e-5  # relative tolerance of losses and gradient norms


def names_of(settings: list[str]) -> list[str]:
    """Drops TINY's model sizes for a pretrained model, which has its own."""
    pretrained = "model=pretrained" in settings
    return [s for s in settings if not (pretrained and s.startswith("model.") and "name_or_path" not in s)]


def same_weights(one: Path, other: Path) -> None:
    """Asserts that two safetensors files have the same names and, up to rounding, the same values."""
    a, b = load_file(one), load_file(other)
    assert a.keys() == b.keys()
    for key in a:
        torch.testing.assert_close(b[key], a[key], rtol=1e-3, atol=1e-4)


class Runs:
    """Named runs: those of one process run in this process, those of several ranks run together in one launch."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.jobs: dict[str, list[str]] = {}

    def one(self, name: str, *settings: str) -> None:
        done = run("train", *names_of(list(settings)), f"run.dir={self.folder / name}")
        assert done.code == 0, done.err

    def two(self, name: str, *settings: str) -> None:
        self.jobs[name] = [*names_of(list(settings)), f"run.dir={self.folder / name}"]

    def launch(self, ranks: int = 2) -> None:
        jobs = self.folder / "jobs.json"
        jobs.write_text(json.dumps([[*settings, f"trainer.devices={ranks}"] for settings in self.jobs.values()]))
        command = [*TORCHRUN[:-1], f"--nproc-per-node={ranks}"]
        env = {**os.environ, "OMP_NUM_THREADS": "1", "LMTRAIN_DEEPSPEED_ON_CPU": "1", "DS_ACCELERATOR": "cpu",
               "PYTHONFAULTHANDLER": "1"}  # fmt: skip
        done = run_ranks([*command, str(Path(__file__).with_name("ranks.py")), str(jobs)], env, self._clear)
        assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-5000:]
        for rank in range(ranks):
            codes = dict(zip(self.jobs, json.loads((self.folder / f"{rank}.json").read_text()), strict=True))
            failed = {name: code for name, code in codes.items() if code != "0"}
            assert not failed, "\n".join(f"{name} on rank {rank}: {text}" for name, text in failed.items())
        self.jobs = {}

    def _clear(self) -> None:
        for name in self.jobs:
            shutil.rmtree(self.folder / name, ignore_errors=True)

    def checkpoint(self, name: str, step: int) -> str:
        return str(self.folder / name / "checkpoints" / f"step_{step:08d}")

    def compare(self, ours: str, theirs: str, rel: float = EXACT) -> None:
        """Asserts that all numbers that both runs logged at the same steps are equal."""
        logged = [rows(self.folder / name / "metrics.jsonl") for name in (theirs, ours)]
        a, b = ({(r["step"], "val/loss" in r): r for r in found} for found in logged)
        assert b.keys() <= a.keys()
        assert max(b) == max(a)
        for at, row in b.items():
            assert row.get("rows") == a[at].get("rows")
            assert row["tokens_seen"] == a[at]["tokens_seen"]
            for key in ("train/loss", "val/loss", "grad_norm"):
                if key in row:
                    assert row[key] == pytest.approx(a[at][key], rel=rel, abs=1e-9), (ours, at, key)
