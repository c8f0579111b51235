"""The effect of each ingredient of a recipe for small models, changed one at a time, at equal steps and at equal time.

python benchmarks/ingredients.py --text input.txt --json numbers.json           the losses
python benchmarks/ingredients.py --text input.txt --json numbers.json --times   what a step takes: on an idle machine

The recipe is experiment=shakespeare_char with two layers. Each run is a process with one thread. Results that are
already in the file of `--json` are not computed again. Once `--times` has measured step times, a change that alters the
time per step is also run at equal time: for as many steps as fit into the recipe's time. Differences are between runs
with the same seed; p is from the two-sided paired t-test.
"""

import argparse
import functools
import itertools
import math
import sys
from pathlib import Path
from statistics import mean, median, stdev

import numpy as np
from kept import Kept, train
from machine import setting
from rich.console import Console
from rich.table import Table

BASE = ["experiment=shakespeare_char", "model.num_hidden_layers=2", "optimizer.momentum=0.95"]
_SHAPE = ["model.hidden_size=96", "model.num_hidden_layers=2", "model.num_attention_heads=2",
          "model.max_position_embeddings=128"]  # fmt: skip
_NANOCHAT = ["model=llama_nano", *_SHAPE, "model.family=nanochat", "model.hidden_act=relu2",
             "model.tie_word_embeddings=false"]  # fmt: skip
# Change -> its overrides. Model families use the recipe's width and depth and as many feed-forward weights.
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
    "momentum 0.9": ["optimizer.momentum=0.9"],
    "betas 0.9, 0.99 of the rest": ["optimizer.betas=[0.9,0.99]"],
    "embeddings at twice the rate": ["optimizer.groups=[{pattern: embed, lr: 1.2e-2}]"],
    "head at half the rate": ["optimizer.groups=[{pattern: lm_head, lr: 3.0e-3}]"],
    "weight decay 0.1": ["optimizer.weight_decay=0.1"],
    "no clipping": ["trainer.gradient_clip_val=null"],
    "cosine": ["schedule=cosine", "schedule.warmup_ratio=0.02"],
    "momentum 0.85": ["optimizer.momentum=0.85"],
    "decay in the last fifth": ["schedule.decay_ratio=0.2"],
    "decay 1 - sqrt": ["schedule.decay_shape=sqrt"],
    "decay to a twentieth": ["schedule.min_lr_ratio=0.05"],
    "warm-up of a tenth": ["schedule.warmup_ratio=0.1"],
    "half the rows a step, twice the steps": ["data.global_batch_size=12", "data.micro_batch_size=12"],
    "rows of 64, as many tokens": ["data.seq_len=64", "data.global_batch_size=48", "data.micro_batch_size=48"],
    "average of the weights (EMA 0.99)": ["callbacks.ema.enabled=true", "callbacks.ema.decay=0.99"],
    "momentum 0.9 and rate x 2": ["optimizer.momentum=0.9", "optimizer.lr=1.2e-2"],
    "momentum 0.9, convolution over 8": ["optimizer.momentum=0.9", "model.extra.conv_L_cache=8"],
}  # fmt: skip
TWICE_THE_STEPS = "half the rows a step, twice the steps"


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", type=Path, required=True, help="Shakespeare's input.txt")
    parser.add_argument("--json", type=Path, required=True, help="where numbers are kept; read at the start")
    parser.add_argument("--steps", type=int, default=250, help="of the recipe (%(default)s)")
    parser.add_argument("--seeds", type=int, default=3, help="runs of each (%(default)s)")
    parser.add_argument("--times", action="store_true", help="measure what a step takes in place of losses")
    parser.add_argument("--rounds", type=int, default=3, help="of --times (%(default)s)")
    parser.add_argument("--only", default="", help="changes whose names contain one of these words, comma-separated")
    return parser.parse_args()


def loss_of(options: argparse.Namespace, change: list[str], seed: int, steps: int) -> float:
    rows = train([*BASE, *change, f"data.path={options.text.resolve()}", f"seed={seed}", f"trainer.max_steps={steps}"])
    return next(row["val/loss"] for row in reversed(rows) if "val/loss" in row)


def step_of(options: argparse.Namespace, change: list[str]) -> float:
    """Returns the milliseconds per step: the median of the later steps of a short run."""
    short = ["trainer.max_steps=60", "trainer.log_every_n_steps=5", "trainer.limit_val_batches=1"]
    rows = train([*BASE, *change, f"data.path={options.text.resolve()}", *short])
    return median(row["step_ms"] for row in rows if row["step"] >= 20 and "step_ms" in row)


def p_value(differences: list[float]) -> float:
    """Returns p of the two-sided paired t-test, by the trapezoid rule over the density of Student's t."""
    n = len(differences)
    if n < 2 or stdev(differences) == 0:
        return math.nan
    t, df = abs(mean(differences)) / (stdev(differences) / math.sqrt(n)), n - 1
    scale = math.exp(math.lgamma((df + 1) / 2) - math.lgamma(df / 2)) / math.sqrt(df * math.pi)
    x = np.linspace(0, t, 20_001)
    return float(1 - 2 * np.trapezoid(scale * (1 + x**2 / df) ** (-(df + 1) / 2), x))


def main() -> int:
    options = parse()
    kept, wanted = Kept(options.json), options.only.split(",")
    changes = {"recipe": []} | {n: words for n, words in CHANGES.items() if any(part in n for part in wanted)}
    if options.times:
        for turn, (name, words) in itertools.product(range(options.rounds), changes.items()):
            kept.number("step_ms", f"{name} @ {turn}", functools.partial(step_of, options, words))
        return 0
    times = {name: time for name in changes if (time := step_time(kept, name)) is not None}
    equal_steps, equal_time = dict[str, list[float]](), dict[str, list[float]]()
    for seed, (name, words) in itertools.product(range(1, options.seeds + 1), changes.items()):
        steps = options.steps * (2 if name == TWICE_THE_STEPS else 1)

        def loss(steps: int, seed: int = seed, name: str = name, words: list[str] = words) -> float:
            measure = functools.partial(loss_of, options, words, seed, steps)
            return kept.number("loss", f"{name} @ {seed} x {steps}", measure)

        equal_steps.setdefault(name, []).append(loss(steps))
        if {name, "recipe"} <= times.keys():
            fair = round(options.steps * times["recipe"] / times[name])
            equal_time.setdefault(name, []).append(loss(fair if abs(fair / steps - 1) > 0.03 else steps))
    show(options, equal_steps, equal_time, times)
    return 0


def step_time(kept: Kept, change: str) -> float | None:
    """Returns the milliseconds per step: the median of the measurements of --times."""
    found = [ms for name, ms in kept.found.get("step_ms", {}).items() if name.startswith(f"{change} @ ")]
    return median(found) if found else None


def show(
    options: argparse.Namespace,
    equal_steps: dict[str, list[float]],
    equal_time: dict[str, list[float]],
    times: dict[str, float],
) -> None:
    recipe = equal_steps["recipe"]
    table = Table(title=f"the recipe, {options.steps} steps: val/loss {mean(recipe):.4f}")
    for column in ("change", "equal steps", "p", "a step's time", "equal time", "p"):
        table.add_column(column, justify="right" if column != "change" else "left", no_wrap=True)
    for change in list(equal_steps)[1:]:
        cells = apart(equal_steps[change], recipe)
        cells.append(f"{times[change] / times['recipe']:.2f}" if change in equal_time else "")
        cells += apart(equal_time[change], recipe) if change in equal_time else ["", ""]
        table.add_row(change, *cells)
    Console(width=None if sys.stdout.isatty() else 120).print(table)
    print(f"{options.seeds} seeds; {setting()}")


def apart(losses: list[float], recipe: list[float]) -> list[str]:
    differences = [loss - base for loss, base in zip(losses, recipe, strict=True)]
    return [f"{mean(differences):+.4f}", f"{p_value(differences):.3f}"]


if __name__ == "__main__":
    sys.exit(main())
