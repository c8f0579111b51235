"""Activation checkpointing reduces what blocks keep for their backward by as much as the memory estimate says."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from held_by_forward import LENGTH, ROWS

from helpers_models import tiny
from lmtrain.config.compose import check, compose
from lmtrain.models import flops

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_selective_holds_the_products(family: str) -> None:
    if not Path("/proc/self/smaps_rollup").exists():
        pytest.skip("needs /proc/PID/smaps_rollup")
    path = os.pathsep.join([str(Path(__file__).parents[1] / "helpers"), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("held_by_forward.py")), family],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    none, selective, whole = json.loads(done.stdout)
    print(f"{family}: {none / 2**20:.1f} MiB, selective {selective / 2**20:.1f}, true {whole / 2**20:.1f}")
    assert whole < 0.5 * selective < 0.5 * 0.7 * none

    shape = {"hidden_size": 256, "num_hidden_layers": 4, "max_position_embeddings": LENGTH}
    model = tiny(family, **(shape | ({} if family == "gpt2" else {"intermediate_size": 704, "num_key_value_heads": 4})))
    sizes = [f"data.micro_batch_size={ROWS}", f"data.global_batch_size={ROWS}", f"data.seq_len={LENGTH}",
             f"model.max_position_embeddings={LENGTH}"]  # fmt: skip
    config = check(compose([*sizes, "trainer.precision=32-true"]))
    computed = []
    for kept in (False, "selective", True):
        config.trainer.activation_checkpointing = kept
        computed.append(flops.memory_estimate(model, config)["activations"])
    block = computed[2] - ROWS * LENGTH * 4 * 256 * 4  # estimated for the block being recomputed
    assert none - whole == pytest.approx(computed[0] - computed[2] + block, rel=0.05)
    assert selective - whole == pytest.approx(computed[1] - computed[2], rel=0.05)
