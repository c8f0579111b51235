"""A frozen 4-bit base under FSDP: two gloo ranks hold half of it each and train like one process."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from strategy_runs import BATCH, DPO_LORA, EXACT, LORA, Runs, same_weights
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

from chats import write_chats, write_rows
from inprocess import run
from lmtrain.callbacks.metrics import without_times
from support import TINY, rows
from tiny_pretrained import save_pretrained

pytestmark = pytest.mark.slow
pytest.importorskip("bitsandbytes")

FSDP = "trainer.strategy=fsdp"
NF4 = ["peft.quantization=nf4", "peft.double_quant=true"]
FP4 = ["peft.quantization=fp4", "peft.double_quant=false"]
IN_BF16 = ("stored", "stored_nf4", "bf16", "mixed")  # tasks whose rounding depends on the order of summation
PARTS = ["run.allow_target=[mishaps]", "callbacks.extra=[{_target_: mishaps.NotesParts}]"]
# With two ranks: a layer's rows are not a multiple of two nor packed bytes one of 64, so shards are cut anywhere.
ODD = {"max_position_embeddings": 512, "intermediate_size": 50, "num_key_value_heads": 1}


@pytest.fixture(scope="module")
def runs(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """Runs everything that this module compares; a second launch resumes what the first one saved."""
    r = Runs(tmp_path_factory.mktemp("runs"))
    chats = f"data.path={write_chats(r.folder / 'chats.jsonl', 40)}"
    pairs = f"data.path={write_rows(r.folder / 'pairs.jsonl', 'preference_jsonl', 40)}"
    model = f"model.name_or_path={save_pretrained(r.folder / 'llama', **ODD)}"
    text = [*TINY, *BATCH, "data=text", f"data.path={corpus}", "model=pretrained", "peft=lora", "optimizer.lr=1e-2"]
    tasks = {"sft": [*LORA, chats, model, *NF4, "export.merge=true"], "fp4": [*text, model, *FP4],
             "dpo": [*DPO_LORA, pairs, model, *NF4]}  # fmt: skip
    for task, settings in tasks.items():
        r.one(task, *settings)
        r.two(f"{task}-fsdp", *settings, FSDP, *PARTS)
    r.two("sft-ddp", *tasks["sft"])
    r.two("sft-offload", *tasks["sft"], FSDP, "trainer.fsdp.cpu_offload=true", "trainer.activation_checkpointing=true",
          "trainer.fsdp.reshard_after_forward=false", "trainer.fsdp.reduce_each_micro_batch=true")  # fmt: skip
    r.launch()
    for task in ("sft", "dpo"):
        saved = f"run.resume={r.checkpoint(f'{task}-fsdp', 10)}"
        r.one(f"{task}-fsdp-to-one", *tasks[task], saved)
        r.two(f"{task}-fsdp-to-fsdp", *tasks[task], FSDP, saved)
        r.two(f"{task}-one-to-fsdp", *tasks[task], FSDP, f"run.resume={r.checkpoint(task, 10)}")
    r.two("sft-ddp-to-fsdp", *tasks["sft"], FSDP, f"run.resume={r.checkpoint('sft-ddp', 10)}")
    r.two("sft-fsdp-to-ddp", *tasks["sft"], f"run.resume={r.checkpoint('sft-fsdp', 10)}")
    r.launch()
    return r


@pytest.mark.parametrize("task", ["sft", "fp4", "dpo"])
def test_numbers_are_those_of_one_process(runs: Runs, task: str) -> None:
    runs.compare(f"{task}-fsdp", task)


def test_in_other_ways(runs: Runs) -> None:
    runs.compare("sft-offload", "sft")
    runs.compare("sft-ddp", "sft")


@pytest.mark.parametrize("task", ["sft", "fp4", "dpo"])
def test_each_rank_holds_half_of_the_base(runs: Runs, task: str) -> None:
    found = [json.loads((runs.folder / f"{task}-fsdp" / f"parts_{rank}.json").read_text()) for rank in (0, 1)]
    weights = 2 * (32 * 32 + 2 * 32 * 8 + 32 * 32 + 3 * 32 * 50)
    per_scale = 4 if task == "fp4" else 1
    assert found[0]["whole"] == weights // 2 + weights // 64 * per_scale
    assert sum(part["held"] for part in found) == found[0]["whole"]
    assert found[0]["held"] == pytest.approx(found[1]["held"], abs=2 * 14)  # up to a byte per tensor
    # Each rank keeps whole: 16 numbers per layer; with double quantisation 256 more, an offset, one per 256 scales.
    assert found[0]["tables"] == 14 * (64 if task == "fp4" else 64 + 4 + 1024 + 4)


@pytest.mark.parametrize("task", ["sft", "dpo"])
def test_checkpoints_travel(runs: Runs, task: str) -> None:
    for ours in (f"{task}-fsdp-to-one", f"{task}-one-to-fsdp"):
        runs.compare(ours, task)
    whole = [without_times(r) for r in rows(runs.folder / f"{task}-fsdp" / "metrics.jsonl") if r["step"] > 10]
    assert whole == [without_times(r) for r in rows(runs.folder / f"{task}-fsdp-to-fsdp" / "metrics.jsonl")]


def test_checkpoints_travel_between_strategies(runs: Runs) -> None:
    runs.compare("sft-ddp-to-fsdp", "sft")
    runs.compare("sft-fsdp-to-ddp", "sft")


@pytest.mark.parametrize("task", ["sft", "fp4", "dpo"])
def test_a_checkpoint_is_what_one_process_writes(runs: Runs, task: str) -> None:
    one, two = (Path(runs.checkpoint(name, 20)) for name in (task, f"{task}-fsdp"))
    a, b = ({k: (v.shape, v.dtype) for k, v in torch.load(p / "model.pt").items()} for p in (one, two))
    assert a == b
    assert all("lora_" in name for name in a)


def test_exports_are_equal(runs: Runs) -> None:
    """Compares the adapter, the merged model that a run writes, and the one that `lmtrain.export` makes afterwards."""
    one, two = (runs.folder / name for name in ("sft", "sft-fsdp"))
    same_weights(one / "export" / "adapter_model.safetensors", two / "export" / "adapter_model.safetensors")
    same_weights(one / "export_merged" / "model.safetensors", two / "export_merged" / "model.safetensors")
    shutil.rmtree(two / "export_merged")
    done = run("export", f"run_dir={two}", "export.merge=true", PARTS[0])
    assert done.code == 0, done.err
    same_weights(one / "export_merged" / "model.safetensors", two / "export_merged" / "model.safetensors")


def test_every_kind_of_base_and_adapter(corpus: Path, tmp_path: Path) -> None:
    """Rank 1 builds each kind of base and adapter without weights, and the numbers equal one process's."""
    r = Runs(tmp_path)
    chats = f"data.path={write_chats(tmp_path / 'chats.jsonl', 40)}"
    unpaired = f"data.path={write_rows(tmp_path / 'unpaired.jsonl', 'unpaired_jsonl', 40)}"
    llama = save_pretrained(tmp_path / "base_llama", **ODD)
    lora = [*LORA, chats, f"model.name_or_path={llama}", *NF4]
    tied = save_pretrained(tmp_path / "base_tied", max_position_embeddings=512, tie_word_embeddings=True)
    gpt2 = save_pretrained(tmp_path / "base_gpt2", "gpt2", n_positions=512)
    stored = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True)
    packed = save_pretrained(tmp_path / "base_packed", **ODD)  # only the model is replaced; the tokenizer stays
    model = AutoModelForCausalLM.from_pretrained(llama, quantization_config=stored, dtype=torch.bfloat16)
    model.save_pretrained(packed)
    r.one("first", *lora, "trainer.max_steps=2")
    tasks = {
        "tokens": [*lora, 'tokenizer.add_tokens=["<|a|>","<|b|>"]'],
        "embeddings": [*lora, f"model.name_or_path={tied}", "peft.modules_to_save=[embed_tokens]"],
        "dora": [*lora, "peft.use_dora=true"],
        "continued": [*lora, f"peft.adapter={r.folder / 'first' / 'export'}"],
        "gpt2": [*lora, f"model.name_or_path={gpt2}"],
        "stored": [*LORA, chats, f"model.name_or_path={packed}"],
        "stored_nf4": [*LORA, chats, f"model.name_or_path={packed}", *NF4],
        "memory": [*(s for s in lora if not s.startswith("peft")), "peft=memory", *NF4, "memory.num_chapters=8",
                   "memory.layers=[1]"],
        "kto": [*DPO_LORA, *NF4, "objective=kto", "data=unpaired_jsonl", unpaired, f"model.name_or_path={llama}"],
        "bf16": [*lora, "trainer.precision=bf16-true"],
        "mixed": [*lora, "trainer.precision=bf16-mixed"],
    }  # fmt: skip
    for task, settings in tasks.items():
        short = [s for s in settings if s != "tokenizer=bytes"]  # the model's own tokenizer is the same
        short += ["trainer.max_steps=4", "trainer.val_check_interval=4"]
        if task == "memory":  # each rank balances its routers over its own rows: two ranks differ from one by 1e-3
            r.two(task, *short)
        else:
            r.one(task, *short)
        r.two(f"{task}-fsdp", *short, FSDP)
    r.launch()
    for task in tasks:
        # Four of bf16's units: ranks sum in another order, and AMX in another yet (0.6 % in the norm of step 4).
        r.compare(f"{task}-fsdp", task, rel=2**-6 if task in IN_BF16 else EXACT)
