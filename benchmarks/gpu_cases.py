"""The commands of gpu_check.py by name. RUN in a command stands for the folder of its run."""

import sys
from pathlib import Path

from shapes import LOGGER

TESTS = Path(__file__).resolve().parents[1] / "tests"
ON_BOTH = ("pretrain", "packed", "dpo", "muon")  # run in fp32 on the GPU and on the CPU
LMTRAIN = f"{sys.executable} -m lmtrain"
STEPS = "trainer.max_steps=12 trainer.log_every_n_steps=1 trainer.val_check_interval=6 trainer.limit_val_batches=1"
SAVES = f"{STEPS} {' '.join(LOGGER)} trainer.save_every_n_steps=6"
SHORT = f"{SAVES} trainer.save_every_n_steps=null callbacks.samples.every_n_validations=0 export.enabled=false"
ROWS = "data.seq_len=512 data.global_batch_size=8 data.micro_batch_size=8"


def cases(data: Path, toy: bool) -> dict[str, str]:
    """Returns shell commands; those that take longest come first.

    data: the folder that gpu_check.py has prepared.
    toy: shapes for a CPU.
    """
    found = {"python_stdlib": f"{LMTRAIN}.train experiment=python_stdlib budget.minutes=2 run.dir=RUN {cache(data)}"}
    found |= {name: f"{LMTRAIN}.train {words} run.dir=RUN" for name, words in fine_tuning(data, toy).items()}
    found |= {name: f"{LMTRAIN}.train {words} run.dir=RUN" for name, words in pretraining(data, toy).items()}
    found["gpt_small"] += f" && {LMTRAIN}.generate RUN '115 101' && {LMTRAIN}.evaluate run_dir=RUN"
    found["sft"] += f" export.enabled=true && {LMTRAIN}.generate RUN hello"
    exact = {
        "pretrain": text(data, "llama_nano"),
        "packed": sft(data),
        "dpo": f"{pairs(data)} objective=dpo objective.reference=frozen_copy",
        "muon": f"{text(data, 'llama_nano')} optimizer=muon",
    }
    for name, words in exact.items():
        on = f"{LMTRAIN}.train {words} trainer.precision=32-true trainer.compile=false run.dir=RUN"
        gpu = "cpu" if toy else "gpu"
        found |= {f"{name}_gpu": f"{on} trainer.accelerator={gpu}", f"{name}_cpu": f"{on} trainer.accelerator=cpu"}
    verify = f"CUBLAS_WORKSPACE_CONFIG=:4096:8 {LMTRAIN}.verify trainer.deterministic=true run.root=RUN"
    return found | {
        "verify": f"{verify} {text(data, 'llama_nano')}",
        "verify_packed": f"{verify} {sft(data)}",
        "doctor": f"{LMTRAIN}.doctor",
        "gpu_tests": f"{sys.executable} -m pytest -q -m gpu -p no:cacheprovider {TESTS}/losses {TESTS}/models",
    }


def cache(data: Path) -> str:
    return f"data.cache_dir={data}/cache {' '.join(LOGGER)}"


def text(data: Path, model: str) -> str:
    """AdamW on bytes in bins."""
    bins = f"data=bins data.path={data}/bins {cache(data)}"
    return f"{bins} {ROWS} {SHORT} optimizer=adamw optimizer.lr=6e-4 model={model} model.max_position_embeddings=1024"


def stdlib(data: Path) -> str:
    """Text with document boundaries and a tokenizer, for a small model."""
    source = f"data=python_stdlib {cache(data)} tokenizer=bytes"
    return f"{source} {ROWS} {SHORT} model=llama_nano model.max_position_embeddings=1024"


def tuned(data: Path) -> str:
    rows = "data.global_batch_size=16 data.micro_batch_size=16 data.seq_len=1024 data.chat_template=chatml"
    model = f"model=pretrained model.name_or_path={data}/model"
    return f"{model} {cache(data)} {SHORT} {rows} data.val_fraction=0.1"


def sft(data: Path) -> str:
    return f"{tuned(data)} objective=sft data=chat_jsonl data.path={data}/chats.jsonl"


def pairs(data: Path) -> str:
    return f"{tuned(data)} data=preference_jsonl data.on_too_long=drop data.path={data}/pairs.jsonl"


def pretraining(data: Path, toy: bool) -> dict[str, str]:
    gpt, nano = text(data, "gpt_nano" if toy else "gpt_small"), text(data, "llama_nano")
    full = "" if toy else "data.seq_len=1024 data.global_batch_size=64 data.micro_batch_size=64"
    experts = "model.hidden_size=128 model.moe_intermediate_size=64" if toy else ""
    wide = "model.hidden_size=1024 model.intermediate_size=4096 model.num_attention_heads=16"
    size = "nano" if toy else "small"
    return {
        "gpt_small": f"{gpt} {full} {SAVES} export.enabled=true",
        "moe_small": f"{text(data, 'moe_small')} {experts}",
        "modern": f"{text(data, f'modern_{size}')} optimizer=muon",
        "qwen3": f"{text(data, 'qwen3_small')} model.num_hidden_layers=2",
        "lfm2": f"{text(data, 'lfm2_nano')} optimizer=muon model.dropout=0.1",
        "memory": text(data, f"memory_{size}"),
        "fp8": f"{nano} trainer.precision=fp8 {wide} model.num_key_value_heads=4",
        "fsdp": f"{gpt} trainer.strategy=fsdp",
        "deepspeed": f"{nano} trainer.strategy=deepspeed",
        "ddp": f"{nano} trainer.strategy=ddp",
        "async_save": f"{gpt} trainer.save_every_n_steps=4 checkpoint.async_save=true",
        **{name: f"{gpt} optimizer={name}" for name in ("muon", "lion", "adafactor", "adamw_8bit")},
        **{name: f"{gpt} trainer.precision={name}" for name in ("16-mixed", "32-true", "bf16-true")},
        "eager": f"{gpt} trainer.compile=false",
        "checkpointing": f"{gpt} trainer.activation_checkpointing=true",
        "dropout": f"{stdlib(data)} model.dropout=0.1 data.isolate_documents=true",
        "mdlm": f"{stdlib(data)} objective=mdlm tokenizer.add_tokens=[HIDDEN] objective.mask_token=HIDDEN",
        "ema": f"{nano} callbacks=ema",
        "batch_warmup": f"{nano} data.micro_batch_size=2 data.batch_warmup.steps=4 data.batch_warmup.start_size=2",
    }


def fine_tuning(data: Path, toy: bool) -> dict[str, str]:
    prompts = f"data=prompts_jsonl data.path={data}/prompts.jsonl {ROWS} data.chat_template=chatml"
    model = f"model=pretrained model.name_or_path={data}/model {cache(data)} {SHORT}"
    return {
        "int8": f"{sft(data)} peft=qlora_8bit",
        "qlora": f"{sft(data)} peft=qlora trainer.activation_checkpointing=true",
        "lora": f"{sft(data)} peft=lora",
        "lora_bf16": f"{sft(data)} peft=lora trainer.precision=bf16-true",
        "dpo_lora": f"{pairs(data)} objective=dpo peft=lora",
        "sft": sft(data),
        "sft_fp8": sft(data) if toy else f"{sft(data)} trainer.precision=fp8 model.name_or_path={data}/wide",
        "sft_bf16": f"{sft(data)} trainer.precision=bf16-true",
        "padded": f"{sft(data)} data.packing=off",
        "dpo": f"{pairs(data)} objective=dpo objective.reference=frozen_copy",
        "dpo_precomputed": f"{pairs(data)} objective=dpo objective.reference=precomputed",
        "reward": f"{pairs(data)} objective=reward",
        "kto": f"{tuned(data)} objective=kto data=unpaired_jsonl data.path={data}/unpaired.jsonl",
        "distill": f"{sft(data)} data.packing=off objective=distill objective.teacher={data}/model "
        "objective.on_policy=0.5 objective.max_new_tokens=16",
        "grpo": f"{model} {prompts} objective=grpo reward=regex reward.pattern='.*7' objective.max_new_tokens=32 "
        "objective.group_size=4",
    }
