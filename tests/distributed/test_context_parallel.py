"""Rows shared by a group of ranks: the numbers equal one process's, checkpoints are portable, and what is refused."""

import json
import os
from pathlib import Path

import pytest
import torch
from strategy_runs import CAUSAL, SFT, Runs, names_of

from chats import write_chats
from inprocess import message, run
from lmtrain.callbacks.metrics import without_times
from lmtrain.models.context import joined, parted
from ranks_again import TORCHRUN, run_ranks
from support import REPO, TINY, rows

CP = ["trainer.strategy=fsdp", "trainer.fsdp.context_parallel_size=2"]
SHARED_HEADS = ["model=llama_nano", "tokenizer=bytes", "model.num_attention_heads=4", "model.num_key_value_heads=2",
                "model.intermediate_size=48"]  # fmt: skip


@pytest.fixture(scope="module")
def runs(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    r = Runs(tmp_path_factory.mktemp("context_parallel"))
    silent = "callbacks.samples.every_n_validations=0"
    llama = [*CAUSAL, f"data.path={corpus}", *SHARED_HEADS, silent]
    gpt2 = [*CAUSAL, f"data.path={corpus}", "model.num_attention_heads=4"]
    chats = f"data.path={write_chats(r.folder / 'chats.jsonl', 40)}"
    tasks = {
        "llama": [*llama, "data.isolate_documents=true", "trainer.activation_checkpointing=true"],
        "gpt2": gpt2,
        "sft": [*SFT, chats, silent],
    }
    for task, settings in tasks.items():
        r.one(task, *settings)
        r.two(f"{task}-cp", *settings, *CP)
    r.launch()
    for name, from_, to in (("cp-to-cp", "llama-cp", CP), ("one-to-cp", "llama", CP)):
        r.two(name, *tasks["llama"], *to, f"run.resume={r.checkpoint(from_, 10)}")
    r.launch()
    r.two("two-groups", *tasks["llama"], *CP)
    r.launch(ranks=4)
    r.one("two-groups-to-one", *tasks["llama"], f"run.resume={r.checkpoint('two-groups', 10)}")
    return r


@pytest.mark.slow
@pytest.mark.parametrize("task", ["llama", "gpt2", "sft"])
def test_numbers_are_those_of_one_process(runs: Runs, task: str) -> None:
    runs.compare(f"{task}-cp", task)


@pytest.mark.slow
def test_two_groups_and_checkpoints_that_travel(runs: Runs) -> None:
    for name in ("one-to-cp", "two-groups", "two-groups-to-one"):
        runs.compare(name, "llama")
    whole = [without_times(r) for r in rows(runs.folder / "llama-cp" / "metrics.jsonl") if r["step"] > 10]
    assert whole == [without_times(r) for r in rows(runs.folder / "cp-to-cp" / "metrics.jsonl")]


@pytest.mark.slow
def test_families_give_the_loss_and_gradients_of_whole_rows(tmp_path: Path) -> None:
    script = [str(Path(__file__).with_name("context_families.py")), str(tmp_path)]
    folders = os.pathsep.join(str(REPO / name) for name in ("src", "tests/models", "tests/helpers"))
    done = run_ranks([*TORCHRUN, *script], env={**os.environ, "PYTHONPATH": folders})
    assert done.returncode == 0, done.stderr
    for rank in (0, 1):
        found = json.loads((tmp_path / f"{rank}.json").read_text())
        wrong = {name: words for name, words in found.items() if words != "right" and "refused: " not in words}
        assert not wrong, wrong
        assert list(found.values()).count("right") >= 10, found


def test_heads_and_tokens_change_places() -> None:
    """Two simulated ranks exchange slices: rank r sends part i of its slice to rank i."""
    whole = torch.randn(2, 4, 6, 3)  # [B, H, T, D]
    slices = whole.chunk(2, dim=2)
    for rank in (0, 1):
        received = torch.stack([parted(x, 1, 2)[rank] for x in slices])
        assert torch.equal(joined(received, 2), whole.chunk(2, dim=1)[rank])


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (["trainer.devices=3"], "context_parallel_size=2 does not divide trainer.devices=3"),
        (["objective=dpo", "data=preference_jsonl"], "objective=dpo does not go with"),
        (["model=moe_small"], "balance of"),
        (["trainer.devices=3", "trainer.fsdp.context_parallel_size=3"], "does not divide model.num_attention_heads=2"),
        (["model.attention=sdpa"], "Set model.attention=auto"),
        (["data.seq_len=31"], "Set data.seq_len=32"),
    ],
)
def test_what_cannot_work_is_refused(corpus: Path, tmp_path: Path, settings: list[str], said: str) -> None:
    argv = [*TINY, "data=text", f"data.path={corpus}", "trainer.devices=2", *CP, *settings]
    done = run("train", *names_of(argv), f"run.dir={tmp_path / 'run'}")
    assert done.code == 2
    assert said in message(done.err)
    assert not (tmp_path / "run").exists()
