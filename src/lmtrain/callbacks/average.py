"""An exponential moving average of the weights: what is validated and exported, while training goes on from its own.

Formula and steps are those of Lightning's EMAWeightAveraging. That one saves the average in place of the weights; here
a checkpoint's weights are those training goes on from, and the average is kept beside them, in trainer.pt.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor, nn
from torch.optim.swa_utils import get_ema_multi_avg_fn

from lmtrain.config.schema import EmaConfig


class WeightAverage(pl.Callback):
    """Averages the trained parameters, in fp32 or wider, on their device. Every rank keeps the same average."""

    def __init__(self, cfg: EmaConfig) -> None:
        self.cfg = cfg
        self._mix: Any = get_ema_multi_avg_fn(cfg.decay)
        self._average: dict[str, Tensor] = {}  # by parameter name; empty until the first update
        self._before: dict[str, Tensor] = {}  # the model's own values while it validates outside of training

    def state_dict(self) -> dict[str, Any]:
        return {"average": self._average}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._average = {name: tensor.clone() for name, tensor in state_dict["average"].items()}  # those may be mapped

    @torch.no_grad()
    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any, **__: Any) -> None:
        step = trainer.global_step - 1  # counted from 0, as Lightning's does
        if step < self.cfg.update_starting_at_step or step % self.cfg.update_every_n_steps != 0:
            return
        trained = _trained(pl_module)
        now = {name: p.detach().to(torch.promote_types(p.dtype, torch.float32)) for name, p in trained.items()}
        if self._average:
            # A checkpoint's average is read into host memory.
            self._average = {name: tensor.to(trained[name].device) for name, tensor in self._average.items()}
            self._mix(list(self._average.values()), list(now.values()), None)
        else:
            self._average = {name: tensor.clone() for name, tensor in now.items()}

    @contextlib.contextmanager
    def in_place(self, module: nn.Module) -> Iterator[None]:
        """Within it the model has the average, once there is one."""
        before = self._put(module)
        try:
            yield
        finally:
            _set(module, before)

    @torch.no_grad()
    def _put(self, module: nn.Module) -> dict[str, Tensor]:
        """Gives the model the average; returns copies of the values it had."""
        before = {name: p.detach().clone() for name, p in _trained(module).items() if name in self._average}
        _set(module, self._average)
        return before

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if trainer.state.fn == TrainerFn.VALIDATING:  # while training, the Validation callback says when
            self._before = self._put(pl_module)

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if trainer.state.fn == TrainerFn.VALIDATING:
            _set(pl_module, self._before)

    def on_fit_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """All checkpoints are made: what is exported is the average."""
        self._put(pl_module)


def _trained(module: nn.Module) -> dict[str, nn.Parameter]:
    return {name: p for name, p in module.named_parameters() if p.requires_grad}


@torch.no_grad()
def _set(module: nn.Module, values: dict[str, Tensor]) -> None:
    """Copies the values into the parameters of their names."""
    parameters = dict(module.named_parameters()) if values else {}
    for name, value in values.items():
        parameters[name].copy_(value)
