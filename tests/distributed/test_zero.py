"""ZeRO by DeepSpeed on two gloo ranks: the numbers of one process, checkpoints that travel, the same export."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from strategy_runs import CAUSAL, LORA, Runs

from chats import write_chats
from inprocess import message, train_tiny
from tiny_pretrained import save_pretrained

ZERO = {stage: ["trainer.strategy=deepspeed", f"trainer.deepspeed.stage={stage}"] for stage in (1, 2, 3)}


@pytest.fixture(scope="module")
def runs(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    pytest.importorskip("deepspeed")
    r = Runs(tmp_path_factory.mktemp("zero"))
    text = [*CAUSAL, f"data.path={corpus}"]
    model = f"model.name_or_path={save_pretrained(r.folder / 'llama', max_position_embeddings=512)}"
    lora = [*LORA, f"data.path={write_chats(r.folder / 'chats.jsonl', 40)}", model]
    tasks = {"text": text, "lora": lora}
    for task, settings in tasks.items():
        r.one(task, *settings)
        for stage in (2, 3):
            r.two(f"{task}-zero{stage}", *settings, *ZERO[stage])
    r.two("text-zero1", *text, *ZERO[1])
    r.two("text-offload", *text, *ZERO[2], "trainer.deepspeed.offload_optimizer=cpu")
    r.launch()
    for task, settings in tasks.items():
        for stage in (2, 3):
            saved = f"run.resume={r.checkpoint(f'{task}-zero{stage}', 10)}"
            r.one(f"{task}-zero{stage}-to-one", *settings, saved)
            r.two(f"{task}-one-to-zero{stage}", *settings, *ZERO[stage], f"run.resume={r.checkpoint(task, 10)}")
    r.two("text-zero3-to-fsdp", *text, "trainer.strategy=fsdp", f"run.resume={r.checkpoint('text-zero3', 10)}")
    r.launch()
    return r


@pytest.mark.slow
@pytest.mark.parametrize("task", ["text", "lora"])
@pytest.mark.parametrize("stage", [2, 3])
def test_numbers_and_checkpoints(runs: Runs, task: str, stage: int) -> None:
    for name in (f"{task}-zero{stage}", f"{task}-zero{stage}-to-one", f"{task}-one-to-zero{stage}"):
        runs.compare(name, task)
    one, two = (torch.load(Path(runs.checkpoint(n, 20)) / "trainer.pt") for n in (task, f"{task}-zero{stage}"))
    a, b = one["optimizer_states"][0], two["optimizer_states"][0]
    assert a["param_groups"] == b["param_groups"]
    for index, state in a["state"].items():
        for key, value in state.items():
            torch.testing.assert_close(b["state"][index][key], value, rtol=1e-3, atol=1e-6)


@pytest.mark.slow
def test_text_in_other_ways(runs: Runs) -> None:
    for name in ("text-zero1", "text-offload", "text-zero3-to-fsdp"):
        runs.compare(name, "text")


@pytest.mark.slow
@pytest.mark.parametrize("stage", [2, 3])
def test_exports_are_equal(runs: Runs, stage: int) -> None:
    a, b = (load_file(runs.folder / n / "export" / "model.safetensors") for n in ("text", f"text-zero{stage}"))
    assert a.keys() == b.keys()
    for key in a:
        torch.testing.assert_close(b[key], a[key], rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (["trainer.strategy=deepspeed", "trainer.accelerator=cpu"], "needs CUDA devices"),
        (["trainer.strategy=deepspeed", "optimizer=muon"], "Set optimizer=adamw or lion, or trainer.strategy=fsdp"),
        (["trainer.strategy=deepspeed", "trainer.deepspeed.offload_parameters=cpu"], "deepspeed.stage=3"),
        (["trainer.strategy=deepspeed", "trainer.spike_factor=2.0"], "set it to null"),
        (["trainer.strategy=fsdp", "optimizer=adamw_8bit"], "Set optimizer=adamw"),
        (["trainer.strategy=fsdp", "trainer.precision=16-mixed"], "bf16-mixed"),
        (["trainer.strategy=zero"], "options: auto, ddp, fsdp, fsdp_tp, deepspeed"),
        (["trainer.num_nodes=2"], "torchrun --nnodes=2"),
    ],
)
def test_what_cannot_work_is_refused(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, settings: list[str], said: str
) -> None:
    monkeypatch.delenv("LMTRAIN_DEEPSPEED_ON_CPU", raising=False)
    done = train_tiny(corpus, f"run.dir={tmp_path / 'run'}", *settings)
    assert done.code == 2
    assert said in message(done.err)
    assert not (tmp_path / "run").exists()
