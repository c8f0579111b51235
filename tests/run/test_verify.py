"""`lmtrain.verify` confirms exact resume, and detects when it fails."""

import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from inprocess import run
from lmtrain.checkpoints import store
from lmtrain.errors import RunError
from lmtrain.run.verify import _kill_after, _start, differences
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
    ended = subprocess.Popen([sys.executable, "-c", ""])
    with pytest.raises(RunError, match="nothing is proved"):
        _kill_after(ended, tmp_path / "killed", 3)


@pytest.fixture
def python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Returns a file of Python code that is run in place of every `python -m lmtrain.train`, with its arguments."""
    code, python = tmp_path / "code.py", tmp_path / "python"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} {code} "$@"\n')
    python.chmod(0o755)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "executable", str(python))
    return code


def test_the_runs_are_those_of_the_config(python: Path) -> None:
    """Keys with a plus sign are part of it; only those of the run's folder, length and loggers are not."""
    python.write_text("import sys\nprint(*sys.argv)\nsys.exit(3)")
    words = ["+model.extra.scale_attn_by_inverse_layer_idx=true", "run.name=a", "+trainer.max_epochs=2",
             "trainer.fast_dev_run=true", "logger=wandb", "logger.wandb.mode=offline"]  # fmt: skip
    ended = run("verify", *TINY, *words)
    assert ended.code == 1
    assert "failed with exit code 3" in ended.err
    assert " +model.extra.scale_attn_by_inverse_layer_idx=true " in ended.err
    assert not any(word in ended.err for word in words[1:])


def test_a_run_that_ends_early_of_its_own_accord_is_not_killed(python: Path) -> None:
    """As with callbacks.early_stopping.enabled=true: the machine is not to blame."""
    python.write_text(
        "import json, pathlib, sys\nfolder = pathlib.Path(next(w for w in sys.argv if w.startswith('run.dir='))[8:])\n"
        "folder.mkdir()\n(folder / 'metrics.jsonl').write_text(json.dumps({'step': 2}) + chr(10))"
    )
    ended = run("verify", *TINY)
    assert ended.code == 2, ended.err
    assert "ended after 2 of 6 steps" in ended.err
    assert "set callbacks.early_stopping.enabled=false" in " ".join(ended.err.split())


def test_a_run_that_prints_more_than_a_pipe_holds_is_killed_too(python: Path, tmp_path: Path) -> None:
    killed = tmp_path / "killed"
    killed.mkdir()
    rows = f"open({str(killed / 'metrics.jsonl')!r}, 'w').write(json.dumps(dict(step=3)) + chr(10))"
    python.write_text(f"import json, time\nprint('x' * 300_000, flush=True)\n{rows}\ntime.sleep(30)")
    process = _start([], killed)
    _kill_after(process, killed, 3)
    assert process.returncode == -signal.SIGKILL
