"""CPU time of a step on one thread by kernel, in milliseconds: the mean of ten steps.

python benchmarks/parts.py experiment=dial model.num_hidden_layers=3
python benchmarks/parts.py --step data=text data.path=book.txt tokenizer=bytes      by part of the loop, of 400 steps
python benchmarks/parts.py --compare experiment=dial model.num_hidden_layers=3      as it is and compiled
"""

import argparse
import functools
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
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


class Loop(pl.Callback):
    """Measures the parts of the loop, each without the parts inside it; what remains is Lightning's."""

    steps = 400

    def __init__(self) -> None:
        self.seconds: Counter[str] = Counter()
        self.inside = [0.0]  # seconds of the parts inside the open ones

    def watch(self, run: Any) -> None:
        module, dataset = type(run.objective), type(run.datamodule.train_dataloader().dataset)
        optimizer = type(run.objective._optimizer)
        for part, owner, name in [
            ("forward and loss", module, "micro_batch_loss"), ("backward", module, "manual_backward"),
            ("norm, clipping, judgement", module, "on_before_optimizer_step"), ("optimizer", optimizer, "step"),
            ("rest of the training step: seeds, rates, sums", module, "training_step"),
            ("reading the rows", dataset, "__getitem__"), ("counting tokens", module, "on_before_batch_transfer"),
        ]:  # fmt: skip
            setattr(owner, name, self.timed(part, getattr(owner, name)))
        for callback in {type(c) for c in run.trainer.callbacks if type(c).__module__.startswith("lmtrain.")}:
            part = (
                "metrics and records" if "Metrics" in callback.__name__ or "Records" in callback.__name__ else "others"
            )
            for name in vars(callback).keys() & {"on_train_batch_start", "on_train_batch_end"}:
                setattr(callback, name, self.timed(f"callbacks: {part}", getattr(callback, name)))

    def timed(self, part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            self.inside.append(0.0)
            began = time.thread_time()
            try:
                return function(*args, **options)
            finally:
                took = time.thread_time() - began
                self.seconds[part] += took - self.inside.pop()
                self.inside[-1] += took

        return functools.wraps(function)(call)

    def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.global_step == FIRST:
            self.seconds.clear()
            self.began = time.thread_time()

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.global_step == FIRST + self.steps:
            whole = time.thread_time() - self.began
            self.seconds["Lightning's loop and hooks, transfer of the batch"] = whole - sum(self.seconds.values())
            print(f"{1000 * whole / self.steps:.2f} ms of the processor a step")
            for part, seconds in self.seconds.most_common():
                print(f"  {1000 * seconds / self.steps:6.2f} ms {seconds / whole:6.1%}  {part}")


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


def measure(words: list[str], parts: Any) -> Any:
    with tempfile.TemporaryDirectory(prefix="lmtrain_parts_") as folder:
        length = f"trainer.max_steps={FIRST + getattr(parts, 'steps', STEPS) + 1}"
        run = lmtrain.build(lmtrain.compose([*words, *OFF, length, f"run.dir={folder}/run"]))
        if isinstance(parts, Loop):
            parts.watch(run)
        run.trainer.callbacks.append(parts)  # type: ignore[attr-defined]
        run.fit()
        return parts


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--compare", action="store_true")
    parser.add_argument("--step", action="store_true")
    parser.add_argument("--top", type=int, default=12)
    parser.add_argument("overrides", nargs="+")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.step:
        measure(options.overrides, Loop())
        print(setting())
        return 0
    for compiled in (False, True) if options.compare else (None,):
        words = options.overrides + ([] if compiled is None else [f"trainer.compile={str(compiled).lower()}"])
        parts = measure(words, Parts())
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
