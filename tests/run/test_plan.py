"""The plan says what will be computed, also where it isn't what was asked for."""

import re
from pathlib import Path

import pytest

from inprocess import train_tiny


def test_a_cpu_has_no_16_mixed(corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    quick = ["trainer.max_steps=1", "export.enabled=false", "report.enabled=false"]
    assert train_tiny(corpus, "run.name=half", "trainer.precision=16-mixed", *quick).code == 0
    plan = re.sub(r"\s+", " ", (tmp_path / "outputs" / "half" / "plan.txt").read_text())
    assert "16-mixed, computed as bf16-mixed (Lightning has no 16-mixed on a CPU), on 1 x" in plan
