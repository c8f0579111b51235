"""Rows shared by the ranks of a group: the numbers of one process, checkpoints that travel, what is refused."""

from pathlib import Path

import pytest
from strategy_runs import CAUSAL, SFT, Runs

from chats import write_chats

CP = ["trainer.strategy=fsdp", "trainer.fsdp.context_parallel_size=2"]
# On top of a step's own numbers: twenty steps of training grow what rounding leaves.
REL = 1e-6
SHARED_HEADS = ["model=llama_nano", "tokenizer=bytes", "model.num_attention_heads=4", "model.num_key_value_heads=2",
                "model.intermediate_size=48"]  # fmt: skip


@pytest.fixture(scope="module")
def runs(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    r = Runs(tmp_path_factory.mktemp("context_parallel"))
    silent = "callbacks.samples.every_n_validations=0"
    llama = [*CAUSAL, f"data.path={corpus}", *SHARED_HEADS, silent]
    gpt2 = [*CAUSAL, f"data.path={corpus}", "model.num_attention_heads=4"]
    tasks = {"llama": [*llama, "data.isolate_documents=true"], "gpt2": gpt2}
    for task, settings in tasks.items():
        r.one(task, *settings)
        r.two(f"{task}-cp", *settings, *CP)
    r.launch()
    return r


@pytest.mark.slow
@pytest.mark.parametrize("task", ["llama", "gpt2"])
def test_numbers_are_those_of_one_process(runs: Runs, task: str) -> None:
    runs.compare(f"{task}-cp", task, rel=REL)
