"""Callbacks that validate every n optimizer steps and after the last, before that step's checkpoint is written.

With trainer.val_before_training also before the first step, to show what the untrained or pretrained model can do. That
validation is informational: early stopping ignores its score and it triggers no checkpoint.

Lightning's own trigger can't validate after a last step that is not a multiple of n, and a resumed run forgets a
validation that was due; so `Validation` runs Lightning's validation loop itself (all validation hooks fire as usual).
"""

import contextlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import lightning.pytorch as pl
from torch import nn

from lmtrain.callbacks.length import DependsOnLength
from lmtrain.callbacks.metrics import Metrics
from lmtrain.callbacks.samples import Samples
from lmtrain.callbacks.stopping import ValidationInterrupted
from lmtrain.config.schema import Config
from lmtrain.objectives.base import Objective
from lmtrain.strategies.lightning_private import between_batches


class Validation(DependsOnLength, pl.Callback):
    def __init__(self, metrics: Metrics, samples: Samples | None, config: Config, total_steps: int) -> None:
        self.metrics, self.samples = metrics, samples
        # The context in which a module has the weights that are validated; without an average those trained.
        self.weights: Callable[[nn.Module], AbstractContextManager[None]] = lambda _: contextlib.nullcontext()
        self.every_n_steps = config.trainer.val_check_interval
        self.before_training = config.trainer.val_before_training
        self.total_steps, self.last_step = total_steps, -1

    def state_dict(self) -> dict[str, Any]:
        return {"last_step": self.last_step}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.last_step = state_dict["last_step"]

    def due(self, step: int) -> bool:
        if step == 0 or step == self.last_step:
            return False
        return step == self.total_steps or (self.every_n_steps is not None and step % self.every_n_steps == 0)

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        trainer.fit_loop.epoch_loop.max_steps = self.total_steps  # see resume.let_last_validation_run
        owed = self.due(trainer.global_step)  # the checkpoint was saved between its step and its validation
        if owed or (self.before_training and trainer.global_step == 0):
            self._run(trainer, pl_module)

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any, **__: Any) -> None:
        if self.due(trainer.global_step):
            self._run(trainer, pl_module)

    def _run(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        loop = trainer.fit_loop.epoch_loop.val_loop
        if not trainer.enable_validation or not trainer.datamodule.val_sets:  # type: ignore[attr-defined]
            return
        with between_batches(trainer):
            loop.batch_progress.reset()
            try:
                with self.weights(module):
                    loop.run()
                self.last_step = trainer.global_step
            except ValidationInterrupted:  # the resumed run starts with it
                self.metrics.records.forget_validation()
        self.metrics.records.validating = False

    def on_validation_epoch_end(self, trainer: pl.Trainer, pl_module: Objective) -> None:
        names = list(trainer.datamodule.val_sets)  # type: ignore[attr-defined]
        means = {name: pl_module.validation_means(loader) for loader, name in enumerate(names)}
        scores = self.samples.write(trainer, pl_module) if self.samples is not None else {}
        row = self.metrics.log_validation(trainer, pl_module, means, scores)
        # For Lightning's EarlyStopping and a user's own callbacks, which read trainer.callback_metrics.
        pl_module.log_dict({k: v for k, v in row.items() if k.startswith("val/")}, logger=False)
