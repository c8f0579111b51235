"""Real runs on a CUDA device that isn't there: where tensors lie, the dtype of products, what waits for the device.

See fake_runs.py for the method. It can't detect wrong numbers, races, or dtype checks inside kernels.
"""

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import library
import pytest

from chats import write_rows
from tiny_pretrained import save_pretrained

HERE = Path(__file__).parent
# More than 4,096 rows of 512 logits, since the loss has another path for small inputs.
COMMON = ["model.vocab_size=512", "model.num_hidden_layers=1", "model.max_position_embeddings=1024"]
TEXT = ["data=text", "tokenizer=bytes", *COMMON, "data.global_batch_size=8", "data.micro_batch_size=8"]
LLAMA = ["model=llama_nano", "model.num_key_value_heads=2"]
SMALL = ["tokenizer=bytes", "model.hidden_size=256", "model.num_attention_heads=4", "model.num_key_value_heads=2"]
QWEN3 = ["model=qwen3_small", *SMALL, "model.intermediate_size=256"]
MOE = ["model=moe_small", *SMALL, "model.moe_intermediate_size=128"]
# Like Gemma 3: sliding-window layers between full-attention ones.
SLIDING = [
    *LLAMA, "model.num_hidden_layers=2", "model.family=gemma3_text",
    "model.hidden_act=null", "model.head_dim=64", "+model.extra.sliding_window=64",
    "+model.extra.layer_types=[sliding_attention,full_attention]",
]  # fmt: skip
MEMORY = ["model=memory_nano", "memory.layers=[0]", "memory.router_noise=0.1", "router.scope=step"]
STEPS = 3
PACKED = ["data.isolate_documents=true"]
PLANTED = ["callbacks.extra=[{_target_: planted.ReadsEachStep}]", "run.allow_target=[planted]"]

PRETRAINING = {  # the optimizer is Muon unless one is named
    "gpt2": ["model.num_hidden_layers=2", "data.global_batch_size=16"],
    "packed_adamw_8bit": [*LLAMA, *PACKED, "optimizer=adamw_8bit"],
    "packed_dropout_lion_planted": [*PACKED, "model.dropout=0.1", "optimizer=lion", *PLANTED],
    "qwen3": QWEN3,
    "sliding_adafactor": [*SLIDING, "optimizer=adafactor"],
    "moe": MOE,
    "memory": [*MEMORY, *LLAMA[1:]],
    "16-mixed": ["trainer.precision=16-mixed"],
    "bf16-true": ["trainer.precision=bf16-true", "trainer.activation_checkpointing=true"],
    "fsdp_adafactor": ["optimizer=adafactor", "trainer.strategy=fsdp"],
    "fp8_fsdp_two_ranks": [
        *LLAMA, "optimizer=adamw", "trainer.strategy=fsdp", "trainer.devices=2", "data.micro_batch_size=2",
        "trainer.activation_checkpointing=true", "trainer.precision=fp8", "trainer.fp8_recipe=rowwise_with_gw_hp",
        "model.hidden_size=1040", "model.num_attention_heads=4", "model.intermediate_size=4112",
    ],
}  # fmt: skip

FINE_TUNING = [
    "model=pretrained", "data.chat_template=zephyr", "data.val_fraction=0.2", "data.global_batch_size=4",
    "data.micro_batch_size=4", "data.seq_len=256",
]  # fmt: skip
LORA = ["peft=lora", "peft.r=4", "peft.dropout=0.1", "optimizer.lr=1e-3"]
SFT = {
    "packed": [],
    "fp8_lora_padded": [  # a micro-batch of 1,000 tokens, not a multiple of 16
        *LORA,
        "data.packing=off",
        "data.seq_len=250",
        "trainer.precision=fp8",
    ],
    "lora_bf16-true": [*LORA, "trainer.precision=bf16-true"],
    "qlora": ["peft=qlora", "peft.r=4", "peft.dropout=0.1", "optimizer.lr=1e-3"],
    "memory": ["peft=memory", "memory.layers=[0]", "memory.share_bank=false"],
}
DPO = {
    "frozen_copy": ["objective.reference=frozen_copy"],
    "adapter_off": LORA,
    "precomputed_32-true": [
        "objective.reference=precomputed",
        "data.share_prompts=false",
        "trainer.precision=32-true",
    ],
}
# fp8 layers times products. LoRA: three per step. fsdp: in each of two micro-batches the forward product twice and one
# more, since the weights' gradients are in bf16. Both: one more in the single batch of validation.
FP8_PRODUCTS = {"fp8_lora_padded": 2 * (3 * STEPS + 1), "fp8_fsdp_two_ranks": 2 * (2 * 3 * STEPS + 1)}
# What may wait for the device: writing a row, a score or a checkpoint, and the start of the run.
MAY_WAIT = {
    "callbacks/metrics.py": {"_log_step", "log_validation", "on_train_start", "state_dict"},
    "callbacks/routing.py": {"use", "warn", "state_dict", "<dictcomp>"},
    "optim/skipping.py": {"to", "state_dict"},  # `counts` come with the row
    "objectives/base.py": {"validation_means"},
    "callbacks/checkpoints.py": {"save"},
    "callbacks/stopping.py": {"after_batch"},  # in a validation, about once a second
    "distributed/dtensor.py": {"gather"},  # of shards, for a checkpoint
    "objectives/start_check.py": {"check_agreement", "check_start", "over", "wrong", "_wrong"},  # in the first steps
    "losses/cross_entropy.py": {"adds_in_fp32"},  # once only: the kernel is tried on numbers
    "objectives/reference.py": {"_swap"},  # once only: the initial values come from the host
}


def seen(cases: dict[str, list[str]], library: Path, folder: Path) -> dict[str, Any]:
    """Runs the cases in a subprocess and returns what was observed of each."""
    done = subprocess.run(
        [sys.executable, str(HERE / "fake_runs.py"), str(library), str(folder)],
        input=json.dumps(cases),
        capture_output=True,
        text=True,
        timeout=60 + 30 * len(cases),
    )
    assert done.returncode == 0, done.stderr[-3000:]
    results = json.loads(done.stdout)
    failed = {name: result["error"][-3000:] for name, result in results.items() if "error" in result}
    assert not failed, "\n".join(f"--- {name}\n{error}" for name, error in failed.items())
    return results


@pytest.fixture(scope="module")
def device(request: pytest.FixtureRequest) -> Path:
    found = library.compiled(request.config.cache.mkdir("one_device"))
    if isinstance(found, str):
        pytest.skip(found)
    return found


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("text")
    for i in range(40):
        (folder / f"{i}.txt").write_text("\n".join(f"line {j} of file {i}: the number {j * i}" for j in range(200)))
    return folder


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_pretrained(tmp_path_factory.mktemp("llama"), max_position_embeddings=256, num_hidden_layers=1,
                           intermediate_size=1040)  # fmt: skip


@pytest.fixture(scope="module")
def cases(text: Path, llama: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, list[str]]]:
    folder = tmp_path_factory.mktemp("rows")
    pretraining = [*TEXT, f"data.path={text}"]
    tuning = [*FINE_TUNING, f"model.name_or_path={llama}"]
    chats, pairs = (write_rows(folder / f"{kind}.jsonl", kind) for kind in ("chat_jsonl", "preference_jsonl"))
    sft = ["objective=sft", "data=chat_jsonl", f"data.path={chats}", *tuning]
    dpo = ["objective=dpo", "data=preference_jsonl", f"data.path={pairs}", *tuning]
    groups = {
        "pretraining": (pretraining, PRETRAINING),
        "sft": (sft, SFT),
        "dpo": (dpo, DPO),
    }
    without = "" if find_spec("torchao") else "fp8"  # tests/models/test_fp8.py reports that it is skipped
    return {
        group: {name: [*fixed, *extra] for name, extra in named.items() if not (without and name.startswith(without))}
        for group, (fixed, named) in groups.items()
    }


def check(result: dict[str, Any], dtype: str, fp8_products: int = 0) -> None:
    assert result["off_device"] == []
    assert result["products"].pop("float8_e4m3fn", 0) == fp8_products
    assert set(result["products"]) == {dtype}
    in_between = [wait for wait in result["waits"] if wait[0] == 2]  # step 2 of 3 writes no row
    assert in_between == []
    elsewhere = []
    for step, what, where in result["waits"]:
        file, _, function = where.partition(" ")
        if step and function not in MAY_WAIT.get(file, ()):
            elsewhere.append((step, what, where))
    assert elsewhere == []


@pytest.mark.slow
def test_runs(device: Path, cases: dict[str, dict[str, list[str]]], tmp_path: Path) -> None:
    """All runs share one process, since starting a process takes longer than a run."""
    flat = {f"{group}_{name}": overrides for group, named in cases.items() for name, overrides in named.items()}
    results = seen(flat, device, tmp_path)
    grouped = {group: {name: results[f"{group}_{name}"] for name in named} for group, named in cases.items()}
    check_pretraining(grouped["pretraining"])
    for name, result in grouped["sft"].items():
        check(result, "bfloat16", FP8_PRODUCTS.get(name, 0))
    for name, result in grouped["dpo"].items():
        check(result, "float32" if "32-true" in name else "bfloat16")


def check_pretraining(results: dict[str, Any]) -> None:
    for name, result in results.items():
        if name == "16-mixed":  # torch's gradient scaler checks in each step for infinite gradients
            result["waits"] = [w for w in result["waits"] if w[2] != "objectives/base.py training_step"]
        if name == "gpt2":  # the output embedding's gradient is summed over the chunks of each micro-batch in fp32
            assert result["fp32_sums"] > STEPS
        if name.endswith("planted"):
            planted = [w for w in result["waits"] if Path(w[2].split()[0]).name == "planted.py"]
            assert [(step, what) for step, what, _ in planted if step == 2] == [(2, "item")]
            result["waits"] = [w for w in result["waits"] if w not in planted]
        if name.endswith("adamw_8bit"):  # as the plan notes: it can't skip a bad update by itself
            waits = [w for w in result["waits"] if w[2] == "objectives/base.py on_before_optimizer_step"]
            assert [step for step, *_ in waits] == [1, 2, 3]
            result["waits"] = [w for w in result["waits"] if w not in waits]
        check(result, "float16" if name == "16-mixed" else "bfloat16", FP8_PRODUCTS.get(name, 0))
