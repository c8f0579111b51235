"""trainer.strategy=fsdp_tp: groups of neighbouring ranks split each block's layers and read the same rows.

FSDP shards a rank's part over the ranks that have the same part in other groups. What is in no block (embeddings, last
norm, output layer) is sharded over all ranks, as under fsdp.
"""

import logging

from torch.distributed.device_mesh import init_device_mesh

from lmtrain.config.schema import FsdpConfig
from lmtrain.models import split
from lmtrain.strategies import sharding
from lmtrain.strategies.fsdp import FSDPStrategy
from lmtrain.strategies.lightning_private import set_group_sizes
from lmtrain.strategies.placement import HoldsModel


class TensorParallelStrategy(FSDPStrategy):
    """Rank r is in group r // tensor_parallel_size; a group reads rows of its own."""

    def __init__(self, options: FsdpConfig, precision: str, processes: int, accelerator: str) -> None:
        super().__init__(options, precision, processes, accelerator)
        self.tensor_parallel_size = options.tensor_parallel_size
        set_group_sizes(self, self.tensor_parallel_size, processes // self.tensor_parallel_size)
        # It says for each parameter of a checkpoint that two collectives are needed to make it whole.
        logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)

    def shard(self, objective: HoldsModel) -> None:
        layers = split.check(objective.model.model, self.tensor_parallel_size)
        sharding.shard(
            objective.model,
            self.device_mesh["data_parallel"],
            self.root_device,
            self.precision,
            self.options,
            root_mesh=init_device_mesh(self.root_device.type, (self.world_size,)),
            split=lambda block: split.split(block, layers, self.device_mesh["tensor_parallel"]),
        )
