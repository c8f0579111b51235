"""Memorisation of invented facts with a frozen base: a memory against LoRA with about as many trained parameters.

python benchmarks/facts.py --model DIR      what is measured, and how, is in benchmarks/README.md
"""

import argparse
import json
import random
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from machine import machine
from transformers import AutoTokenizer

from lmtrain import train
from lmtrain.files import read_jsonl
from lmtrain.models.attention import generation_mode
from lmtrain.run_folder import trained
from lmtrain.run_folder.folder import RunDir

TRAINED, HELD_OUT = "Where does {name} live?", "{name} lives in which town?"
CONTENDERS = {
    "memory": [
        *("peft=memory", "memory.layers=[1,2,3]", "memory.memory_dim=128", "memory.num_heads=8", "memory.top_k=2"),
        *("memory.share_bank=false", "optimizer=muon"),
    ],
    "lora": ["peft=lora", "peft.r=192", "peft.alpha=192"],  # as many parameters as a memory of one shared bank
}


def facts(number: int) -> list[tuple[str, str]]:
    """Returns pairs (name, town), the same in every call; names are unique, towns are not."""
    rng = random.Random(0)
    syllables = [a + b for a in "bdfgklmnprstvz" for b in "aeiou"]
    word = lambda n: "".join(rng.choice(syllables) for _ in range(n)).capitalize()  # noqa: E731
    names = sorted({f"{word(2)} {word(2)}" for _ in range(2 * number)})
    rng.shuffle(names)
    return [(name, word(3)) for name in names[:number]]


def settings(folder: Path, model: Path, args: argparse.Namespace, contender: str) -> list[str]:
    data = ["objective=sft", "data=chat_jsonl", "data.conversation_format=prompt_completion", "data.val_fraction=0"]
    data += [f"data.path={folder / 'facts.jsonl'}", f"data.cache_dir={folder / 'cache'}", "data.packing=off"]
    rows = ["data.seq_len=64", f"data.global_batch_size={args.rows}", f"data.micro_batch_size={args.rows}"]
    steps = [f"trainer.max_steps={args.steps}", "trainer.log_every_n_steps=20", "trainer.precision=32-true"]
    steps += [
        "trainer.val_check_interval=null",
        "trainer.save_every_n_steps=null",
        "callbacks.samples.every_n_validations=0",
    ]
    learning = ["optimizer.weight_decay=0", "schedule=cosine", "schedule.warmup_ratio=0.05"]
    quiet = ["export.enabled=false", "logger=none", "report.enabled=false", f"run.dir={folder / contender}"]
    chosen = ["model=pretrained", f"model.name_or_path={model}", *CONTENDERS[contender], f"optimizer.lr={args.lr}"]
    return [*chosen, *data, *rows, *steps, *learning, *quiet, *args.override]


def batches(tokenizer: object, pairs: list[tuple[str, str]], phrasing: str) -> Iterator[tuple[list[int], list[int]]]:
    """Returns prompts and answers in the tokens of the whole text, as in training."""
    encode = lambda text: tokenizer(text)["input_ids"]  # type: ignore[operator]  # noqa: E731
    for name, town in pairs:
        prompt = encode(phrasing.format(name=name))
        yield prompt, encode(f"{phrasing.format(name=name)} {town}")[len(prompt) :]


@torch.no_grad()
def exact_match(model: torch.nn.Module, tokenizer: object, pairs: list[tuple[str, str]], phrasing: str) -> float:
    """Returns the share of answers that greedy decoding reproduces exactly: every token is the most likely next one."""
    right = 0
    for prompt, answer in batches(tokenizer, pairs, phrasing):
        ids = torch.tensor([[*prompt, *answer]])
        likeliest = model(ids).logits[0, -len(answer) - 1 : -1].argmax(-1)
        right += likeliest.tolist() == answer
    return right / len(pairs)


def measure(folder: Path, args: argparse.Namespace, contender: str, pairs: list[tuple[str, str]]) -> dict[str, object]:
    started, cpu = time.perf_counter(), time.process_time()
    if train.main(settings(folder, args.model, args, contender)) != 0:
        sys.exit(f"{contender}: the run failed")
    seconds, cpu = time.perf_counter() - started, time.process_time() - cpu
    model, tokenizer, _ = trained.from_run(RunDir(folder / contender), "last", {})
    model.eval()
    losses = [r["train/loss"] for r in read_jsonl(folder / contender / "metrics.jsonl") if "train/loss" in r]
    with generation_mode(model):
        found = {name: exact_match(model, tokenizer, pairs, phrasing)
                 for name, phrasing in (("trained phrasing", TRAINED), ("another phrasing", HELD_OUT))}  # fmt: skip
    counted = sum(p.numel() for p in model.parameters() if p.requires_grad)
    return {"contender": contender, "trained parameters": counted, "loss": round(losses[-1], 4), **found,
            "seconds": round(seconds, 1), "cpu seconds": round(cpu, 1)}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="folder of a pretrained model")
    parser.add_argument("--facts", type=int, default=2000)
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--rows", type=int, default=200)
    parser.add_argument("--lr", type=float, default=1e-2)
    parser.add_argument("--contenders", default=",".join(CONTENDERS))
    parser.add_argument("--override", action="append", default=[], help="one more setting of every run")
    args = parser.parse_args()
    pairs = facts(args.facts)
    AutoTokenizer.from_pretrained(args.model)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        rows = [{"prompt": TRAINED.format(name=n), "completion": f" {town}"} for n, town in pairs]
        (folder / "facts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        found = [measure(folder, args, contender, pairs) for contender in args.contenders.split(",")]
    for row in found:
        print(json.dumps(row))
    print(machine())


if __name__ == "__main__":
    main()
