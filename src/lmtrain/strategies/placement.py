"""The interface between objectives and strategies: parameter placement, gradient synchronisation, optimizer steps.

An objective calls `placement_of(trainer)` and never checks which strategy it runs under.
"""

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn

from lmtrain.adapters.quantized import is_quantized
from lmtrain.checkpoints import store
from lmtrain.strategies.sharding import spread


class MapsCheckpoints:
    """A mixin of strategies with several ranks, which load checkpoints memory-mapped: a node's ranks share one copy."""

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        return store.load(Path(checkpoint_path), mmap=True)


class Placement:
    """The base class of this folder's strategies, with defaults for ranks that hold full parameters."""

    replaces_parameters = False  # if True, the optimizer must be built after `place`
    steps_itself = False  # if True, an engine reduces, clips and steps: a bad step is reported, but can't be skipped

    def place(self, objective: Any) -> None:
        """Puts the first rank's weights of `objective`, a LightningModule, on the devices that train them.

        A strategy also reads its `model`, a LanguageModel, and may wrap `call_model`, the forward that it calls.
        """
        raise NotImplementedError

    def sync_gradients(self, model: nn.Module, last: bool) -> None:
        """Prepares a micro-batch; called before its forward. Only the `last` one's backward synchronises gradients."""
        raise NotImplementedError

    def grad_norm(self) -> Tensor:
        """Returns the last step's gradient norm before clipping, 0-dim fp32; called only if `steps_itself`."""
        raise NotImplementedError


class Whole(Placement):
    """Placement for one device, DistributedDataParallel, or any Lightning strategy whose ranks hold full parameters."""

    def __init__(self, trainer: pl.Trainer) -> None:
        self.trainer = trainer

    def place(self, objective: Any) -> None:
        if self.trainer.world_size > 1 and not is_quantized(objective.model.model):
            # Converted first, so that the tensors have the same dtype on the sending and the receiving ranks.
            self.trainer.precision_plugin.convert_module(objective)
            spread(objective.modules(), self.trainer.strategy.root_device)

    def sync_gradients(self, model: nn.Module, last: bool) -> None:
        ddp = self.trainer.model
        if isinstance(ddp, torch.nn.parallel.DistributedDataParallel):
            ddp.require_backward_grad_sync = last


def placement_of(trainer: pl.Trainer) -> Placement:
    strategy = trainer.strategy
    return strategy if isinstance(strategy, Placement) else Whole(trainer)
