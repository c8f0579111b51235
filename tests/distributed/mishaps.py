"""A user's callback that goes wrong on one rank: reached by `callbacks.extra` with this folder on PYTHONPATH."""

from pathlib import Path

import lightning.pytorch as pl


class Breaks(pl.Callback):
    """Raises on `rank` at `step`; once only where `marker`, a file that does not exist yet, is given."""

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
