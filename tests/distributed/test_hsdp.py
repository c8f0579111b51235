"""A copy of the model per node, in parts on the node's ranks: two "nodes" of two gloo ranks against one process."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from strategy_runs import CAUSAL, Runs

from lmtrain.checkpoints import store
from ports import free_port

NODES, PER_NODE = 2, 2


@pytest.mark.slow
@pytest.mark.parametrize("sharded", ["false", "true"])
def test_numbers_and_checkpoints_of_two_nodes(sharded: str, corpus: Path, tmp_path: Path) -> None:
    r = Runs(tmp_path)
    text = [*CAUSAL, f"data.path={corpus}"]
    r.one("one", *text)
    settings = [*text, "trainer.strategy=fsdp", "trainer.fsdp.copy_per_node=true",
                f"trainer.fsdp.sharded_checkpoint={sharded}", f"run.dir={tmp_path / 'nodes'}"]  # fmt: skip
    command = [sys.executable, "-m", "torch.distributed.run", f"--nnodes={NODES}", f"--nproc-per-node={PER_NODE}",
               "--master-addr=127.0.0.1", f"--master-port={free_port()}"]  # fmt: skip
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    started = [
        subprocess.Popen([*command, f"--node-rank={node}", "-m", "lmtrain.train", *settings],
                         stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=env)
        for node in range(NODES)
    ]  # fmt: skip
    for node in started:
        output, _ = node.communicate(timeout=600)
        assert node.returncode == 0, output
    r.compare("nodes", "one")
    assert store.damage(Path(r.checkpoint("nodes", 10))) is None
    r.one("back", *text, f"run.resume={r.checkpoint('nodes', 10)}")
    r.compare("back", "one")
