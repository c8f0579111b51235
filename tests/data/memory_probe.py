"""A callback that writes the process's resident memory after its second step and the growth from there to the peak."""

import json
import os
from pathlib import Path
from typing import Any

import lightning.pytorch as pl


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


class MemoryProbe(pl.Callback):
    def __init__(self, path: str) -> None:
        self.path, self.first, self.largest = Path(path), 0, 0

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        now = resident_bytes()
        if trainer.global_step == 2:
            self.first = now
        self.largest = max(self.largest, now)

    def on_train_end(self, *_: Any) -> None:
        self.path.write_text(json.dumps({"before": self.first, "grown": self.largest - self.first}))
