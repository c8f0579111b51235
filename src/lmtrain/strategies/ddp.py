"""DistributedDataParallel: every rank holds the whole model, and ranks add up their gradients."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import strategies
from torch import Tensor

from lmtrain import checkpoint as store


class DDPStrategy(strategies.DDPStrategy):
    def __init__(self, **options: Any) -> None:
        super().__init__(gradient_as_bucket_view=True, **options)  # else all gradients are held twice

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """Mapped: a node's ranks share one copy of what they would read once each."""
        return store.load(Path(checkpoint_path), mmap=True)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        if self.root_device.type == "cpu":
            # The optimizer would keep the mapped tensors, and the file goes when newer checkpoints are there.
            states = torch.utils._pytree.tree_map_only(Tensor, Tensor.clone, checkpoint["optimizer_states"])
            checkpoint = {**checkpoint, "optimizer_states": states}
        super().load_optimizer_state_dict(checkpoint)
