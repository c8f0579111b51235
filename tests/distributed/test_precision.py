"""trainer.precision=auto on a CPU: what is faster there, measured once and kept; a continued run keeps its own."""

import itertools
import json
from pathlib import Path

import pytest
import torch
import yaml

from inprocess import TWO_STEPS, run
from lmtrain.distributed import devices, precision
from support import TINY

pytestmark = pytest.mark.skipif(not devices.cpu_multiplies_bf16(), reason="this CPU multiplies no bf16")


def test_what_is_measured_is_kept_per_shape(tmp_path: Path) -> None:
    first = precision.speedup_of_bf16(32, 64, tmp_path)
    before = torch.get_rng_state()
    assert 0.01 < first < 100
    assert precision.speedup_of_bf16(32, 64, tmp_path) == precision.kept(32, 64, tmp_path) == first
    assert precision.kept(48, 64, tmp_path) is None
    precision.speedup_of_bf16(48, 64, tmp_path)
    assert len(json.loads((tmp_path / "machine.json").read_text())) == 2
    assert torch.equal(before, torch.get_rng_state())  # a measurement must not change what a run draws


def test_a_pause_of_the_process_does_not_decide(monkeypatch: pytest.MonkeyPatch) -> None:
    """Five seconds pass in the first counted round of fp32; all others take a millisecond in either precision."""
    calls = itertools.count(1)

    def clock() -> float:
        call = next(calls)
        return 1e-3 * call + (5 if call >= 7 else 0)

    monkeypatch.setattr(precision.time, "perf_counter", clock)
    assert precision.speedup_of_bf16(32, 64, None) == pytest.approx(1)


@pytest.mark.parametrize("content", ["", "[1, 2]", '{"x": 1', "null"])
def test_a_damaged_file_is_measured_anew(content: str, tmp_path: Path) -> None:
    (tmp_path / "machine.json").write_text(content)
    assert precision.speedup_of_bf16(32, 64, tmp_path) == precision.kept(32, 64, tmp_path)


def test_the_faster_one_is_chosen_said_and_kept_by_a_continued_run(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second run finds another measurement: it goes on as it began, and a new run takes the other precision."""
    monkeypatch.setenv("LMTRAIN_CACHE", str(tmp_path / "cache"))
    words = [*TINY, *TWO_STEPS, "data=text", f"data.path={corpus}", "trainer.precision=auto", "trainer.accelerator=cpu"]
    (tmp_path / "cache").mkdir()
    file = tmp_path / "cache" / "machine.json"

    def trained(name: str, speedup: float, *more: str) -> tuple[str, str]:
        file.write_text(json.dumps({precision._key(32, 64): speedup}))
        ended = run("train", *words, f"run.dir={tmp_path / name}", *more)
        assert ended.code == 0, ended.err
        config = yaml.safe_load((tmp_path / name / "config.yaml").read_text())
        return config["trainer"]["precision"], " ".join(ended.out.replace("│", " ").split())

    chosen, said = trained("a", 1.5)
    assert (chosen, "bf16-mixed (1.50 times as fast as 32-true here)" in said) == ("bf16-mixed", True)
    assert trained("a", 0.5, "run.resume=auto", "trainer.max_steps=4")[0] == "bf16-mixed"
    chosen, said = trained("b", 0.5)
    assert (chosen, "32-true (2.00 times as fast as bf16-mixed here)" in said) == ("32-true", True)
    assert trained("c", 1.01)[0] == "32-true"  # a tie goes to the more exact one
