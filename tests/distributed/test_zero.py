"""DeepSpeed's ZeRO on two gloo ranks: numbers and exports equal one process's, and checkpoints are portable."""

import json
from pathlib import Path

import pytest
import torch
from strategy_runs import CAUSAL, DPO, DPO_LORA, LORA, Runs, same_weights

from chats import write_chats, write_rows
from inprocess import message, run, train_tiny
from tiny_pretrained import save_pretrained

ZERO = {stage: ["trainer.strategy=deepspeed", f"trainer.deepspeed.stage={stage}"] for stage in (1, 2, 3)}
QUICK = ["callbacks.samples.every_n_validations=0", "export.enabled=false"]
# Buckets filled by several tensors; parameters that stay sharded, which those of a small model otherwise don't.
FILES = {
    2: {"zero_optimization": {"stage": 2, "reduce_bucket_size": 3000, "allgather_bucket_size": 3000}},
    3: {"zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0, "sub_group_size": 20000}},
}


def own_file(folder: Path, stage: int) -> list[str]:
    path = folder / f"zero{stage}.json"
    path.write_text(json.dumps(FILES[stage]))
    return ["trainer.strategy=deepspeed", f"trainer.deepspeed.config={path}"]


@pytest.fixture(scope="module")
def tasks(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    folder = tmp_path_factory.mktemp("data")
    model = f"model.name_or_path={save_pretrained(folder / 'llama', max_position_embeddings=512)}"
    pairs = f"data.path={write_rows(folder / 'pairs.jsonl', 'preference_jsonl', 40)}"
    return {
        "text": [*CAUSAL, f"data.path={corpus}"],
        "lora": [*LORA, f"data.path={write_chats(folder / 'chats.jsonl', 40)}", model],
        "dpo": [*DPO, pairs, model],
        "dpo_lora": [*DPO_LORA, pairs, model],
    }


@pytest.fixture(scope="module")
def runs(tasks: dict[str, list[str]], tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """Runs everything that this module compares; a second launch resumes what the first one saved."""
    pytest.importorskip("deepspeed")
    r = Runs(tmp_path_factory.mktemp("zero"))
    offload = "trainer.deepspeed.offload_optimizer=cpu"
    for task, settings in tasks.items():
        r.one(task, *settings)
        for stage in (2, 3):
            r.two(f"{task}-zero{stage}", *settings, *ZERO[stage], *(QUICK if task == "dpo_lora" else []))
    text, dpo, dpo_lora = tasks["text"], tasks["dpo"], tasks["dpo_lora"]
    r.two("text-ddp", *text, *QUICK)
    r.two("text-fsdp", *text, *QUICK, "trainer.strategy=fsdp")
    r.two("text-zero1", *text, *QUICK, *ZERO[1])
    r.two("text-file2", *text, *QUICK, *own_file(r.folder, 2))
    r.two("text-offload2", *text, *QUICK, *ZERO[2], offload)
    r.two("text-offload3", *text, *QUICK, *ZERO[3], offload, "trainer.deepspeed.offload_parameters=cpu")
    r.two("dpo-zero1", *dpo, *QUICK, *ZERO[1])
    r.two("dpo-file3", *dpo, *QUICK, *own_file(r.folder, 3))
    r.two("dpo-precomputed", *dpo, *QUICK, *ZERO[3], "objective.reference=precomputed")
    r.two("dpo_lora-frozen_copy", *dpo_lora, *QUICK, *ZERO[3], "objective.reference=frozen_copy")
    r.launch()
    for task in ("text", "lora", "dpo"):
        for stage in (2, 3):
            saved = f"run.resume={r.checkpoint(f'{task}-zero{stage}', 10)}"
            r.one(f"{task}-zero{stage}-to-one", *tasks[task], *QUICK, saved)
            one = f"run.resume={r.checkpoint(task, 10)}"
            r.two(f"{task}-one-to-zero{stage}", *tasks[task], *QUICK, *ZERO[stage], one)
    strategies = {"ddp": [], "fsdp": ["trainer.strategy=fsdp"], "zero2": ZERO[2], "zero3": ZERO[3]}
    for a, b in TRAVELS:
        r.two(f"text-{a}-to-{b}", *text, *QUICK, *strategies[b], f"run.resume={r.checkpoint(f'text-{a}', 10)}")
    from_offload = f"run.resume={r.checkpoint('text-offload3', 10)}"
    r.two("text-offload3-to-file2", *text, *QUICK, *own_file(r.folder, 2), from_offload)
    r.launch()
    return r


TRAVELS = [("zero2", "ddp"), ("zero2", "zero3"), ("zero3", "fsdp"), ("fsdp", "zero2"), ("ddp", "zero3")]


@pytest.mark.slow
@pytest.mark.parametrize("task", ["text", "lora", "dpo"])
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
    for name in ("zero1", "file2", "offload2", "offload3", "offload3-to-file2"):
        runs.compare(f"text-{name}", "text")


@pytest.mark.slow
@pytest.mark.parametrize(("a", "b"), TRAVELS)
def test_checkpoints_travel_between_strategies(runs: Runs, a: str, b: str) -> None:
    runs.compare(f"text-{a}-to-{b}", "text")


@pytest.mark.slow
def test_preferences_in_other_ways(runs: Runs) -> None:
    for name in ("zero1", "file3", "precomputed"):
        runs.compare(f"dpo-{name}", "dpo")
    for name in ("zero2", "zero3", "frozen_copy"):
        runs.compare(f"dpo_lora-{name}", "dpo_lora")


@pytest.mark.slow
@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("task", ["text", "lora", "dpo"])
def test_exports_are_equal(runs: Runs, task: str, stage: int) -> None:
    """Compares the export that a run writes, and the one that `lmtrain.export` makes of its checkpoint."""
    one, two = (runs.folder / name / "export" for name in (task, f"{task}-zero{stage}"))
    same(one, two)
    for folder in (one, two):
        done = run("export", f"run_dir={folder.parent}")
        assert done.code == 0, done.err
    same(one, two)


def same(one: Path, other: Path) -> None:
    (name,) = (file.name for file in one.glob("*.safetensors"))
    same_weights(one / name, other / name)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (["trainer.strategy=deepspeed", "trainer.accelerator=cpu"], "needs CUDA devices"),
        (["trainer.strategy=deepspeed", "optimizer=muon"], "Set optimizer=adamw or lion, or trainer.strategy=fsdp"),
        (
            ["trainer.strategy=deepspeed", "optimizer=adafactor"],
            "optimizer=adafactor does not go with trainer.strategy",
        ),
        (["trainer.strategy=deepspeed", "trainer.deepspeed.offload_parameters=cpu"], "deepspeed.stage=3"),
        (
            ["trainer.strategy=deepspeed", "trainer.deepspeed.offload_optimizer=nvme"],
            "=nvme needs trainer.deepspeed.stage=3",
        ),
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
