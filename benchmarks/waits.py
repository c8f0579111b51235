"""A callback that counts, step by step, how often the host waits for the GPU, and the graphs of torch.compile."""

import json
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from torch._dynamo.utils import counters


class Waits(pl.Callback):
    """Writes {"waits": {step: count}, "where": {line: count}, "graphs": ..., "graph_breaks": ...} to `path`."""

    def __init__(self, path: str) -> None:
        self.path, self.step = Path(path), 0
        self.by_step: Counter[int] = Counter()
        self.where: Counter[str] = Counter()

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        warnings.showwarning = self._count
        if torch.cuda.is_available():
            torch.cuda.set_sync_debug_mode("warn")

    def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        self.step = trainer.global_step + 1
        warnings.simplefilter("always")

    def _count(self, message: Any, category: Any, filename: str, line: int, *_: Any) -> None:
        if "synchronizing CUDA operation" in str(message):
            self.by_step[self.step] += 1
            self.where["/".join(Path(filename).parts[-3:]) + f":{line}"] += 1

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if torch.cuda.is_available():
            torch.cuda.set_sync_debug_mode("default")
        found = {"waits": self.by_step, "where": dict(self.where.most_common(10))}
        stats = {"graphs": counters["stats"]["unique_graphs"], "graph_breaks": sum(counters["graph_break"].values())}
        self.path.write_text(json.dumps(found | stats))
