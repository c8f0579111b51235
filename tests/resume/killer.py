"""A callback that ends the process with SIGKILL at an exact place: nothing runs after it, no handler, no `finally`."""

import importlib
import os
import signal
from pathlib import Path
from typing import Any

import lightning.pytorch as pl

from lmtrain.checkpoints import retention, store

# Where a rollout ends: at the n-th call of a function.
IN_ROLLOUT = {
    "mid_rollout": ("lmtrain.rollouts.row_states", "draw", 3),
    "mid_later_turn": ("lmtrain.rollouts.row_states", "draw", 16),
    "between_turns": ("lmtrain.rollouts.episodes", "execute", 20),
    "mid_tool": ("lmtrain.rewards.environment", "_as_text", 9),
}


class KillAt(pl.Callback):
    """Kills the process at `place`: mid_step, mid_save, before_publish, before_prune, mid_prune or mid_validation.

    It does so at step `step`. Runs that sample also have before_backward, after sampling and scoring, and the places of
    IN_ROLLOUT.

    Only rank 0 writes: mid_save on another rank kills it while all ranks gather what is saved. With `marker`, a file
    that does not exist yet, it happens once, even if the ranks are restarted.
    """

    def __init__(self, place: str, step: int, rank: int = 0, marker: str | None = None) -> None:
        self.place, self.step, self.rank = place, step, rank
        self.marker = Path(marker) if marker is not None else None

    def due(self, trainer: pl.Trainer) -> bool:
        return trainer.global_rank == self.rank and not (self.marker is not None and self.marker.exists())

    def kill(self) -> None:
        if self.marker is not None:
            self.marker.touch()
        os.kill(os.getpid(), signal.SIGKILL)

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        if not self.due(trainer) or self.rank != 0:
            return
        name = store.name_of(self.step)
        write, rename, prune = store.write, os.rename, retention.to_keep

        def write_then_die(file: Any, content: Any) -> Any:
            if name in str(file) and file.name == "trainer.pt":
                file.write_bytes(b"half a checkp")
                self.kill()
            return write(file, content)

        def die_before_rename(source: Any, target: Any) -> None:
            if self.place == "before_publish" and str(target).endswith(name):
                self.kill()
            rename(source, target)
            if self.place == "mid_prune" and trainer.global_step >= self.step and ".tmp" in str(target):
                self.kill()

        def die_before_prune(*args: Any) -> Any:
            if trainer.global_step >= self.step:
                self.kill()
            return prune(*args)

        if self.place in IN_ROLLOUT:
            self.die_in_rollout(trainer, *IN_ROLLOUT[self.place])
        if self.place == "mid_save":
            store.write = write_then_die
        if self.place in ("before_publish", "mid_prune"):
            os.rename = die_before_rename
        if self.place == "before_prune":
            retention.to_keep = die_before_prune

    def die_in_rollout(self, trainer: pl.Trainer, module: str, name: str, most: int) -> None:
        place = importlib.import_module(module)
        call, calls = getattr(place, name), [0]

        def call_or_die(*args: Any) -> Any:
            calls[0] += trainer.global_step == self.step and bool(trainer.training)
            if calls[0] == most:
                self.kill()
            return call(*args)

        setattr(place, name, call_or_die)

    def on_before_backward(self, trainer: pl.Trainer, *_: Any) -> None:
        if self.place == "before_backward" and trainer.global_step == self.step and self.due(trainer):
            self.kill()

    def on_before_optimizer_step(self, trainer: pl.Trainer, *_: Any) -> None:
        if self.place == "mid_step" and trainer.global_step == self.step and self.due(trainer):
            self.kill()

    def on_validation_batch_end(self, trainer: pl.Trainer, *_: Any, **__: Any) -> None:
        if self.place == "mid_validation" and trainer.global_step == self.step and self.due(trainer):
            self.kill()

    def on_save_checkpoint(self, trainer: pl.Trainer, *_: Any) -> None:
        if self.place == "mid_save" and trainer.global_step == self.step and self.rank != 0 and self.due(trainer):
            self.kill()
