"""A copy of the model per node, sharded over the node's ranks: two "nodes" of two gloo ranks against one process."""

import os
from pathlib import Path

import pytest
from strategy_runs import CAUSAL, Runs

import forked
from lmtrain.checkpoints import store
from ports import free_port

NODES, PER_NODE = 2, 2


def on_nodes(settings: list[str]) -> None:
    """Runs training with the settings on all nodes and asserts that each of them succeeds."""
    command = ["-m", "torch.distributed.run", f"--nnodes={NODES}", f"--nproc-per-node={PER_NODE}",
               "--master-addr=127.0.0.1", f"--master-port={free_port()}"]  # fmt: skip
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    started = [
        forked.Started([*command, f"--node-rank={node}", "-m", "lmtrain.train", *settings], env)
        for node in range(NODES)
    ]
    for node in started:
        output, _ = node.communicate(timeout=600)
        assert node.returncode == 0, output


@pytest.mark.slow
@pytest.mark.parametrize("sharded", ["false", "true"])
@pytest.mark.parametrize("strategy", ["fsdp", "fsdp_tp"])
def test_numbers_and_checkpoints_of_two_nodes(strategy: str, sharded: str, corpus: Path, tmp_path: Path) -> None:
    """With fsdp_tp the two ranks of a node form a group, so that a copy is a model split over them."""
    r = Runs(tmp_path)
    text = [*CAUSAL, f"data.path={corpus}"]
    if sharded == "true":  # embeddings and output layer form FSDP groups of their own
        text += ["model=llama_nano", "model.tie_word_embeddings=false"]
    r.one("one", *text)
    settings = [*text, f"trainer.strategy={strategy}", "trainer.fsdp.copy_per_node=true",
                f"trainer.fsdp.sharded_checkpoint={sharded}", f"run.dir={tmp_path / 'nodes'}"]  # fmt: skip
    if strategy == "fsdp_tp":
        settings.append(f"trainer.fsdp.tensor_parallel_size={PER_NODE}")
    on_nodes(settings)
    r.compare("nodes", "one")
    assert store.damage(Path(r.checkpoint("nodes", 10))) is None
    r.one("back", *text, f"run.resume={r.checkpoint('nodes', 10)}")
    r.compare("back", "one")
    if strategy == "fsdp_tp":  # resumes a checkpoint written by one process that had resumed the nodes' checkpoint
        again = [s for s in settings if not s.startswith("run.dir=")]
        on_nodes([*again, f"run.dir={tmp_path / 'again'}", f"run.resume={r.checkpoint('back', 20)}",
                  "trainer.max_steps=24"])  # fmt: skip
        r.one("longer", *text, f"run.resume={r.checkpoint('one', 20)}", "trainer.max_steps=24")
        r.compare("again", "longer")
