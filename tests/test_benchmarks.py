"""The benchmarks run, and the bare loop of pretrain.py is the same computation as the main job."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from support import REPO


@pytest.mark.slow
def test_the_pretraining_benchmark_prints_its_table(tmp_path: Path) -> None:
    command = [sys.executable, str(REPO / "benchmarks" / "pretrain.py"), "--shape=char", "--rounds=1", "--steps=8"]
    command += ["--warmup=1", "--every=1", "--contenders=bare,lmtrain,nanogpt", f"--json={tmp_path / 'numbers.json'}"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    for name in ("bare", "lmtrain"):
        assert re.search(rf"│ {name} +│ +[\d.]+ │ +[\d,]+ │ +\d\.\d{{3}} ", done.stdout), done.stdout
    assert "Trainer, callbacks and loader over the bare loop:" in done.stdout
    assert "nanogpt left out: name a folder" in done.stdout

    numbers = json.loads((tmp_path / "numbers.json").read_text())
    bare, lmtrain = (numbers["rounds"][name][0] for name in ("bare", "lmtrain"))
    assert bare["last_loss"] == pytest.approx(lmtrain["last_loss"], abs=1e-4)
    assert numbers["ratio_to_bare"]["bare"] == 1


@pytest.mark.slow
def test_the_benchmark_of_ranks_prints_its_table(tmp_path: Path) -> None:
    command = [
        sys.executable,
        str(REPO / "benchmarks" / "ddp.py"),
        "--shape=char",
        "--rounds=1",
        "--steps=4",
        "--rows=4",
    ]
    command += ["--micro-batch-size=2", "--warmup=1", "--every=1", f"--json={tmp_path / 'numbers.json'}"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"│ one +│ +[\d.]+ │ +[\d,]+ │ +│ +│ ", done.stdout), done.stdout
    numbers = json.loads((tmp_path / "numbers.json").read_text())
    for name in ("apart", "ddp", "fsdp"):
        assert re.search(rf"│ {name} +│ +[\d.]+ │ +[\d,]+ │ +\d\.\d{{3}} │ \(", done.stdout), done.stdout
        (one,), (leg,) = numbers["rounds"]["one"], numbers["rounds"][name]
        assert numbers["efficiency"][name] == pytest.approx(one["step_ms"] / leg["step_ms"] / 2)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("script", "contenders", "unit"),
    [
        ("sft", "lmtrain,lmtrain_padded,trl_padded", "tokens"),
        ("dpo", "lmtrain,trl", "pairs"),
        ("dpo --objective=kto", "lmtrain", "answers"),
        ("dpo --objective=reward", "lmtrain", "pairs"),
        ("grpo", "lmtrain,trl", "completions"),
    ],
)
def test_the_fine_tuning_benchmarks_print_their_tables(script: str, contenders: str, unit: str, tmp_path: Path) -> None:
    name, *words = script.split()
    command = [sys.executable, str(REPO / "benchmarks" / f"{name}.py"), *words, "--rounds=1", "--steps=2", "--warmup=1"]
    command += [f"--contenders={contenders}", "--lora", "--made=200", f"--json={tmp_path / 'numbers.json'}"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    numbers = json.loads((tmp_path / "numbers.json").read_text())
    assert numbers["unit"] == unit
    for name in contenders.split(","):
        if name.startswith("trl") and not (REPO / ".venv-trl").exists():
            assert f"{name} left out: TRL is not there" in done.stdout
            continue
        assert re.search(rf"│ {name} +│ +[\d,.]+ │ +\d+\.\d\d │ ", done.stdout), done.stdout
        (leg,) = numbers["rounds"][name]
        assert leg["per_s"] > 0
        assert 0.2 < leg["peak_gib"] < 20


@pytest.mark.slow
def test_the_table_of_large_models_is_what_its_command_prints() -> None:
    done = subprocess.run(
        [sys.executable, REPO / "benchmarks" / "paper.py"], capture_output=True, text=True, check=True
    )
    assert done.stdout in (REPO / "benchmarks" / "RESULTS.md").read_text()
    assert done.stdout.count("\n| ") == 10  # nine rows and the rule above them


@pytest.mark.slow
def test_saving_is_timed_beside_torch_save(tmp_path: Path) -> None:
    command = [sys.executable, str(REPO / "benchmarks" / "saving.py"), "--millions=1", "--rounds=1"]
    done = subprocess.run([*command, f"--folder={tmp_path}"], capture_output=True, text=True, check=True)
    assert done.stdout.count("\n| ") == 5, done.stdout  # three ways below a heading and a rule
    assert list(tmp_path.iterdir()) == []


@pytest.mark.nightly
@pytest.mark.slow
def test_no_cost_grows_faster_than_its_size(tmp_path: Path) -> None:
    command = [sys.executable, str(REPO / "benchmarks" / "growth.py"), "--quick"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=3000)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("\n| ") >= 9, done.stdout
