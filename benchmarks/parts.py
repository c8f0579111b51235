"""CPU time of a step on one thread by kernel, in milliseconds: the mean of ten steps.

python benchmarks/parts.py experiment=dial model.num_hidden_layers=3
python benchmarks/parts.py --compare experiment=dial model.num_hidden_layers=3      as it is and compiled
"""

import argparse
import sys
import tempfile
import time
from typing import Any

import lightning.pytorch as pl
import torch
from machine import setting
from torch.profiler import ProfilerActivity, profile

import lmtrain

FIRST, STEPS = 10, 10  # steps before the measurement; measured steps
OFF = ["trainer.accelerator=cpu", "trainer.num_threads=1", "trainer.val_check_interval=null", "export.enabled=false",
       "trainer.save_every_n_steps=null", "report.enabled=false", "callbacks.samples.every_n_validations=0",
       "trainer.limit_val_batches=1", "logger=none", "run.quiet=true"]  # fmt: skip


class Parts(pl.Callback):
    """Profiles the steps after the first ones."""

    def __init__(self) -> None:
        self.profile = profile(activities=[ProfilerActivity.CPU])
        self.processor_ms = 0.0

    def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.global_step == FIRST:
            self.profile.__enter__()
            self.began = time.thread_time()

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.global_step == FIRST + STEPS:
            self.processor_ms = 1000 * (time.thread_time() - self.began) / STEPS
            self.profile.__exit__(None, None, None)


def measure(words: list[str]) -> Parts:
    with tempfile.TemporaryDirectory(prefix="lmtrain_parts_") as folder:
        length = f"trainer.max_steps={FIRST + STEPS + 1}"
        run = lmtrain.build(lmtrain.compose([*words, *OFF, length, f"run.dir={folder}/run"]))
        parts = Parts()
        run.trainer.callbacks.append(parts)  # type: ignore[attr-defined]
        run.fit()
        return parts


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--compare", action="store_true")
    parser.add_argument("--top", type=int, default=12)
    parser.add_argument("overrides", nargs="+")
    options = parser.parse_args()
    torch.set_num_threads(1)
    for compiled in (False, True) if options.compare else (None,):
        words = options.overrides + ([] if compiled is None else [f"trainer.compile={str(compiled).lower()}"])
        parts = measure(words)
        print(f"{' '.join(words)}: {parts.processor_ms:.1f} ms of the processor a step")
        rows = sorted(parts.profile.key_averages(), key=lambda row: -row.self_cpu_time_total)
        whole = sum(row.self_cpu_time_total for row in rows)
        for row in rows[: options.top]:
            ms, share = row.self_cpu_time_total / 1000 / STEPS, row.self_cpu_time_total / whole
            print(f"  {ms:8.2f} ms {share:6.1%} {row.count / STEPS:7.1f} calls  {row.key[:60]}")
    print(setting())
    return 0


if __name__ == "__main__":
    sys.exit(main())
