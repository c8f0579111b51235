"""Time of a step of lmtrain over a bare loop's, both in one process, in turns of ten steps: what lmtrain adds.

python benchmarks/turns.py --shape char

Two processes of the same program differ by several percent, which `pretrain.py` averages over rounds; here both train
the same weights. The bare loop is leg_bare.py's; its batches are in memory before its turn. A row of metrics is written
in each of lmtrain's turns.
"""

import argparse
import contextlib
import io
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import leg_bare
import lightning.pytorch as pl
from machine import setting, warn_if_busy
from shapes import SHAPES, overrides, write_bins

import lmtrain
from lmtrain.distributed import spinning

TURN, WARMUP = 10, 40  # steps


class Turns(pl.Callback):
    """Trains ten steps in a bare loop after every ten of the run, and notes the time of a step of both."""

    def __init__(self, run: Any) -> None:
        self.config, self.steps = run.config, run.datamodule.train_dataloader().dataset
        self.ms: dict[str, list[float]] = {"lmtrain": [], "bare": []}

    def on_train_batch_end(self, trainer: pl.Trainer, module: Any, *_: Any) -> None:
        step = trainer.global_step
        if step % TURN:
            return
        now = time.perf_counter()
        if step > WARMUP:
            self.ms["lmtrain"].append(1000 * (now - self.began) / TURN)
        batches = [self.steps[step + at]["micro_batches"] for at in range(TURN)]
        began = time.perf_counter()
        with contextlib.redirect_stdout(io.StringIO()):
            leg_bare.train(module.model, module._optimizer, self.config, batches, TURN)
        self.began = time.perf_counter()
        if step > WARMUP:
            self.ms["bare"].append(1000 * (self.began - began) / TURN)


# Else `trainer.callback_metrics` would be filled at each step, for a callback of a user's own.
Turns.__module__ = f"lmtrain.{Turns.__module__}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="char")
    parser.add_argument(
        "--steps", type=int, default=240, help="of lmtrain, with as many of the bare loop (%(default)s)"
    )
    options = parser.parse_args()
    warn_if_busy()
    spinning.watch()
    shape = SHAPES[options.shape]
    with tempfile.TemporaryDirectory(prefix="lmtrain_benchmark_") as name:
        folder = Path(name)
        write_bins(folder / "bins", shape.vocab_size, shape.vocab_size)
        words = overrides(
            shape, folder / "bins", micro_batch_size=shape.rows, steps=options.steps, every=TURN, precision="fp32"
        )
        run = lmtrain.build(lmtrain.compose([*words, f"run.dir={folder / 'run'}", "run.quiet=true"]))
        turns = Turns(run)
        run.trainer.callbacks.append(turns)
        run.fit()
    ours, bare = turns.ms.values()
    over = [a / b for a, b in zip(ours, bare, strict=True)]
    print(f"lmtrain {median(ours):.2f} ms/step, bare {median(bare):.2f}, {median(over):.3f} of it in {len(over)} turns")
    print(setting())
    return 0


if __name__ == "__main__":
    sys.exit(main())
