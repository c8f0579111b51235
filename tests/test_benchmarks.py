"""benchmarks/pretrain.py runs, and its bare loop is the same computation as the main job."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from support import REPO


def test_the_pretraining_benchmark_prints_its_table(tmp_path: Path) -> None:
    command = [sys.executable, str(REPO / "benchmarks" / "pretrain.py"), "--shape=char", "--rounds=1", "--steps=2"]
    command += ["--warmup=1", "--every=1", "--contenders=bare,lmtrain,nanogpt", f"--json={tmp_path / 'numbers.json'}"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    for name in ("bare", "lmtrain"):
        assert re.search(rf"│ {name} +│ +[\d.]+ │ +[\d,]+ │ +\d\.\d{{3}} ", done.stdout), done.stdout
    assert "Trainer, callbacks and loader over the bare loop:" in done.stdout
    assert "nanogpt left out: name a folder" in done.stdout

    numbers = json.loads((tmp_path / "numbers.json").read_text())
    bare, lmtrain = (numbers["rounds"][name][0] for name in ("bare", "lmtrain"))
    assert bare["last_loss"] == pytest.approx(lmtrain["last_loss"], abs=1e-4)
    assert numbers["ratio_to_bare"]["bare"] == 1
