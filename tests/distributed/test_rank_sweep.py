"""Two ranks under fsdp, in a run and in a sweep: one folder per job, one config on all ranks, nothing left over."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from test_launch import BREAKS, TEXT, environment

from support import rows

NOTES = [*BREAKS, "callbacks.extra=[{_target_: mishaps.Notes}]", "trainer.devices=2", "trainer.strategy=fsdp"]


def train(here: Path, *words: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "lmtrain.train", *words],
        cwd=here,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    left = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=True).stdout
    assert str(here) not in left, "a process is still there"
    return done.stdout


def config_of_ranks(run_dir: Path) -> dict:
    """Returns the config that both ranks have read, after checking that it is the one in the run's folder."""
    first, second = (json.loads((run_dir / f"rank_{n}.json").read_text()) for n in (0, 1))
    assert first["pid"] != second["pid"]
    assert first["config"] == second["config"]
    config = yaml.safe_load(first["config"])
    assert config == yaml.safe_load((run_dir / "config.yaml").read_text())
    assert first["lr"] == second["lr"] == config["optimizer"]["lr"]
    assert [row["step"] for row in rows(run_dir / "metrics.jsonl") if "train/loss" in row] == list(range(1, 13))
    assert (run_dir / "export" / "model.safetensors").exists()
    return config


@pytest.mark.slow
def test_a_run_and_a_sweep_on_two_ranks(corpus: Path, tmp_path: Path) -> None:
    words = [*TEXT, f"data.path={corpus}", *NOTES]
    train(tmp_path, *words)
    (single,) = (tmp_path / "outputs").iterdir()
    alone = config_of_ranks(single)

    sweep = ["-m", *words, "optimizer.lr=1e-3,3e-4", "sweep.name=rates"]
    train(tmp_path, *sweep)
    folder = tmp_path / "outputs" / "sweeps" / "rates"
    assert sorted(p.name for p in folder.iterdir() if p.is_dir()) == ["0", "1"]
    trials = [config_of_ranks(folder / name) for name in ("0", "1")]
    assert [c["optimizer"]["lr"] for c in trials] == [1e-3, 3e-4]
    for config in (alone, *trials):
        del config["run"]["dir"], config["optimizer"]["lr"]
    assert alone == trials[0] == trials[1]

    before = [(folder / name / "summary.json").stat().st_mtime_ns for name in ("0", "1")]
    assert "2 finished trials are kept as found" in train(tmp_path, *sweep)
    assert [(folder / name / "summary.json").stat().st_mtime_ns for name in ("0", "1")] == before
