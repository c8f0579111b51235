"""All that lmtrain touches of Lightning's private parts, a function each, and why no public way will do.

tests/strategies/test_lightning_private.py has a test for each and says which versions of Lightning it was read in.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.loggers import TensorBoardLogger, WandbLogger
from lightning.pytorch.plugins.precision import HalfPrecision
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy


def leave_signals_alone(trainer: pl.Trainer) -> None:
    """Lightning's signal handler runs a collective wherever a rank happens to be: Preemption's takes its place."""
    trainer._signal_connector.register_signal_handlers = lambda: None  # type: ignore[method-assign]


def broadcast_no_sigterm(trainer: pl.Trainer) -> None:
    """Lightning broadcasts every step whether rank 0 got a SIGTERM; here that rides in the count of tokens."""
    trainer.fit_loop.epoch_loop._broadcast_sigterm_tensor = lambda: None  # type: ignore[method-assign]


def logged_at_step(trainer: pl.Trainer) -> dict[str, Any]:
    """What `self.log` was given for the loggers since the step began; they get it after the checkpoint is written."""
    return trainer._logger_connector.metrics["log"]


def logged_over_epoch(trainer: pl.Trainer) -> dict[str, Any]:
    """What `self.log` was given to be reduced over the epoch, which here is the run; {} without any."""
    return trainer._results.metrics(on_step=False)["log"] if trainer._results else {}


def hide_logged(trainer: pl.Trainer, hidden: bool) -> None:
    """Hides what earlier steps logged: Lightning would log it again with this one's; a resumed run can't."""
    for result in (trainer._results or {}).values():
        result.has_reset = hidden


@contextmanager
def between_batches(trainer: pl.Trainer) -> Iterator[None]:
    """Within it a validation loop may run, as Lightning's training loop runs one: the step's logging goes on after."""
    first_iteration = trainer._logger_connector._first_loop_iter
    trainer.validating = True
    yield
    trainer.training = True
    trainer._logger_connector._first_loop_iter = first_iteration


def set_group_sizes(strategy: ModelParallelStrategy, tensor_parallel: int, data_parallel: int) -> None:
    """After a constructor that has no way to say both and be subclassed; read when the device mesh is made."""
    strategy._tensor_parallel_size, strategy._data_parallel_size = tensor_parallel, data_parallel


def process_group_backend(strategy: DDPStrategy) -> str:
    """nccl or gloo, for a process group that is made before Lightning makes its own."""
    return strategy._get_process_group_backend()


def say_moved(module: pl.LightningModule, device: torch.device) -> None:
    """What `LightningModule.to` notes, where parameters were put on the device by other means: `module.device`."""
    module._device = device


def half_dtype(precision: HalfPrecision) -> torch.dtype:
    """The dtype of bf16-true or 16-true."""
    return precision._desired_input_dtype


def wandb_options(logger: WandbLogger) -> dict[str, Any]:
    """The arguments of `wandb.init`, which may change until the run is opened: its mode, where the network fails."""
    return logger._wandb_init


def purge_from(logger: TensorBoardLogger, step: int) -> None:
    """What was written from `step` on is not shown: an argument of its writer, known only when the run resumes."""
    logger._kwargs["purge_step"] = step
