"""A user's callbacks, loaded by `callbacks.extra` with this folder on PYTHONPATH."""

import json
import os
import sys
import time
from pathlib import Path

import lightning.pytorch as pl
import torch


class Breaks(pl.Callback):
    """Raises on `rank` at `step`; only once if `marker`, a file that does not exist yet, is given."""

    def __init__(self, rank: int, step: int, marker: str | None = None) -> None:
        self.rank, self.step, self.marker = rank, step, Path(marker) if marker else None

    def on_train_batch_end(self, trainer: pl.Trainer, *_: object) -> None:
        if trainer.global_rank != self.rank or trainer.global_step != self.step:
            return
        if self.marker is not None and self.marker.exists():
            return
        if self.marker is not None:
            self.marker.touch()
        raise ZeroDivisionError(f"a mistake on rank {self.rank}")


class BreaksEarly(pl.Callback):
    """Raises on `rank` before any rank listens to signals, while the others are busy for a minute."""

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        if trainer.global_rank == self.rank:
            raise ZeroDivisionError(f"a mistake on rank {self.rank}")
        time.sleep(60)


class Notes(pl.Callback):
    """Writes, for each rank, the config it read and the resulting learning rate into the run's folder."""

    def on_fit_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        config = sys.argv[1]  # of lmtrain.run.launch; trust grants follow it
        found = {
            "pid": os.getpid(),
            "config": Path(config).read_text(),
            "lr": pl_module._optimizer.param_groups[0]["base_lr"],
        }
        Path(trainer.default_root_dir, f"rank_{trainer.global_rank}.json").write_text(json.dumps(found))


class NotesParts(pl.Callback):
    """Writes the bytes of the packed base and scales that each rank holds, their total, and the bytes of its tables."""

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        found = {"held": 0, "whole": 0, "tables": 0}
        for name, parameter in pl_module.named_parameters():
            if name.endswith((".packed", ".scales")):
                found["held"] += parameter.to_local().numel()
                found["whole"] += parameter.numel()
        for name, buffer in pl_module.named_buffers():
            if name.endswith(".tables"):
                found["tables"] += buffer.nbytes
        Path(trainer.default_root_dir, f"parts_{trainer.global_rank}.json").write_text(json.dumps(found))


class CountsCollectives(pl.Callback):
    """Writes the names of the collectives of one optimizer step, as torch's profiler sees them."""

    def __init__(self, step: int, path: str) -> None:
        self.step, self.path = step, Path(path)
        self.profiler: torch.profiler.profile | None = None

    def on_train_batch_end(self, trainer: pl.Trainer, *_: object) -> None:
        if self.profiler is not None:
            time.sleep(0.5)  # gloo's thread records a collective's end after it has woken the waiting thread
            self.profiler.stop()
            names = [e.name for e in self.profiler.events() if e.name.startswith("gloo:")]
            self.profiler = None
            if trainer.is_global_zero:
                self.path.write_text("\n".join(names))
        if trainer.global_step == self.step:  # records from here to the end of the next step
            self.profiler = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU])
            self.profiler.start()


class WaitsWhenLoaded(pl.Callback):
    """Waits before the first step for as long as `marker`, a file that it creates, exists."""

    def __init__(self, marker: str) -> None:
        self.marker = Path(marker)

    def on_train_start(self, trainer: pl.Trainer, *_: object) -> None:
        trainer.strategy.barrier()
        if trainer.is_global_zero:
            self.marker.touch()
        trainer.strategy.barrier()
        while self.marker.exists():
            time.sleep(0.01)
