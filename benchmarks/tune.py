"""Quality of the learning rate that lmtrain.tune suggests, against a grid of rates, each in its own process.

python benchmarks/tune.py experiment=shakespeare_char data.path=input.txt
python benchmarks/tune.py --steps 600 experiment=shakespeare_char data.path=input.txt     # shorter, for a busy machine
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

from lmtrain.files import read_jsonl

RATES = "0.0001,0.0003,0.001,0.003,0.01,0.03,0.1"
# One validation, after the last step; no checkpoints are kept.
QUIET = ["trainer.val_check_interval=null", "trainer.save_every_n_steps=null", "checkpoint.keep_best=0", "logger=none",
         "export.enabled=false", "report.enabled=false", "callbacks.samples.every_n_validations=0"]  # fmt: skip


def started(verb: str, words: list[str]) -> None:
    done = subprocess.run(
        [sys.executable, "-m", f"lmtrain.{verb}", *words], capture_output=True, text=True, check=False
    )
    if done.returncode != 0:
        raise SystemExit(f"lmtrain.{verb} {' '.join(words)}\n{done.stdout[-1500:]}{done.stderr[-1500:]}")


def suggested(folder: Path, words: list[str]) -> float:
    started("tune", [*words, f"run.root={folder}", f"tune.dir={folder}", "tune.micro_batch_size=false"])
    return float(json.loads((folder / "tune.json").read_text())["lr"])


def trained(folder: Path, words: list[str], rate: float) -> float:
    """Returns val/loss after the last step; infinite if the run failed."""
    run = folder / f"lr_{rate:g}"
    try:
        started("train", [*words, *QUIET, f"optimizer.lr={rate:g}", f"run.dir={run}"])
    except SystemExit as error:
        print(error)
        return float("inf")
    return next(row["val/loss"] for row in reversed(list(read_jsonl(run / "metrics.jsonl"))) if "val/loss" in row)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rates", default=RATES, help="of the grid (%(default)s)")
    parser.add_argument("--steps", type=int, help="trainer.max_steps, where it is not to be the run's own")
    parser.add_argument("overrides", nargs="+", help="of the run")
    options = parser.parse_args()
    words = [*options.overrides, *([f"trainer.max_steps={options.steps}"] if options.steps else [])]
    with tempfile.TemporaryDirectory(prefix="lmtrain_benchmark_") as name:
        rate = suggested(Path(name), words)
        losses = {lr: trained(Path(name), words, lr) for lr in map(float, options.rates.split(","))}
        own = losses.get(rate) or trained(Path(name), words, rate)
    for lr, loss in losses.items():
        print(f"optimizer.lr={lr:<8g} val/loss {loss:.4f}")
    best = min(losses.values())
    print(f"suggested {rate:g}: val/loss {own:.4f}, {100 * (own / best - 1):+.1f} % of the grid's best")
    return 0


if __name__ == "__main__":
    sys.exit(main())
