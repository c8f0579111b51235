"""The plan estimates how long a run will take if an earlier run of its kind shows the speed."""

import json
import re
from pathlib import Path

import pytest

from inprocess import train_tiny
from lmtrain.run.plan_costs import earlier
from lmtrain.terminal import si, time_in_words


def time_of(plan: Path) -> str:
    return re.sub(r"\s+", " ", plan.read_text().partition("time ")[2].partition("validation ")[0])


def test_the_speed_of_an_earlier_run_counts(corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    quick = ["export.enabled=false", "report.enabled=false"]
    for name, more in (("first", []), ("same", ["trainer.max_steps=10"]), ("other", ["data.micro_batch_size=3"])):
        assert train_tiny(corpus, f"run.name={name}", *quick, *more).code == 0
        if name == "first":
            path = tmp_path / "outputs" / "first" / "summary.json"
            path.write_text(json.dumps(json.loads(path.read_text()) | {"tokens_per_s": 4.0}))  # 192 tokens a step
    outputs = tmp_path / "outputs"
    assert "no earlier run of this model" in time_of(outputs / "first" / "plan.txt")
    assert "about 8 min 0 s at 4 tokens/s, the speed of first" in time_of(outputs / "same" / "plan.txt")
    assert "no earlier run of this model" in time_of(outputs / "other" / "plan.txt")


def test_a_run_beside_it_may_begin_at_that_moment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It removes its summary, between the listing of the folder and the look at the file."""
    monkeypatch.setattr(Path, "glob", lambda *_: iter([tmp_path / "beside" / "summary.json"]))
    assert earlier({}, tmp_path / "run") is None


@pytest.mark.parametrize(
    ("value", "said"),
    [(1234567, "1.23 M"), (999, "999"), (999_499, "999 k"), (999_700, "1 M"), (-999.9, "-1 k"), (0, "0")],
)
def test_a_number_is_rounded_to_a_prefix_that_fits(value: float, said: str) -> None:
    assert si(value) == said


@pytest.mark.parametrize(("seconds", "said"), [(0.2, "1 s"), (59, "59 s"), (90, "1 min 30 s"), (5400, "1 h 30 min"),
                                               (86400 * 2, "48 h 0 min")])  # fmt: skip
def test_a_duration_is_said_in_words(seconds: float, said: str) -> None:
    assert time_in_words(seconds) == said
