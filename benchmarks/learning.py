"""The time until lmtrain reaches the final validation loss of nanoGPT, on the same bins.

python benchmarks/learning.py --nanogpt DIR          DIR: a folder with nanoGPT's model.py

The bins are the bytes of the Python packages of this machine, or those of --bins. nanoGPT's model trains with its
train.py's AdamW and cosine, lmtrain as the recipes say, the same number of steps of the same rows unless --our-steps
says otherwise; all are scored on all of val.bin in the same rows. Seconds are steps times the median step time, without
startup, compilation and validation; process_s is the time of the whole process. With --together, all train at the same
time on one device: their losses mean the same, their times nothing.
"""

import argparse
import json
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median
from typing import Any

import torch
from contenders import CONTENDERS, Job
from legs import Failed, Leg, Lines, Skipped, interval_ms, run
from machine import machine, setting, versions
from shapes import LOGGER, SHAPES, write_text_bins

from lmtrain.config import compose as config

DECAY = "schedule=wsd schedule.decay_ratio=0.6 schedule.decay_shape=linear"
RECIPES = {
    "muon": "optimizer=muon",
    "muon_2x": f"optimizer=muon optimizer.lr=1.2e-3 {DECAY}",
    "muon_4x": f"optimizer=muon optimizer.lr=2.4e-3 {DECAY}",
    "modern": f"model=modern_small tokenizer=bpe model.max_position_embeddings=1024 optimizer=muon {DECAY}",
}


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nanogpt", type=lambda p: Path(p).resolve(), help="a folder with nanoGPT's model.py")
    parser.add_argument("--shape", choices=SHAPES, help="default: nano on a CPU, small on a GPU")
    parser.add_argument("--rows", type=int, default=64, help="per step (%(default)s)")
    parser.add_argument("--steps", type=int, default=600, help="of each (%(default)s)")
    parser.add_argument("--train-tokens", type=int, default=10_000_000)
    parser.add_argument("--val-tokens", type=int, default=200_000)
    parser.add_argument("--our-steps", type=int, help="of lmtrain; default: as --steps")
    parser.add_argument("--contenders", default="muon,nanogpt", help=f"nanogpt, {', '.join(RECIPES)} (%(default)s)")
    parser.add_argument("--bins", type=Path, help="a folder that package_bins.py wrote")
    parser.add_argument("--together", action="store_true", help="train all at the same time, for their losses only")
    parser.add_argument("--threads", type=int, help="CPU threads; default: torch's choice")
    parser.add_argument("--json", type=Path, help="also write the numbers to this file")
    options = parser.parse_args(argv)
    options.our_steps = options.our_steps or options.steps
    options.cuda = torch.cuda.is_available()
    options.shape = options.shape or ("small" if options.cuda else "nano")
    return options


def overrides(options: argparse.Namespace, bins: Path, folder: Path) -> list[str]:
    shape = SHAPES[options.shape]
    return [
        *shape.model,
        *LOGGER,
        "data=bins",
        f"data.path={bins}",
        f"data.cache_dir={folder / 'cache'}",
        f"data.seq_len={shape.seq_len}",
        f"data.global_batch_size={options.rows}",
        f"data.micro_batch_size={options.rows}",
        f"trainer.max_steps={options.our_steps}",
        f"trainer.precision={'bf16-mixed' if options.cuda else '32-true'}",
        f"trainer.log_every_n_steps={max(1, options.our_steps // 40)}",
        f"trainer.val_check_interval={max(1, options.our_steps // 20)}",
        "trainer.limit_val_batches=null",
        "trainer.save_every_n_steps=null",
        "callbacks.samples.every_n_validations=0",
        "export.enabled=false",
    ]


def nanogpt(options: argparse.Namespace, bins: Path, folder: Path) -> dict[str, float]:
    """Returns its final loss on the rows that lmtrain validates on."""
    chosen = [*overrides(options, bins, folder), "optimizer=adamw"]
    every, precision = max(1, options.steps // 40), "bf16" if options.cuda else "fp32"
    job = Job(config.check(config.compose(chosen)), chosen, bins, 0, options.steps, every, precision, options.cuda)
    leg = CONTENDERS["nanogpt_model"](job, folder, options)
    # The defaults of its train.py, except the lengths of schedule and warm-up.
    schedule = {"learning_rate": 6e-4, "min_lr": 6e-5, "decay_lr": True, "warmup_iters": options.steps // 20}
    spec = folder / "spec.json"
    spec.write_text(json.dumps(json.loads(spec.read_text()) | schedule | {"score": True}))
    done = run(leg, options.threads)
    step_ms = median(interval_ms(done.stamps, 2 * every))
    seconds = step_ms * options.steps / 1000
    return {"val_loss": done.facts["val_loss"], "step_ms": step_ms, "seconds": seconds, "process_s": done.seconds}


def lmtrain(options: argparse.Namespace, bins: Path, folder: Path, recipe: str) -> dict[str, Any]:
    """Returns its numbers, and the validation loss by step in `curve`."""

    def rows() -> list[dict[str, Any]]:
        return [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]

    def curve(_: Lines) -> list[tuple[int, float]]:
        return [(row["step"], row["val/loss"]) for row in rows() if "val/loss" in row]

    words = [*overrides(options, bins, folder), *RECIPES[recipe].split(), f"run.dir={folder / 'run'}"]
    done = run(Leg([sys.executable, "-m", "lmtrain.train", *words], curve), options.threads)
    step_ms = median([row["step_ms"] for row in rows() if "step_ms" in row][2:])
    found = {"step_ms": step_ms, "seconds": step_ms * options.our_steps / 1000, "process_s": done.seconds}
    return {"val_loss": done.stamps[-1][1], **found, "curve": done.stamps}


def measure(options: argparse.Namespace, bins: Path, folder: Path, who: str) -> dict[str, Any]:
    """Returns a contender's numbers, or why there are none, as "left_out"."""
    folder.mkdir()
    try:
        found = nanogpt(options, bins, folder) if who == "nanogpt" else lmtrain(options, bins, folder, who)
    except (Skipped, Failed) as reason:
        print(f"{who} left out: {reason}")
        return {"left_out": str(reason)}
    words = f"{found['seconds']:.0f} s of steps, process {found['process_s']:.0f} s"
    print(f"{who}: val/loss {found['val_loss']:.4f}, {found['step_ms']:.1f} ms a step, {words}", flush=True)
    return found


def main(argv: list[str] | None = None) -> int:
    options = parse(argv)
    numbers: dict[str, Any] = {"machine": machine(), "versions": versions(), "steps": options.steps}
    names = options.contenders.split(",")
    with tempfile.TemporaryDirectory(prefix="lmtrain_benchmark_") as name:
        bins = options.bins or Path(name) / "bins"
        if not options.bins:
            write_text_bins(bins, options.train_tokens, options.val_tokens, packages=True)
        with ThreadPoolExecutor(len(names) if options.together else 1) as pool:
            made = pool.map(lambda who: measure(options, bins, Path(name) / who, who), names)
            numbers |= dict(zip(names, made, strict=True))
    theirs = numbers.get("nanogpt", {})
    for who in [n for n in names if n != "nanogpt" and "curve" in numbers[n] and "val_loss" in theirs]:
        ours = numbers[who]
        reached = ours["reached_at_step"] = next((s for s, loss in ours["curve"] if loss <= theirs["val_loss"]), None)
        if reached and not options.together:
            ours["time_over_nanogpts"] = reached * ours["step_ms"] / 1000 / theirs["seconds"]
        print(f"{who} is there at step {reached}: {ours.get('time_over_nanogpts', '')}")
    print(setting())
    if options.json:
        options.json.write_text(json.dumps(numbers, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
