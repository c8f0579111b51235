"""The interface between objectives and strategies: placing parameters, synchronising gradients, who steps.

An objective calls `placement_of(trainer)` and never asks which strategy it runs under.
"""

from typing import Any, Protocol

import lightning.pytorch as pl
import torch
from torch import Tensor, nn

from lmtrain.adapters.quantized import is_quantized
from lmtrain.models.language_model import LanguageModel
from lmtrain.strategies.sharding import spread


class HoldsModel(Protocol):
    """The part of an objective that a strategy sees."""

    model: LanguageModel
    call_model: Any  # the model's forward, which an engine may put its own around


class Placement:
    """Base of this folder's strategies. Its defaults are those of a strategy whose ranks hold whole parameters."""

    replaces_parameters = False  # the optimizer has to be built after `place`
    steps_itself = False  # an engine reduces, clips and steps: it can't leave out a bad step, only report it

    def place(self, objective: Any) -> None:
        """Puts the first rank's weights of `objective` (LightningModule, HoldsModel) where they will be trained."""
        raise NotImplementedError

    def sync_gradients(self, model: nn.Module, last: bool) -> None:
        """Called before each micro-batch's forward: gradients travel once a step, with the `last` one's backward."""
        raise NotImplementedError

    def grad_norm(self) -> Tensor:
        """Gradient norm of the step just made, before clipping, 0-dim fp32; asked where the strategy steps itself."""
        raise NotImplementedError


class Whole(Placement):
    """One device, DistributedDataParallel, or any strategy of Lightning's whose ranks hold whole parameters."""

    def __init__(self, trainer: pl.Trainer) -> None:
        self.trainer = trainer

    def place(self, objective: Any) -> None:
        if self.trainer.world_size > 1 and not is_quantized(objective.model.model):
            # What is sent has the dtype of what receives it.
            self.trainer.precision_plugin.convert_module(objective)
            spread(objective.modules(), self.trainer.strategy.root_device)

    def sync_gradients(self, model: nn.Module, last: bool) -> None:
        ddp = self.trainer.model
        if isinstance(ddp, torch.nn.parallel.DistributedDataParallel):
            ddp.require_backward_grad_sync = last


def placement_of(trainer: pl.Trainer) -> Placement:
    strategy = trainer.strategy
    return strategy if isinstance(strategy, Placement) else Whole(trainer)
