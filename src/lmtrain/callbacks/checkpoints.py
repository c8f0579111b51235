"""A callback that decides when to save checkpoints and which ones to keep.

It saves every n optimizer steps, after the last step, and after a validation with the best score so far: always after
that step's validation, so that its manifest holds the score and the best checkpoint is found by reading manifests.
A run that stops at another step (a signal, early stopping) leaves an interim checkpoint: it is kept until there is a
newer one and never displaces another, so that an interrupted run ends with the checkpoints of an uninterrupted one.
"""

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Checkpoint

from lmtrain.callbacks.length import DependsOnLength
from lmtrain.callbacks.metrics import Metrics
from lmtrain.checkpoints import retention, store
from lmtrain.checkpoints.checkpoint_io import FolderCheckpointIO
from lmtrain.config.schema import Config
from lmtrain.data.tokenizers import file_hashes
from lmtrain.errors import RunError


class Checkpoints(DependsOnLength, Checkpoint):
    """A Lightning Checkpoint callback, since Lightning runs those after the callbacks whose state they save."""

    def __init__(
        self, folder: Path, metrics: Metrics, config: Config, total_steps: int, scored_on: str | None, mode: str
    ) -> None:
        """
        Args:
            scored_on: names the rows that checkpoint.monitor is measured on, see `val_sets.scored_on`.
            mode: how scores are ranked, see `RunData.ranking`.
        """
        self.folder, self.metrics = folder, metrics
        self.cfg, self.every_n_steps = config.checkpoint, config.trainer.save_every_n_steps
        self.scored_on, self.mode = scored_on, mode
        self.total_steps = total_steps
        self.interim = False
        self.tokenizer: dict[str, str] = {}  # hashes of the files in the run's tokenizer/

    def due(self, trainer: pl.Trainer) -> bool:
        """Returns whether to save now; rank 0 decides about scores, as ranks may see the folder in different states."""
        step = trainer.global_step
        if step == self.total_steps or (self.every_n_steps is not None and step % self.every_n_steps == 0):
            return True
        if self._score(step) is None or self.cfg.keep_best == 0 or self.mode == retention.LAST:
            return False
        return trainer.strategy.broadcast(trainer.is_global_zero and self._best_so_far(step, io_of(trainer)))

    def _score(self, step: int) -> float | None:
        """Returns the monitored value of this step's validation, or None if the step was not validated."""
        found = self._metrics_of(step)
        if found and self.cfg.monitor not in found:
            absent = f"checkpoint.monitor={self.cfg.monitor} was not logged in the validation after step {step}"
            raise RunError(f"{absent}, which has {', '.join(found)}: set one of these")
        return found.get(self.cfg.monitor)

    def _best_so_far(self, step: int, io: FolderCheckpointIO) -> bool:
        with self.metrics.clock.pause():
            io.wait()  # a checkpoint still being written has no manifest
        earlier = retention.scores(self.folder, self.cfg.monitor, self.scored_on)
        return retention.best_of([*earlier, (step, self._score(step))], self.mode) == step

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Hashes the tokenizer; prunes checkpoints, in case the run was killed between its last save and pruning."""
        self.tokenizer = file_hashes(self.folder.parent / "tokenizer")
        if trainer.is_global_zero:
            self.prune()

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Adds the scores of an overdue validation, made just now, to the manifest of its checkpoint.

        Its other files don't change, so a run that is killed now starts with that validation again.
        """
        path, found = self.folder / store.name_of(trainer.global_step), self._metrics_of(trainer.global_step)
        interim = not self.due(trainer)
        here = trainer.is_global_zero and found and path.exists()
        if here and store.add_metrics(path, found, interim, self.scored_on):
            self.prune()

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any, **__: Any) -> None:
        due = self.due(trainer)
        if due or trainer.should_stop:
            self.interim = not due
            with self.metrics.clock.pause():
                self.save(trainer)

    def save(self, trainer: pl.Trainer) -> None:
        if trainer.is_global_zero:
            self.metrics.records.refuse_moved()
        io_of(trainer).published = self.prune
        trainer.save_checkpoint(self.folder / store.name_of(trainer.global_step))

    def on_save_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        # These entries go into the manifest.
        checkpoint["metrics"], checkpoint["interim"] = self._metrics_of(trainer.global_step), self.interim
        checkpoint["scored_on"], checkpoint["tokenizer"] = self.scored_on, self.tokenizer

    def _metrics_of(self, step: int) -> dict[str, Any]:
        """Returns the scores of exactly this step, or {} if it was not validated."""
        val = self.metrics.last_val
        return {k: v for k, v in val.items() if k != "step"} if val.get("step") == step else {}

    def prune(self) -> None:
        """Removes checkpoints that retention does not keep and updates `last` and `best`, from a fresh folder scan."""
        found = {store.step_of(path): path for path in retention.manifests(self.folder)}
        if not found:
            return
        scores, cfg = retention.scores(self.folder, self.cfg.monitor, self.scored_on), self.cfg
        keep = retention.to_keep(scores, cfg.keep_last, cfg.keep_best, cfg.keep_every, self.mode) | {max(found)}
        for rows in retention.scored_on_others(self.folder, self.scored_on):  # keep the best of each
            others = retention.scores(self.folder, cfg.monitor, rows)
            keep |= retention.to_keep(others, 0, cfg.keep_best, None, self.mode)
        retention.link(self.folder, "last", found[max(found)])
        best = retention.best_of(scores, self.mode)
        if best is not None:
            retention.link(self.folder, "best", found[best])
        for step in found.keys() - keep:
            store.remove(found[step])


def io_of(trainer: pl.Trainer) -> FolderCheckpointIO:
    """Returns the object that writes the run's checkpoints."""
    io = trainer.strategy.checkpoint_io
    assert isinstance(io, FolderCheckpointIO)
    return io
