"""Short runs of everything that differs on a GPU, many at a time: do they work, and do they learn as on a CPU?

Nothing is timed, because the processes share the machine. RUN in a command stands for the folder of its run.
"""

import json
import shlex
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import legs
import torch
from shapes import LOGGER, write_text_bins
from workload import Row, made_conversations, made_pairs, write_model, write_shape

ENV = {"TORCHINDUCTOR_COMPILE_THREADS": "2", "CUBLAS_WORKSPACE_CONFIG": ":4096:8", "COLUMNS": "150"}
ON_BOTH = ("pretrain", "packed", "dpo", "muon")  # run in fp32 on the GPU and on the CPU
LMTRAIN = "lmtrain"
STEPS = "trainer.max_steps=12 trainer.log_every_n_steps=1 trainer.val_check_interval=6 trainer.limit_val_batches=1"
SAVES = f"{STEPS} {' '.join(LOGGER)} trainer.save_every_n_steps=6"
SHORT = f"{SAVES} trainer.save_every_n_steps=null callbacks.samples.every_n_validations=0 export.enabled=false"
ROWS = "data.seq_len=512 data.global_batch_size=8 data.micro_batch_size=8"


def cases(data: Path, toy: bool) -> dict[str, str]:
    """Returns arguments of `python -m` by name, && between processes: pretraining, fine-tuning, runs on both devices.

    data: the folder that `prepare` has made.
    toy: shapes for a CPU.
    """
    found = {name: f"{LMTRAIN}.train {words} run.dir=RUN" for name, words in pretraining(data, toy).items()}
    found |= {name: f"{LMTRAIN}.train {words} run.dir=RUN" for name, words in fine_tuning(data, toy).items()}
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
    verify = f"{LMTRAIN}.verify trainer.deterministic=true run.root=RUN"
    return found | {"verify": f"{verify} {text(data, 'llama_nano')}", "doctor": f"{LMTRAIN}.doctor"}


def prepare(folder: Path, wide: bool) -> None:
    """Writes the bins, the rows and the pretrained models that the cases read, unless they are there."""
    if not folder.exists():
        folder.mkdir()
        chats, pairs = made_conversations(600), made_pairs(300)
        sides = [(pair, side) for pair in pairs for side in ("chosen", "rejected")]
        rows: dict[str, list[Row]] = {
            "chats": chats,
            "pairs": pairs,
            "unpaired": [
                {"prompt": p["prompt"], "completion": p[side], "label": side == "chosen"} for p, side in sides
            ],
            "prompts": [{"prompt": pair["prompt"]} for pair in pairs],
        }
        for name, made in rows.items():
            (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in made))
        write_text_bins(folder / "bins", 2_000_000 if wide else 100_000, 20_000 if wide else 1_000)
        write_model(folder / "model", None, chats)
    if wide and not (folder / "wide").exists():  # two layers as wide as those of Llama 3.2 1B, for products of 8 bits
        config = write_shape(folder / "shape") / "config.json"
        config.write_text(json.dumps(json.loads(config.read_text()) | {"num_hidden_layers": 2, "vocab_size": 4096}))
        write_model(folder / "wide", folder / "shape", made_conversations(1))


def run_all(data: Path, out: Path, first: str, last: str, toy: bool) -> dict[str, Any]:
    """Runs the cases from `first` to before `last`, 14 at a time; of a toy only one.

    Returns: what failed, how each ended, how much the losses of runs on the GPU and on the CPU differ.
    """
    prepare(data, not toy)
    found, names = cases(data, toy), [*cases(data, toy), ""]
    names = names[names.index(first) : names.index(last)]
    if toy:
        names, ending = names[:1], " data.seq_len=64 data.global_batch_size=2 data.micro_batch_size=2"
        found = {name: found[name].split(" && ")[0] + ending for name in names}
    with ThreadPoolExecutor(14) as pool:
        made = {name: pool.submit(_run, found[name], out / name) for name in names}
    ended = {name: of.result() for name, of in made.items()}
    failed = {name: of["failed"] for name, of in ended.items() if of["failed"]}
    both = [name for name in ON_BOTH if {f"{name}_gpu", f"{name}_cpu"} <= ended.keys()]
    return {"failed": failed, "ended": ended, "compared": [_largest_difference(ended, name) for name in both]}


def _run(command: str, folder: Path) -> dict[str, Any]:
    """Runs a case; returns why it failed, if it did, its seconds and losses."""
    began, failed = time.monotonic(), None
    for words in command.replace("RUN", str(folder)).split(" && "):
        try:
            legs.run(legs.Leg([sys.executable, "-m", *shlex.split(words)], lambda _: [], env=ENV), threads=2)
        except legs.Failed as error:
            failed = str(error)[-1000:]
            break
    metrics = folder / "metrics.jsonl"
    rows = [json.loads(line) for line in metrics.read_text().splitlines()] if metrics.exists() else []
    losses, seconds = [row["train/loss"] for row in rows if "train/loss" in row], time.monotonic() - began
    print(f"{folder.name:16} {'failed' if failed else 'ended'} {seconds:6.1f} s {losses[-1:]}", flush=True)
    return {"failed": failed, "seconds": seconds, "losses": losses}


def _largest_difference(found: dict[str, Any], name: str) -> str:
    """Compares the training losses of the same run on the GPU and on the CPU."""
    gpu, cpu = (torch.tensor(found[f"{name}_{device}"]["losses"]) for device in ("gpu", "cpu"))
    if len(gpu) != len(cpu) or not len(gpu):
        return f"{name}: not compared with the CPU"
    return f"{name}: losses on GPU and CPU differ by at most {(gpu - cpu).abs().max():.1e}"


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
