"""The time until lmtrain reaches the final validation loss of nanoGPT, on the same bins.

python benchmarks/learning.py --nanogpt DIR          DIR: a folder with nanoGPT's model.py

The bins are the bytes of the Python packages of this machine. nanoGPT's model trains with its train.py's AdamW and
cosine, lmtrain with Muon and a cosine, the same number of steps of the same rows unless --our-steps says otherwise;
both are scored on all of val.bin in the same rows. Seconds are steps times the median step time, without startup,
compilation and validation; process_s is the time of the whole process.
"""

import argparse
import json
import sys
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

import torch
from contenders import CONTENDERS, Job
from legs import Leg, Lines, Skipped, interval_ms, run
from machine import machine, setting, versions
from shapes import LOGGER, SHAPES, write_text_bins

from lmtrain.config import compose as config


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nanogpt", type=lambda p: Path(p).resolve(), help="a folder with nanoGPT's model.py")
    parser.add_argument("--shape", choices=SHAPES, help="default: nano on a CPU, small on a GPU")
    parser.add_argument("--rows", type=int, default=64, help="per step (%(default)s)")
    parser.add_argument("--steps", type=int, default=600, help="of each (%(default)s)")
    parser.add_argument("--train-tokens", type=int, default=10_000_000)
    parser.add_argument("--val-tokens", type=int, default=200_000)
    parser.add_argument("--our-steps", type=int, help="of lmtrain; default: as --steps")
    parser.add_argument("--contenders", default="lmtrain,nanogpt", help="default: %(default)s")
    parser.add_argument("--threads", type=int, help="CPU threads; default: torch's choice")
    parser.add_argument("--json", type=Path, help="also write the numbers to this file")
    options = parser.parse_args(argv)
    options.our_steps = options.our_steps or options.steps
    options.cuda = torch.cuda.is_available()
    options.shape = options.shape or ("small" if options.cuda else "nano")
    return options


def overrides(options: argparse.Namespace, bins: Path) -> list[str]:
    shape = SHAPES[options.shape]
    return [
        *shape.model,
        *LOGGER,
        "data=bins",
        f"data.path={bins}",
        f"data.cache_dir={bins.parent / 'cache'}",
        f"data.seq_len={shape.seq_len}",
        f"data.global_batch_size={options.rows}",
        f"data.micro_batch_size={options.rows}",
        "optimizer=muon",
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
    chosen = [*overrides(options, bins), "optimizer=adamw"]
    every, precision = max(1, options.steps // 40), "bf16" if options.cuda else "fp32"
    job = Job(config.check(config.compose(chosen)), chosen, bins, 256, options.steps, every, precision, options.cuda)
    leg = CONTENDERS["nanogpt_model"](job, folder, options)
    # The defaults of its train.py, except the lengths of schedule and warm-up.
    schedule = {"learning_rate": 6e-4, "min_lr": 6e-5, "decay_lr": True, "warmup_iters": options.steps // 20}
    spec = folder / "spec.json"
    spec.write_text(json.dumps(json.loads(spec.read_text()) | schedule | {"score": True}))
    done = run(leg, options.threads)
    step_ms = median(interval_ms(done.stamps, 2 * every))
    seconds = step_ms * options.steps / 1000
    return {"val_loss": done.facts["val_loss"], "step_ms": step_ms, "seconds": seconds, "process_s": done.seconds}


def lmtrain(options: argparse.Namespace, bins: Path, folder: Path) -> dict[str, Any]:
    """Returns its numbers, and the validation loss by step in `curve`."""

    def rows() -> list[dict[str, Any]]:
        return [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]

    def curve(_: Lines) -> list[tuple[int, float]]:
        return [(row["step"], row["val/loss"]) for row in rows() if "val/loss" in row]

    command = [sys.executable, "-m", "lmtrain.train", *overrides(options, bins), f"run.dir={folder / 'run'}"]
    done = run(Leg(command, curve), options.threads)
    step_ms = median([row["step_ms"] for row in rows() if "step_ms" in row][2:])
    found = {"step_ms": step_ms, "seconds": step_ms * options.our_steps / 1000, "process_s": done.seconds}
    return {"val_loss": done.stamps[-1][1], **found, "curve": done.stamps}


def main(argv: list[str] | None = None) -> int:
    options = parse(argv)
    numbers: dict[str, Any] = {"machine": machine(), "versions": versions(), "steps": options.steps}
    with tempfile.TemporaryDirectory(prefix="lmtrain_benchmark_") as name:
        bins = Path(name) / "bins"
        write_text_bins(bins, options.train_tokens, options.val_tokens, packages=True)
        for who in options.contenders.split(","):
            try:
                found = numbers[who] = {"lmtrain": lmtrain, "nanogpt": nanogpt}[who](options, bins, Path(name))
            except Skipped as reason:
                numbers.setdefault("left_out", {})[who] = str(reason)
                print(f"{who} left out: {reason}")
                continue
            words = f"{found['seconds']:.0f} s of steps, process {found['process_s']:.0f} s"
            print(f"{who}: val/loss {found['val_loss']:.4f}, {found['step_ms']:.1f} ms a step, {words}", flush=True)
    if {"lmtrain", "nanogpt"} <= numbers.keys():
        ours, theirs = numbers["lmtrain"], numbers["nanogpt"]
        reached = next((step for step, loss in ours["curve"] if loss <= theirs["val_loss"]), None)
        numbers["reached_at_step"] = reached
        if reached:
            numbers["seconds_to_reach"] = reached * ours["step_ms"] / 1000
            numbers["time_over_nanogpts"] = numbers["seconds_to_reach"] / theirs["seconds"]
            print(f"lmtrain is there at step {reached}: {numbers['time_over_nanogpts']:.2f} of its time")
    print(setting())
    if options.json:
        options.json.write_text(json.dumps(numbers, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
