"""DeepSpeed's engine with autocast as on CUDA, where the engine disables autocast around its forward."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from support import TINY

# Without a device argument, as DeepSpeed asks, torch answers for CUDA; here it answers for the CPU instead.
SCRIPT = """
import json, sys
import torch
from lmtrain import train
from lmtrain.models import attention
from lmtrain.objectives.base import Objective

ask, find, seen = torch.is_autocast_enabled, attention.autocast_dtype, set()
step = Objective.training_step
# From the step on: a model is tried before, in fp32.
Objective.training_step = lambda *given: seen.clear() or step(*given)
torch.is_autocast_enabled = lambda device="cpu": ask(device)
attention.autocast_dtype = lambda x: seen.add(str(find(x))) or find(x)
code = train.main(sys.argv[1:])
print(json.dumps({"code": code, "dtypes": sorted(seen)}))
"""


@pytest.mark.slow
@pytest.mark.parametrize("stage", [2, 3])
def test_mixed_precision_is_computed_in(corpus: Path, tmp_path: Path, stage: int) -> None:
    pytest.importorskip("deepspeed")
    settings = [
        *TINY, "model=llama_nano", "data=text", f"data.path={corpus}", "trainer.max_steps=1",
        "trainer.precision=bf16-mixed",
        "trainer.strategy=deepspeed", f"trainer.deepspeed.stage={stage}", "model.intermediate_size=64",
        "callbacks.samples.every_n_validations=0", "export.enabled=false", f"run.dir={tmp_path / 'run'}",
    ]  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, *settings],
        env={**os.environ, "LMTRAIN_DEEPSPEED_ON_CPU": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert json.loads(done.stdout.splitlines()[-1]) == {"code": 0, "dtypes": ["torch.bfloat16"]}
