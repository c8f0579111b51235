"""experiment=shakespeare_char against nanoGPT's own CPU recipe: loss and time of whole processes, interleaved.

python benchmarks/char.py --nanogpt DIR          DIR: nanoGPT, with data/shakespeare_char prepared

Each round runs nanoGPT's recipe, ours unchanged, and ours with just enough steps to reach nanoGPT's loss (--reach).
"""

import argparse
import json
import re
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

import torch
from contenders import nanogpt_stamps
from legs import Failed, Leg, Lines, Stamps, interval_ms, run
from machine import machine, setting, warn_if_busy
from rich.console import Console
from rich.table import Table

HERE = Path(__file__).resolve().parent
TOKENS = {"nanogpt": 12 * 64, "lmtrain": 24 * 128, "lmtrain_short": 24 * 128}  # per step
# The CPU command of nanoGPT's README, but the checkpoint of the last step is kept even if its estimate is not the best.
RECIPE = (
    "config/train_shakespeare_char.py --device=cpu --compile=False --eval_iters=20 --log_interval=1 --block_size=64 "
    "--batch_size=12 --n_layer=4 --n_head=4 --n_embd=128 --max_iters={steps} --lr_decay_iters={steps} --dropout=0.0 "
    "--always_save_checkpoint=True"
)


@dataclass
class Result:
    """One run of one contender."""

    val_loss: float  # after the last step, over the held-out tenth; in rows of 64 characters (nanoGPT) or 128 (ours)
    own_val_loss: float  # as printed by the contender
    step_ms: float  # median over its steps
    process_s: float


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nanogpt", type=lambda p: Path(p).resolve(), required=True, help="a folder with nanoGPT")
    parser.add_argument("--text", type=Path, help="default: DIR/data/shakespeare_char/input.txt")
    parser.add_argument("--rounds", type=int, default=3, help="runs of each, interleaved (%(default)s)")
    parser.add_argument("--steps", type=int, default=2000, help="of nanoGPT, a multiple of 250 (%(default)s)")
    parser.add_argument("--ours", type=int, default=800, help="of lmtrain (%(default)s)")
    parser.add_argument("--reach", type=int, default=120, help="of lmtrain_short (%(default)s)")
    parser.add_argument("--warmup", type=int, default=50, help="first steps whose time does not count (%(default)s)")
    parser.add_argument("--threads", type=int, help="CPU threads; default: torch's choice")
    parser.add_argument("--json", type=Path, help="also write the numbers to this file")
    options = parser.parse_args(argv)
    data = options.nanogpt / "data" / "shakespeare_char"
    options.text = (options.text or data / "input.txt").resolve()
    for needed in (options.nanogpt / "train.py", data / "train.bin", data / "val.bin", options.text):
        if not needed.is_file():
            parser.error(f"{needed} is missing: it takes nanoGPT, its data/shakespeare_char/prepare.py run")
    if options.steps % 250:
        parser.error(f"--steps {options.steps}: nanoGPT validates every 250 steps, so its last must be one of them")
    return options


def lmtrain(options: argparse.Namespace, folder: Path, steps: int | None = None) -> Result:
    """Runs the experiment on the text, including logging, validations, samples, checkpoints and export."""
    steps = steps or options.ours
    command = [
        *(sys.executable, "-m", "lmtrain.train", "experiment=shakespeare_char", f"trainer.max_steps={steps}"),
        *(f"data.path={options.text}", f"data.cache_dir={folder / 'cache'}", f"run.dir={folder / 'run'}"),
        "trainer.accelerator=cpu",
    ]
    rows: list[dict[str, float]] = []

    def stamps(_: Lines) -> Stamps:
        rows.extend(map(json.loads, (folder / "run" / "metrics.jsonl").read_text().splitlines()))
        return [(int(row["step"]), row["time"]) for row in rows if "step_ms" in row]

    done = run(Leg(command, stamps), options.threads)
    loss = next(row["val/loss"] for row in reversed(rows) if "val/loss" in row and row["step"] == steps)
    return Result(loss, loss, median(interval_ms(done.stamps, options.warmup)), done.seconds)


def lmtrain_short(options: argparse.Namespace, folder: Path) -> Result:
    return lmtrain(options, folder, options.reach)


def nanogpt(options: argparse.Namespace, folder: Path) -> Result:
    """Runs the unchanged train.py, then scores its checkpoint on the rows that lmtrain validates on."""
    settings = [*RECIPE.format(steps=options.steps).split(), f"--out_dir={folder}"]
    own: list[float] = []

    def stamps(lines: Lines) -> Stamps:
        found = [re.match(rf"step {options.steps}: .*val loss ([\d.]+)", text) for _, text in lines]
        own.extend(float(match[1]) for match in found if match)
        return nanogpt_stamps(lines)

    done = run(Leg([sys.executable, "train.py", *settings], stamps, cwd=options.nanogpt), options.threads)
    val = options.nanogpt / "data" / "shakespeare_char" / "val.bin"
    command = [sys.executable, HERE / "leg_score_nanogpt.py", folder / "ckpt.pt", val]
    score = subprocess.run(command, cwd=options.nanogpt, stdout=subprocess.PIPE, text=True, check=True)
    scored = json.loads(score.stdout.splitlines()[-1])
    if scored["step"] != options.steps:
        raise Failed(f"nanoGPT's checkpoint is of step {scored['step']}, not {options.steps}")
    return Result(scored["val/loss"], own[-1], median(interval_ms(done.stamps, options.warmup)), done.seconds)


def show(results: dict[str, list[Result]]) -> None:
    table = Table(title="shakespeare_char, each recipe's own shape")
    for column in ("", "val/loss", "(least, most)", "its own figure", "ms/step", "tokens/s", "process s"):
        table.add_column(column, justify="right" if column else "left", no_wrap=True)
    for name, runs in results.items():
        losses, step_ms = [r.val_loss for r in runs], median(r.step_ms for r in runs)
        table.add_row(
            name,
            f"{median(losses):.4f}",
            f"({min(losses):.4f}, {max(losses):.4f})",
            f"{median(r.own_val_loss for r in runs):.4f}",
            f"{step_ms:.2f}",
            f"{1000 * TOKENS[name] / step_ms:,.0f}",
            f"{median(r.process_s for r in runs):.1f}",
        )
    Console(width=None if sys.stdout.isatty() else 110).print(table)
    for name in ("lmtrain", "lmtrain_short"):
        shares = [o.process_s / n.process_s for o, n in zip(results[name], results["nanogpt"], strict=True)]
        print(f"{name}'s time over nanoGPT's: {median(shares):.3f} ({min(shares):.3f} to {max(shares):.3f})")
    print(setting())


def main(argv: list[str] | None = None) -> int:
    options = parse(argv)
    warn_if_busy()
    results: dict[str, list[Result]] = {"nanogpt": [], "lmtrain": [], "lmtrain_short": []}
    with tempfile.TemporaryDirectory(prefix="lmtrain_benchmark_") as name:
        for number in range(1, options.rounds + 1):
            for contender in (nanogpt, lmtrain, lmtrain_short):
                folder = Path(name) / f"{number}_{contender.__name__}"
                folder.mkdir()
                result = contender(options, folder)
                results[contender.__name__].append(result)
                print(f"round {number}/{options.rounds}  {contender.__name__:<13} {result}", flush=True)
    show(results)
    if options.json:
        runs = {name: [asdict(run) for run in runs] for name, runs in results.items()}
        options.json.write_text(json.dumps({"machine": machine(), "torch": torch.__version__, **runs}, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
