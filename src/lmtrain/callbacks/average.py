"""An exponential moving average of the weights, which is validated and exported; training continues without it.

The formula and the averaged steps are those of Lightning's EMAWeightAveraging. That one saves the average in place of
the weights; here a checkpoint holds the weights that training continues from, and the average in trainer.pt.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor, nn
from torch.optim.swa_utils import get_ema_multi_avg_fn
from transformers import PreTrainedModel

from lmtrain.callbacks.parts import Parts, Phase, Placed
from lmtrain.config.schema import Config, EmaConfig
from lmtrain.models.feature import Feature


class WeightAverage(pl.Callback):
    """A callback that averages the trained parameters in fp32 or wider on their device, identically on every rank."""

    def __init__(self, cfg: EmaConfig) -> None:
        self.cfg = cfg
        self._mix: Any = get_ema_multi_avg_fn(cfg.decay)
        self._average: dict[str, Tensor] = {}  # by parameter name; empty until the first update
        self._validation = contextlib.ExitStack()  # of one outside of training, with the average in place

    def state_dict(self) -> dict[str, Any]:
        return {"average": self._average}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._average = {name: tensor.clone() for name, tensor in state_dict["average"].items()}  # can be memory-mapped

    @torch.no_grad()
    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any, **__: Any) -> None:
        trained = _trained(pl_module)
        now = {name: p.detach().to(torch.promote_types(p.dtype, torch.float32)) for name, p in trained.items()}
        if self._average:
            # An average loaded from a checkpoint is in host memory.
            self._average = {name: tensor.to(trained[name].device) for name, tensor in self._average.items()}
            self._mix(list(self._average.values()), list(now.values()), None)
        else:
            self._average = {name: tensor.clone() for name, tensor in now.items()}

    @contextlib.contextmanager
    def in_place(self, module: nn.Module) -> Iterator[None]:
        """Replaces the model's weights by the average within the context, if there is one already."""
        before = {name: p.detach().clone() for name, p in _trained(module).items() if name in self._average}
        _set(module, self._average)
        try:
            yield
        finally:
            _set(module, before)

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if trainer.state.fn == TrainerFn.VALIDATING:  # during training the Validation callback does this
            self._validation.enter_context(self.in_place(pl_module))

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._validation.close()

    def on_fit_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Copies the average into the model for the export, now that all checkpoints are written."""
        _set(pl_module, self._average)


class Averaging(Feature):
    """The average of the weights, callbacks.ema."""

    def is_on(self, config: Config) -> bool:
        return config.callbacks.ema.enabled

    def callbacks(self, parts: Parts) -> list[Placed]:
        average = WeightAverage(parts.config.callbacks.ema)
        parts.validation.weights = average.in_place
        return [(Phase.CHANGES_WEIGHTS, average)]

    def plan_rows(self, model: PreTrainedModel, config: Config) -> list[tuple[str, str]]:
        kept = f"of the weights, decay {config.callbacks.ema.decay:g}: validated and exported"
        return [("average", f"{kept}; training continues from the plain weights")]


def _trained(module: nn.Module) -> dict[str, nn.Parameter]:
    return {name: p for name, p in module.named_parameters() if p.requires_grad}


@torch.no_grad()
def _set(module: nn.Module, values: dict[str, Tensor]) -> None:
    """Copies each value into the parameter with its name."""
    parameters = dict(module.named_parameters())
    for name, value in values.items():
        parameters[name].copy_(value)
