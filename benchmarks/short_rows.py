"""Compares fine-tuning on short padded rows in micro-batches of data.micro_batch_size rows with joined ones.

python benchmarks/short_rows.py --model MODEL [--rounds 2]

64 rows of about 20 to 60 tokens an update, micro-batches of 4 rows (the default) and the same with short rows joined.
Shown are the trained tokens/s, from the median step, and by how much the losses differ. Rounds are interleaved.
"""

import argparse
import json
import random
import sys
import tempfile
from pathlib import Path
from statistics import median

from machine import setting, warn_if_busy
from updates import import_verbs, lmtrain

from lmtrain.run import build

STEPS, SKIPPED = 16, 4
NAMES = ["Ann", "Bob", "Cleo", "Dan", "Eve", "Finn", "Gus", "Hal", "Ida", "Joe", "Kim", "Leo"]


def write_rows(path: Path, rows: int = 2000) -> None:
    """Writes questions of different lengths with their answers."""
    draw = random.Random(0)
    with path.open("w") as file:
        for _ in range(rows):
            who = draw.sample(NAMES, draw.randint(3, 12))
            row = {"prompt": f"{' '.join(who)}: who is last?", "completion": f" {who[-1]}"}
            file.write(json.dumps(row) + "\n")


def train(folder: Path, model: str, joins: bool, name: str) -> list[dict[str, float]]:
    run, before = folder / name, build.joined_tokens
    build.joined_tokens = before if joins else lambda _: None  # type: ignore[assignment]  # there is no key for it
    lmtrain(folder, "train", "objective=sft", "data=chat_jsonl", f"data.path={folder / 'rows.jsonl'}",
            "data.packing=off",
            "data.global_batch_size=64", f"data.cache_dir={folder / 'cache'}", f"model={model}", "optimizer=adamw",
            "optimizer.lr=1e-3", "trainer.precision=32-true", f"trainer.max_steps={STEPS}", "logger=none",
            "trainer.val_check_interval=1000", "trainer.log_every_n_steps=1", "export.enabled=false",
            "callbacks.samples.every_n_validations=0", "report.enabled=false", f"run.dir={run}")  # fmt: skip
    build.joined_tokens = before
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def speed(records: list[dict[str, float]]) -> float:
    return median(r["tokens_per_s"] for r in records if "train/loss" in r and r["step"] > SKIPPED)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="a folder or a name of the hub")
    parser.add_argument("--rounds", type=int, default=2, help="(%(default)s)")
    options = parser.parse_args(argv)
    warn_if_busy()
    import_verbs()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_rows(folder / "rows.jsonl")
        ratios = []
        for i in range(options.rounds):
            apart, joined = (train(folder, options.model, n, f"{n}_{i}") for n in (False, True))
            losses = [[r["train/loss"] for r in found if "train/loss" in r] for found in (apart, joined)]
            off = max(abs(a - b) / a for a, b in zip(*losses, strict=True))
            ratios.append(speed(joined) / speed(apart))
            print(f"apart {speed(apart):,.0f} tokens/s, joined {speed(joined):,.0f}: {ratios[-1]:.2f} times; "
                  f"{len(losses[0])} losses differ by at most {off:.1e} of themselves", flush=True)  # fmt: skip
    print(f"{options.model}: {min(ratios):.2f} to {max(ratios):.2f} times. {setting()}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
