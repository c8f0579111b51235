"""`lmtrain.verify` confirms exact resume, and detects when it fails."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from inprocess import run
from lmtrain.checkpoints import store
from lmtrain.errors import RunError
from lmtrain.run.verify import _kill_after, differences
from support import TINY, Run


@pytest.mark.slow
def test_verdict(corpus: Path, tmp_path: Path, lmtrain: Run) -> None:
    done = lmtrain("verify", *TINY, "data=text", f"data.path={corpus}", "model.dropout=0.1", timeout=1800)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "equal bit for bit" in done.stdout
    assert not list((tmp_path / "outputs").iterdir()), "it leaves nothing behind"


def test_a_difference_is_found(corpus: Path, tmp_path: Path) -> None:
    settings = [*TINY, "data=text", f"data.path={corpus}", "trainer.max_steps=3", "export.enabled=false"]
    a, b = tmp_path / "a", tmp_path / "b"
    assert run("train", *settings, f"run.dir={a}").code == 0
    shutil.copytree(a, b, symlinks=True)
    assert differences(a, b) == []
    checkpoint = store.scan(b / "checkpoints")[-1]
    weights = store.load_weights(checkpoint)
    name = next(iter(weights))
    weights[name].view(-1)[0] += 1e-6
    torch.save(weights, checkpoint / "model.pt")
    text = (b / "metrics.jsonl").read_text()
    (b / "metrics.jsonl").write_text(text.replace('"tokens_seen": 384', '"tokens_seen": 385'))
    problems = differences(a, b)
    assert any("step 2 differs in tokens_seen: 384 against 385" in p for p in problems)
    assert any(f"of {len(weights)} weights differ, {name} first" in p for p in problems)


def test_a_run_that_ends_before_it_is_killed_proves_nothing(tmp_path: Path) -> None:
    ended = subprocess.Popen([sys.executable, "-c", ""], stdout=subprocess.PIPE, text=True)
    with pytest.raises(RunError, match="nothing is proved"):
        _kill_after(ended, tmp_path / "metrics.jsonl", 3)
