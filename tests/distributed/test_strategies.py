"""Numbers, checkpoints and exports don't depend on the strategy: two gloo ranks are compared with one process."""

from pathlib import Path

import pytest
import torch
from strategy_runs import CAUSAL, DPO, DPO_LORA, EXACT, LORA, SFT, Runs, same_weights

from chats import write_chats, write_rows
from lmtrain.callbacks.metrics import without_times
from support import rows
from tiny_pretrained import save_pretrained

pytestmark = pytest.mark.slow

FSDP = "trainer.strategy=fsdp"


@pytest.fixture(scope="module")
def runs(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """Runs everything that this module compares; a second launch resumes what the first one saved."""
    r = Runs(tmp_path_factory.mktemp("runs"))
    text = [*CAUSAL, f"data.path={corpus}"]
    chats = write_chats(r.folder / "chats.jsonl", 40)
    pairs = write_rows(r.folder / "pairs.jsonl", "preference_jsonl", 40)
    model = f"model.name_or_path={save_pretrained(r.folder / 'llama', max_position_embeddings=512)}"
    tasks = {"text": text, "sft": [*SFT, f"data.path={chats}"], "lora": [*LORA, f"data.path={chats}", model],
             "dpo": [*DPO, f"data.path={pairs}", model], "dpo_lora": [*DPO_LORA, f"data.path={pairs}", model],
             "muon": [*text, "optimizer=muon"], "adafactor": [*text, "optimizer=adafactor"],
             "bf16": [*text, "trainer.precision=bf16-mixed"],
             "half": [*text, "trainer.precision=bf16-true"]}  # fmt: skip
    r.two("text-ddp", *text)
    r.two("half-ddp", *tasks["half"])
    for task, settings in tasks.items():
        r.one(task, *settings)
        r.two(f"{task}-fsdp", *settings, FSDP)
    r.two("text-offload", *text, FSDP, "trainer.fsdp.cpu_offload=true", "trainer.fsdp.reshard_after_forward=false",
          "trainer.fsdp.reduce_each_micro_batch=true", "trainer.activation_checkpointing=true",
          "checkpoint.async_save=true")  # fmt: skip
    r.two("text-selective", *text, FSDP, "trainer.activation_checkpointing=selective")
    r.launch()
    for task in ("text", "lora", "dpo", "dpo_lora", "adafactor", "half"):
        saved = f"run.resume={r.checkpoint(f'{task}-fsdp', 10)}"
        r.one(f"{task}-fsdp-to-one", *tasks[task], saved)
        r.two(f"{task}-fsdp-to-fsdp", *tasks[task], FSDP, saved)
        r.two(f"{task}-one-to-fsdp", *tasks[task], FSDP, f"run.resume={r.checkpoint(task, 10)}")
    r.two("text-fsdp-to-ddp", *text, f"run.resume={r.checkpoint('text-fsdp', 10)}")
    r.two("text-ddp-to-fsdp", *text, FSDP, f"run.resume={r.checkpoint('text-ddp', 10)}")
    r.launch()
    return r


@pytest.mark.parametrize("task", ["text", "sft", "lora", "dpo", "dpo_lora"])
def test_numbers_are_those_of_one_process(runs: Runs, task: str) -> None:
    runs.compare(f"{task}-fsdp", task)


def test_text_in_other_ways(runs: Runs) -> None:
    runs.compare("text-ddp", "text")
    runs.compare("text-offload", "text")
    runs.compare("text-selective", "text")
    # Both amplify rounding: Newton-Schulz, and a division by the root of a row's and a column's mean.
    runs.compare("muon-fsdp", "muon", rel=1e-4)
    runs.compare("adafactor-fsdp", "adafactor", rel=1e-4)
    runs.compare("bf16-fsdp", "bf16", rel=5e-3)
    # The norm of bfloat16 gradients is itself rounded, to steps of up to 1/128.
    runs.compare("half-ddp", "half", rel=1e-2)
    runs.compare("half-fsdp", "half", rel=1e-2)


@pytest.mark.parametrize("task", ["text", "lora", "dpo", "dpo_lora", "adafactor", "half"])
def test_checkpoints_travel(runs: Runs, task: str) -> None:
    for ours in (f"{task}-fsdp-to-one", f"{task}-one-to-fsdp"):
        runs.compare(ours, task, rel={"adafactor": 1e-4, "half": 1e-2}.get(task, EXACT))
    # On the same number of ranks nothing differs at all.
    whole = [without_times(r) for r in rows(runs.folder / f"{task}-fsdp" / "metrics.jsonl") if r["step"] > 10]
    assert whole == [without_times(r) for r in rows(runs.folder / f"{task}-fsdp-to-fsdp" / "metrics.jsonl")]


def test_checkpoints_travel_between_strategies(runs: Runs) -> None:
    runs.compare("text-fsdp-to-ddp", "text")
    runs.compare("text-ddp-to-fsdp", "text")


@pytest.mark.parametrize("task", ["text", "lora", "adafactor"])
def test_a_checkpoint_is_what_one_process_writes(runs: Runs, task: str) -> None:
    one, two = (Path(runs.checkpoint(name, 20)) for name in (task, f"{task}-fsdp"))
    a, b = ({k: (v.shape, v.dtype) for k, v in torch.load(p / "model.pt").items()} for p in (one, two))
    assert a == b
    assert (one / "model.pt").stat().st_size == pytest.approx((two / "model.pt").stat().st_size, rel=0.02)
    s, t = (torch.load(p / "trainer.pt")["optimizer_states"][0] for p in (one, two))
    assert s["param_groups"] == t["param_groups"]
    for index, state in s["state"].items():
        assert {k: v.shape for k, v in state.items()} == {k: v.shape for k, v in t["state"][index].items()}


@pytest.mark.parametrize("task", ["text", "sft", "lora", "dpo"])
def test_exports_are_equal(runs: Runs, task: str) -> None:
    name = "adapter_model.safetensors" if task == "lora" else "model.safetensors"
    one, two = (runs.folder / n / "export" / name for n in (task, f"{task}-fsdp"))
    same_weights(one, two)
