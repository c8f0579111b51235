"""Guards against unintended numeric changes: 30 steps of each experiment must give the losses kept in git."""

import importlib
import json
from importlib.util import find_spec
from typing import Any

import pytest
import trajectories

from lmtrain.distributed.devices import cpu_multiplies_bf16

GOLDEN = json.loads(trajectories.FILE.read_text())


def test_every_experiment_has_one() -> None:
    assert sorted(GOLDEN) == trajectories.experiments(), "record it: python tests/golden/trajectories.py"


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    """Runs all experiments whose numbers this CPU can give, in one process."""
    return trajectories.trajectories([name for name in trajectories.experiments() if why_not(name) is None])


def why_not(name: str) -> str | None:
    """Returns why an experiment's recorded losses can't be those of this machine; None if they can."""
    if "qlora" in name:
        if find_spec("bitsandbytes") is None:
            return "pip install 'lmtrain[bitsandbytes]' brings 4-bit weights"
        if not importlib.import_module("bitsandbytes").functional.has_avx512bf16():
            return "recorded where bitsandbytes packs 4-bit weights for AVX512-BF16, which rounds otherwise"
    muon = GOLDEN[name].get("muon", "")
    if muon == ("fp32" if cpu_multiplies_bf16() else "bf16"):
        return f"recorded where Muon orthogonalises in {muon}, which this CPU does otherwise"
    return None


@pytest.mark.slow
@pytest.mark.parametrize("name", trajectories.experiments())
def test_trajectory(name: str, found: dict[str, Any]) -> None:
    if (reason := why_not(name)) is not None:
        pytest.skip(reason)
    kept, ours = GOLDEN[name], found[name]
    assert "error" not in ours, ours["error"]
    assert len(kept["train"]) == trajectories.STEPS
    assert kept["train"][-1] < kept["train"][0] - 0.3, "thirty steps must have learned something"
    for which in ("train", "val"):
        assert ours[which] == pytest.approx(kept[which], abs=1e-5)
