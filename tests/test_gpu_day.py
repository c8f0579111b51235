"""benchmarks/gpu_day.py runs to completion on a CPU, so that it works once a GPU is available."""

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import day_table
import gpu_cases
import pytest

from lmtrain.config.compose import compose
from support import REPO

# Hides optional packages, as on a machine without a package index.
ABSENT = """
import sys
ABSENT = ("pyarrow", "datasets", "pandas", "tensorboard", "trl")

class Without:
    def __init__(self, finder):
        self.finder = finder
    def find_spec(self, name, path=None, target=None):
        return None if name.split(".")[0] in ABSENT else self.finder.find_spec(name, path, target)
    def __getattr__(self, name):
        return getattr(self.finder, name)

sys.meta_path[:] = [Without(finder) for finder in sys.meta_path]
"""


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("site")
    (folder / "sitecustomize.py").write_text(ABSENT)
    return {**os.environ, "PYTHONPATH": str(folder)}


def day(folder: Path, environment: dict[str, str], *argv: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(REPO / "benchmarks" / "gpu_day.py"), "--toy", "--json=day.json", *argv]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=900)


@pytest.mark.slow
def test_it_runs_to_its_end_and_goes_on_where_it_was(tmp_path: Path, environment: dict[str, str]) -> None:
    first = day(tmp_path, environment, "--parts=1")
    assert first.returncode == 0, first.stdout + first.stderr
    before = json.loads((tmp_path / "day.json").read_text())
    assert list(before["parts"]) == ["1"]

    whole = day(tmp_path, environment, "--results=RESULTS.md")
    assert whole.returncode == 0, whole.stdout + whole.stderr
    numbers = json.loads((tmp_path / "day.json").read_text())
    assert numbers["parts"]["1"]["gpt_small"] == before["parts"]["1"]["gpt_small"]
    made = {name for part in numbers["parts"].values() for name, found in part.items() if "not_made" not in found}
    assert made == {
        "gpt_small",
        "loss_alone",
        "to_nanogpts_loss",
        "sft_lora",
        "dpo_full",
        "async_saves",
        "exact_resume",
    }, numbers
    reasons = {
        found["not_made"] for part in numbers["parts"].values() for found in part.values() if "not_made" in found
    }
    assert reasons == {"no GPU here", "at toy sizes: another one runs the same code"}
    assert numbers["parts"]["6"]["exact_resume"]["said"].startswith("exact: rows, losses")
    assert numbers["parts"]["6"]["async_saves"]["save_stall_ms"] is not None
    table = (tmp_path / "RESULTS.md").read_text()
    assert f"## GPU day {numbers['date']}: {numbers['machine']}\n" in table
    assert "| gpt_small lmtrain, tokens/s | " in table


def test_what_is_not_there_is_named(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(ABSENT.replace('"trl"', '"trl", "hydra"'))
    done = day(tmp_path, {**os.environ, "PYTHONPATH": str(tmp_path)})
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].startswith("error: not installed: hydra; benchmarks/README.md")


def test_the_days_table_takes_the_place_of_its_earlier_one(tmp_path: Path) -> None:
    results = tmp_path / "RESULTS.md"
    results.write_text("# Results\n\nBefore.\n")
    numbers = {"date": "2026-01-02", "machine": "a GPU", "setting": "a GPU, torch 2", "parts": {}}
    numbers["parts"] = {"1": {"gpu_tests": {"passed": "3 passed"}}}
    day_table.append(results, numbers)
    results.write_text(results.read_text() + "\n## Later\n\nAfter.\n")
    numbers["parts"]["5"] = {"muon": {"not_made": "no GPU here"}}
    day_table.append(results, numbers)
    text = results.read_text()
    assert text.startswith("# Results\n\nBefore.\n\n## GPU day 2026-01-02: a GPU\n")
    assert text.endswith("\n\n## Later\n\nAfter.\n")
    assert text.count("## GPU day") == 1
    assert "| gpu_tests | 3 passed |  |  |\n| muon | left out: no GPU here |  |  |\n" in text


@pytest.mark.slow
def test_the_runs_of_the_gpu_check_compose(tmp_path: Path) -> None:
    made = gpu_cases.cases(tmp_path, toy=False)
    assert {f"{name}_{device}" for name in gpu_cases.ON_BOTH for device in ("gpu", "cpu")} < set(made)
    for command in made.values():
        for words in re.findall(r"lmtrain\.(?:train|verify) (.*?)(?: &&|$)", command):
            compose(shlex.split(words))


@pytest.mark.slow
def test_a_step_is_profiled(tmp_path: Path) -> None:
    command = [sys.executable, str(REPO / "benchmarks" / "gpu_profile.py"), "--shape=char", "--rows=4"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    whole, kernels = map(float, re.findall(r"a step takes ([\d.]+) ms, kernels ([\d.]+) ms of it", done.stdout)[0])
    assert 0 < kernels <= whole
