"""When to validate: every n optimizer steps and after the last, before that step's checkpoint is written.

Lightning's own trigger can't validate after a last step that does not divide, and a resumed run forgets a validation
that was due; so this callback runs Lightning's validation loop itself (all validation hooks fire as usual).
"""

from typing import Any

import lightning.pytorch as pl

from lmtrain.callbacks.metrics import Metrics
from lmtrain.callbacks.preemption import ValidationInterrupted
from lmtrain.callbacks.samples import Samples
from lmtrain.objectives.base import Objective


class Validation(pl.Callback):
    def __init__(
        self, metrics: Metrics, samples: Samples | None, *, every_n_steps: int | None, total_steps: int
    ) -> None:
        self.metrics, self.samples = metrics, samples
        self.every_n_steps, self.total_steps = every_n_steps, total_steps
        self.last_step = -1

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
        if self.due(trainer.global_step):  # saved between its step and its validation
            self._run(trainer, pl_module)

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if self.due(trainer.global_step):
            self._run(trainer, pl_module)

    def _run(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        loop = trainer.fit_loop.epoch_loop.val_loop
        if not trainer.enable_validation or trainer.datamodule.val_rows is None:  # type: ignore[attr-defined]
            return
        # As Lightning's training loop does around its own validations.
        trainer.validating = True
        first_iteration = trainer._logger_connector._first_loop_iter
        loop.batch_progress.reset()
        try:
            loop.run()
            self.last_step = trainer.global_step
        except ValidationInterrupted:
            pass  # owed: the resumed run begins with it
        trainer.training = True
        trainer._logger_connector._first_loop_iter = first_iteration

    def on_validation_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        assert isinstance(pl_module, Objective)
        means = pl_module.validation_means()
        scores = self.samples.write(trainer, pl_module) if self.samples is not None else {}
        row = self.metrics.log_validation(trainer, pl_module, {**means, **scores})
        # For Lightning's EarlyStopping and a user's own callbacks, which read trainer.callback_metrics.
        pl_module.log_dict({k: v for k, v in row.items() if k.startswith("val/")}, logger=False)
