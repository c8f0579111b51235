"""Inductor's code for an H200, made without one: what the loss and a decoder block move, and that the code compiles.

See emitted.py for the method. It can't see numerical results or how long anything takes.
"""

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import library
import pytest

pytestmark = pytest.mark.slow

HERE = Path(__file__).parent
VOCABULARY = "50304"
# The last counts: bytes per token moved by the kernels between matrix products, and the number of kernel launches.
BLOCKS = {"gpt2": (110_884, 30), "llama": (327_712, 27), "llama_packed": (329_760, 27), "qwen3": (118_064, 30)}


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> Any:
    python = Path(os.environ.get("LMTRAIN_TRITON_PYTHON", HERE.parents[1] / ".venv-triton" / "bin" / "python"))
    if not python.exists():
        pytest.skip("Triton is not here: make env-triton installs it")
    compiled = library.compiled(tmp_path_factory.mktemp("library"))
    if isinstance(compiled, str):
        pytest.skip(compiled)
    ended = subprocess.run([python, HERE / "emitted.py", compiled], capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr[-3000:]
    return json.loads(ended.stdout)


@pytest.mark.parametrize("terms", ["plain", "softcap"])
def test_the_loss_reads_logits_twice_and_writes_their_gradient(seen: Any, terms: str) -> None:
    """In bf16 that is 6 bytes per logit; nothing of [chunk, V] is allocated, in fp32 or otherwise."""
    loss = seen["losses"][terms]
    assert 6.0 <= loss["bytes_per_logit"] < 6.01
    assert loss["launches"] == 2
    assert loss["allocated"]
    assert not [buffer for buffer in loss["allocated"] if VOCABULARY in buffer["sizes"]]


def test_validation_reads_logits_once(seen: Any) -> None:
    loss = seen["validation"]
    assert 2.0 <= loss["bytes_per_logit"] < 2.01
    assert loss["launches"] == 1
    assert not [buffer for buffer in loss["allocated"] if VOCABULARY in buffer["sizes"]]


@pytest.mark.parametrize("family", BLOCKS)
def test_a_block_moves_no_more_than_it_did(seen: Any, family: str) -> None:
    block, (moved, launches) = seen["blocks"][family], BLOCKS[family]
    assert 0.5 * moved < block["bytes_per_token"] < 1.02 * moved
    assert 0.5 * launches < block["launches"] <= launches


def test_triton_compiles_every_kernel(seen: Any) -> None:
    """All kernels compile for Hopper without spilling registers to memory."""
    emitted = [*seen["losses"].values(), seen["validation"], *seen["blocks"].values()]
    kernels = [kernel for found in emitted for kernel in found["machine_code"]]
    assert {kernel["target"] for kernel in kernels} == {"sm_90a"}
    assert [kernel for kernel in kernels if kernel["spilled"]] == []
