"""All uses of Lightning's private attributes in lmtrain, one function each, with the reason why no public API will do.

tests/strategies/test_lightning_private.py tests each and names the versions of Lightning whose source was read for it.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.loggers import TensorBoardLogger, WandbLogger
from lightning.pytorch.plugins.precision import HalfPrecision
from lightning.pytorch.strategies import DDPStrategy


def leave_signals_alone(trainer: pl.Trainer) -> None:
    """Disables Lightning's signal handlers, which run a collective wherever a rank is; Preemption replaces them."""
    trainer._signal_connector.register_signal_handlers = lambda: None  # type: ignore[method-assign]


def broadcast_no_sigterm(trainer: pl.Trainer) -> None:
    """Disables Lightning's SIGTERM broadcast at every step: the all-reduce of token counts includes stop requests."""
    trainer.fit_loop.epoch_loop._broadcast_sigterm_tensor = lambda: None  # type: ignore[method-assign]


def logged_at_step(trainer: pl.Trainer) -> dict[str, Any]:
    """Returns what `self.log` collected for the loggers in this step; they get it after the checkpoint is written."""
    return trainer._logger_connector.metrics["log"]


def logged_over_epoch(trainer: pl.Trainer) -> dict[str, Any]:
    """Returns what `self.log` was given to reduce over the epoch, which is the whole run here; {} if nothing."""
    return trainer._results.metrics(on_step=False)["log"] if trainer._results else {}


def hide_logged(trainer: pl.Trainer, hidden: bool) -> None:
    """Hides (or shows) values that earlier steps logged: Lightning would log them again, which a resumed run can't."""
    for result in (trainer._results or {}).values():
        result.has_reset = hidden


@contextmanager
def between_batches(trainer: pl.Trainer) -> Iterator[None]:
    """Lets a validation loop run inside, as Lightning's training loop does, and then continues the step's logging."""
    first_iteration = trainer._logger_connector._first_loop_iter
    trainer.validating = True
    yield
    trainer.training = True
    trainer._logger_connector._first_loop_iter = first_iteration


def process_group_backend(strategy: DDPStrategy) -> str:
    """Returns nccl or gloo, for a process group that is made before Lightning makes its own."""
    return strategy._get_process_group_backend()


def say_moved(module: pl.LightningModule, device: torch.device) -> None:
    """Sets `module.device`, as `LightningModule.to` would, after parameters were moved by other means."""
    module._device = device


def half_dtype(precision: HalfPrecision) -> torch.dtype:
    """Returns the dtype of bf16-true or 16-true."""
    return precision._desired_input_dtype


def wandb_options(logger: WandbLogger) -> dict[str, Any]:
    """Returns the arguments of `wandb.init`, to change before the run is opened: the mode, if the network fails."""
    return logger._wandb_init


def purge_from(logger: TensorBoardLogger, step: int) -> None:
    """Hides events logged from `step` on, by an argument of the writer that is known only when the run resumes."""
    logger._kwargs["purge_step"] = step
