"""DistributedDataParallel: every rank holds the whole model, and ranks add up their gradients."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lightning.pytorch import strategies
from torch import Tensor

from lmtrain.checkpoints import store


class DDPStrategy(strategies.DDPStrategy):
    def __init__(self, find_unused_parameters: bool = False) -> None:
        # As a view of the buckets: else all gradients are held twice.
        super().__init__(gradient_as_bucket_view=True, find_unused_parameters=find_unused_parameters)

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """Mapped: a node's ranks share one copy of what they would read once each."""
        return store.load(Path(checkpoint_path), mmap=True)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        super().load_optimizer_state_dict(checkpoint)
        # What stays in host memory (all, or the counts of steps) would stay mapped, and with it the whole file, which
        # goes when newer checkpoints are there.
        for state in (state for optimizer in self.optimizers for state in optimizer.state.values()):
            state |= {key: value.clone() for key, value in state.items() if isinstance(value, Tensor) and value.is_cpu}
