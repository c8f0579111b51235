"""What each ingredient of a recipe for small models is worth: one changed at a time, at equal steps and at equal time.

python benchmarks/ingredients.py --text input.txt          the recipe: experiment=shakespeare_char with two layers

Runs are processes of one thread, as many at once as `--jobs`; their time is the CPU time of the process, so that they
need no idle machine. Differences are of the same seeds; p is of the paired t-test, two-sided.
"""

import argparse
import itertools
import json
import math
import os
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, stdev

import numpy as np
from machine import setting
from rich.console import Console
from rich.table import Table

BASE = [
    "experiment=shakespeare_char", "model.num_hidden_layers=2",
    "trainer.val_check_interval=null", "trainer.save_every_n_steps=null", "trainer.accelerator=cpu",
    "trainer.num_threads=1", "logger=none", "export.enabled=false", "report.enabled=false",
    "callbacks.samples.every_n_validations=0", "callbacks.progress.style=none",
]  # fmt: skip
_SHAPE = ["model.hidden_size=96", "model.num_hidden_layers=2", "model.num_attention_heads=2",
          "model.max_position_embeddings=128"]  # fmt: skip
_NANOCHAT = ["model=llama_nano", *_SHAPE, "model.family=nanochat", "model.hidden_act=relu2",
             "model.tie_word_embeddings=false"]  # fmt: skip
# What is changed -> the words that change it. Families take the recipe's width and depth and its feed-forward weights.
CHANGES: dict[str, list[str]] = {
    "family gpt2": ["model=gpt_nano", *_SHAPE],
    "family llama, untied": ["model=llama_nano", *_SHAPE, "model.intermediate_size=256",
                             "model.tie_word_embeddings=false"],
    "family nanochat (QK-norm, relu2, soft cap)": [*_NANOCHAT, "model.intermediate_size=384"],
    "no convolution": ["model.extra.layer_types=[full_attention]"],
    "no attention": ["model.extra.layer_types=[conv]"],
    "convolution over 3": ["model.extra.conv_L_cache=3"],
    "convolution over 8": ["model.extra.conv_L_cache=8"],
    "tied embeddings": ["model.tie_word_embeddings=true"],
    "AdamW at 2e-3": ["optimizer=adamw", "optimizer.lr=2.0e-3"],
    "AdamW at 6e-3": ["optimizer=adamw", "optimizer.lr=6.0e-3"],
    "rate x 2": ["optimizer.lr=1.2e-2"],
    "rate / 2": ["optimizer.lr=3.0e-3"],
    "3 Newton-Schulz iterations": ["optimizer.ns_steps=3"],
    "momentum 0.9": ["optimizer.momentum=0.9"],
    "betas 0.9, 0.99 of the rest": ["optimizer.betas=[0.9,0.99]"],
    "embeddings at twice the rate": ["optimizer.groups=[{pattern: embed, lr: 1.2e-2}]"],
    "head at half the rate": ["optimizer.groups=[{pattern: lm_head, lr: 3.0e-3}]"],
    "weight decay 0.1": ["optimizer.weight_decay=0.1"],
    "no clipping": ["trainer.gradient_clip_val=null"],
    "cosine to a tenth": ["schedule=cosine", "schedule.warmup_ratio=0.02"],
    "decay in the last fifth": ["schedule.decay_ratio=0.2"],
    "decay 1 - sqrt": ["schedule.decay_shape=sqrt"],
    "decay to a twentieth": ["schedule.min_lr_ratio=0.05"],
    "warm-up of a tenth": ["schedule.warmup_ratio=0.1"],
    "half the rows a step, twice the steps": ["data.global_batch_size=12", "data.micro_batch_size=12"],
    "rows of 64, as many tokens": ["data.seq_len=64", "data.global_batch_size=48", "data.micro_batch_size=48"],
    "z-loss 1e-4": ["objective.z_loss=1.0e-4"],
}  # fmt: skip
TWICE_THE_STEPS = "half the rows a step, twice the steps"


@dataclass
class Result:
    """One run: loss in nats a token over all held-out rows, CPU seconds of its process without what none trains in."""

    loss: float
    cpu_s: float


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", type=Path, required=True, help="Shakespeare's input.txt")
    parser.add_argument("--steps", type=int, default=250, help="of the recipe (%(default)s)")
    parser.add_argument("--seeds", type=int, default=3, help="runs of each (%(default)s)")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="runs at once (%(default)s)")
    parser.add_argument("--only", help="changes whose names contain one of these words, comma-separated")
    parser.add_argument("--json", type=Path, help="also write the numbers to this file, after each run")
    return parser.parse_args()


def train(options: argparse.Namespace, cache: Path, change: list[str], seed: int, steps: int) -> Result:
    """One run; its own time is what the process took beyond that of a run of one step."""
    with tempfile.TemporaryDirectory(prefix="lmtrain_ingredients_") as folder:
        words = [*BASE, *change, f"seed={seed}", f"data.path={options.text.resolve()}", f"data.cache_dir={cache}"]
        words += [f"run.dir={folder}/run", f"trainer.max_steps={steps}"]
        environ = {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        command = [sys.executable, "-m", "lmtrain.train", *words]
        process = subprocess.Popen(
            command, env=environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
        )
        assert process.stdout is not None
        said = process.stdout.read()
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode != 0:
            raise SystemExit(f"{' '.join(change)}: {said[-2000:]}")
        rows = [json.loads(line) for line in Path(folder, "run", "metrics.jsonl").read_text().splitlines()]
    return Result(next(r["val/loss"] for r in reversed(rows) if "val/loss" in r), usage.ru_utime + usage.ru_stime)


def p_value(differences: list[float]) -> float:
    """Of the paired t-test, two-sided; by the trapezoid rule over Student's density."""
    n = len(differences)
    if n < 2 or stdev(differences) == 0:
        return math.nan
    t, df = abs(mean(differences)) / (stdev(differences) / math.sqrt(n)), n - 1
    scale = math.exp(math.lgamma((df + 1) / 2) - math.lgamma(df / 2)) / math.sqrt(df * math.pi)
    x = np.linspace(0, t, 20_001)
    return float(1 - 2 * np.trapezoid(scale * (1 + x**2 / df) ** (-(df + 1) / 2), x))


def main() -> int:
    options = parse()
    wanted = (options.only or "").split(",")
    changes = {name: words for name, words in CHANGES.items() if any(part in name for part in wanted)}
    results: dict[str, dict[str, list[Result]]] = {}
    with tempfile.TemporaryDirectory(prefix="lmtrain_ingredients_") as name, ThreadPoolExecutor(options.jobs) as pool:
        cache = Path(name)
        start = train(options, cache, [], 1, 1).cpu_s  # and tokenizes

        def measure(kind: str, steps: dict[str, int]) -> None:
            """All seeds of these changes; neighbours in time are compared with each other."""
            jobs = [
                (change, pool.submit(train, options, cache, changes.get(change, []), seed, count))
                for seed, (change, count) in itertools.product(range(1, options.seeds + 1), steps.items())
            ]
            for change, job in jobs:
                result = job.result()
                result.cpu_s -= start
                results.setdefault(change, {}).setdefault(kind, []).append(result)
                print(f"{kind}  {change}: {result.loss:.4f} in {result.cpu_s:.1f} CPU s", flush=True)
                if options.json:
                    numbers = {c: {k: [vars(r) for r in runs] for k, runs in by.items()} for c, by in results.items()}
                    options.json.write_text(json.dumps(numbers, indent=2) + "\n")

        count = {change: options.steps * (2 if change == TWICE_THE_STEPS else 1) for change in ("recipe", *changes)}
        measure("equal steps", count)
        base = mean(r.cpu_s for r in results["recipe"]["equal steps"])
        ratio = {change: mean(r.cpu_s for r in results[change]["equal steps"]) / base for change in changes}
        measure("equal time", {c: round(count[c] / r) for c, r in ratio.items() if abs(r - 1) > 0.03})
    show(results, ratio, options)
    return 0


def show(results: dict[str, dict[str, list[Result]]], ratio: dict[str, float], options: argparse.Namespace) -> None:
    recipe = results["recipe"]["equal steps"]
    table = Table(title=f"the recipe, {options.steps} steps: val/loss {mean(r.loss for r in recipe):.4f}")
    for column in ("change", "time", "equal steps", "p", "equal time", "p"):
        table.add_column(column, justify="right" if column != "change" else "left", no_wrap=True)
    for change, share in ratio.items():
        cells = []
        for kind in ("equal steps", "equal time"):
            runs = results[change].get(kind, results[change]["equal steps"])
            apart = [run.loss - base.loss for run, base in zip(runs, recipe, strict=True)]
            cells += [f"{mean(apart):+.4f}", f"{p_value(apart):.3f}"]
        table.add_row(change, f"{share:.2f}", *cells)
    Console(width=None if sys.stdout.isatty() else 120).print(table)
    print(f"{options.seeds} seeds; {setting()}")


if __name__ == "__main__":
    sys.exit(main())
