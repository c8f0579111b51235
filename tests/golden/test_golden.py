"""Guards against unintended numeric changes: 30 steps of each experiment must give the losses kept in git."""

import json

import pytest
import trajectories

from lmtrain.distributed.devices import cpu_multiplies_bf16

GOLDEN = json.loads(trajectories.FILE.read_text())


def test_every_experiment_has_one() -> None:
    assert sorted(GOLDEN) == trajectories.experiments(), "record it: python tests/golden/trajectories.py"


@pytest.mark.slow
@pytest.mark.parametrize("name", trajectories.experiments())
def test_trajectory(name: str) -> None:
    if "qlora" in name:
        bnb = pytest.importorskip("bitsandbytes", reason="pip install 'lmtrain[bitsandbytes]' brings 4-bit weights")
        if not bnb.functional.has_avx512bf16():
            pytest.skip("recorded where bitsandbytes packs 4-bit weights for AVX512-BF16, which rounds otherwise")
    kept = GOLDEN[name]
    if kept.get("muon", "") == ("fp32" if cpu_multiplies_bf16() else "bf16"):
        pytest.skip(f"recorded where Muon orthogonalises in {kept['muon']}, which this CPU does otherwise")
    ours = trajectories.trajectory(name)
    assert len(kept["train"]) == trajectories.STEPS
    assert kept["train"][-1] < kept["train"][0] - 0.3, "thirty steps must have learned something"
    for which in ("train", "val"):
        assert ours[which] == pytest.approx(kept[which], abs=1e-5)
