"""trainer.strategy=fsdp: Lightning's ModelParallelStrategy with this project's sharding and checkpoints.

Checkpoints hold full tensors, independent of the number of devices: rank 0 gathers them one by one and writes the same
files as one device, or all ranks write together (checkpoints/sharded.py). When loading, each rank maps the files and
takes its shards, so the folder must be on a file system that all nodes share.
"""

from collections.abc import Mapping
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.strategies import ModelParallelStrategy
from lightning.pytorch.strategies.strategy import Strategy
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from lmtrain.adapters.trainable import without_frozen
from lmtrain.checkpoints import sharded as sharded_checkpoint
from lmtrain.checkpoints.checkpoint_io import FolderCheckpointIO
from lmtrain.config.schema import FsdpConfig, TrainerConfig
from lmtrain.config.strategies import context_parallel, outside_fp8, tensor_parallel
from lmtrain.distributed import dtensor as layout
from lmtrain.distributed import process_group as world
from lmtrain.models import split
from lmtrain.models.blocks import decoder_blocks
from lmtrain.models.context import Context
from lmtrain.models.language_model import LanguageModel
from lmtrain.models.split import TokenShares
from lmtrain.strategies import sharding
from lmtrain.strategies.placement import MapsCheckpoints, Placement

# Bytes of trained weights. With AdamW's moments, rank 0 alone would gather, hold and write three times as many.
_TOGETHER_ABOVE = 4 * 2**30


def writes_together(options: FsdpConfig, module: nn.Module) -> bool:
    """Returns whether every rank writes its part of a checkpoint; by full parameter sizes, so that all ranks agree."""
    if options.sharded_checkpoint is not None:
        return options.sharded_checkpoint
    return sum(p.numel() * p.element_size() for p in module.parameters() if p.requires_grad) > _TOGETHER_ABOVE


class FSDPStrategy(Placement, MapsCheckpoints, ModelParallelStrategy):
    """Fully sharded data parallelism: parameters, gradients and optimizer state are sharded over all ranks.

    Each rank reads different rows. With context parallelism, each group r // context_parallel_size does, and the ranks
    of a group share its rows.
    """

    replaces_parameters = True

    def __init__(self, t: TrainerConfig) -> None:
        offloads = t.fsdp.cpu_offload and t.accelerator == "cuda"
        super().__init__(
            data_parallel_size=int(t.devices) * t.num_nodes // tensor_parallel(t),
            tensor_parallel_size=tensor_parallel(t),
            save_distributed_checkpoint=False,
            process_group_backend="cpu:gloo,cuda:nccl" if offloads else None,
        )
        self.options, self.precision = t.fsdp, outside_fp8(t.precision)
        self.tensor_parallel_size, self.context_parallel_size = tensor_parallel(t), context_parallel(t)

    @property
    def lightning_restore_optimizer(self) -> bool:
        return True

    def place(self, objective: Any) -> None:
        """Shards the objective's model in place."""
        self.precision_plugin.convert_module(objective)
        self.shard(objective.model)
        world.equal_patience()

    def shard(self, model: LanguageModel) -> None:
        self._share_rows(model)
        sharding.shard(model, self._mesh(), self.root_device, self.precision, self.options)

    def _share_rows(self, model: LanguageModel) -> None:
        size = self.context_parallel_size
        if size > 1:
            shape = (self.world_size // size, size)
            mesh = init_device_mesh(self.root_device.type, shape, mesh_dim_names=("groups", "context"))["context"]
            model.context = Context(mesh.get_local_rank(), size, mesh.get_group())
            model.context.mark(model.model)

    def sync_gradients(self, model: nn.Module, last: bool) -> None:
        sharding.sync_gradients(model, last or self.options.reduce_each_micro_batch)

    def _mesh(self) -> DeviceMesh:
        """Returns a mesh of all ranks in one dimension, or [nodes, ranks per node] if each node holds a model copy."""
        if self.options.copy_per_node and self.num_nodes > 1:
            shape = (self.num_nodes, self.num_processes)
            return init_device_mesh(self.root_device.type, shape, mesh_dim_names=("nodes", "devices"))
        return self.device_mesh["data_parallel"]

    def model_to_device(self) -> None:
        if not self.options.cpu_offload:
            super().model_to_device()

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Returns the trained parameters (with buffers if nothing is frozen): full ones on rank 0 and {} elsewhere, or
        each rank's sharded ones if all ranks write together."""
        module = self.lightning_module
        assert module is not None
        return self._gathered(without_frozen(module, dict(module.state_dict(keep_vars=True))))

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        return self._gathered(optimizer.state_dict())

    def _gathered(self, state: dict[str, Any]) -> dict[str, Any]:
        """Returns full tensors on rank 0 and {} elsewhere, or `state` unchanged if all ranks write together."""
        return state if self._writes_together() else layout.gather(state, keep=self.is_global_zero)

    def _writes_together(self) -> bool:
        assert self.lightning_module is not None
        return writes_together(self.options, self.lightning_module)

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        io = self.checkpoint_io
        if self._writes_together() and isinstance(io, FolderCheckpointIO):
            io.save_together(lambda take: sharded_checkpoint.prepare(checkpoint, Path(filepath), take))
        else:
            Strategy.save_checkpoint(self, checkpoint, filepath, storage_options)

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        module = self.lightning_module
        assert module is not None
        own, saved = module.state_dict(), checkpoint["state_dict"]
        if strict and own.keys() != saved.keys():
            raise RuntimeError(f"the checkpoint's weights aren't this model's: {sorted(own.keys() ^ saved.keys())[:3]}")
        layout.copy_whole(own, saved)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        for optimizer, state in zip(self.optimizers, checkpoint["optimizer_states"], strict=True):
            parameters = chain.from_iterable(group["params"] for group in optimizer.param_groups)
            optimizer.load_state_dict(layout.lay_out_state(state, parameters))

    def teardown(self) -> None:
        super().teardown()
        self.checkpoint_io.teardown()  # waits for a save in progress
        if self.world_size == 1 and torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()  # the process may start another run


class TensorParallelStrategy(FSDPStrategy):
    """FSDP plus tensor parallelism: rank r is in group r // tensor_parallel_size, and each group reads its own rows."""

    def shard(self, model: LanguageModel) -> None:
        layers = split.check(model.model, self.tensor_parallel_size)
        groups, group, everywhere = self._meshes()
        tokens = TokenShares(group) if self.options.sequence_parallel else None
        if tokens is not None:
            split.check_tokens(model.model)
            blocks = decoder_blocks(model.model)
            tokens.enter(blocks[0])
            tokens.leave(blocks[-1])
        sharding.shard(
            model,
            groups,
            self.root_device,
            self.precision,
            self.options,
            root_mesh=everywhere,
            split=lambda block: split.split(block, layers, group, tokens),
        )
        model.same_tokens = group

    def _meshes(self) -> tuple[DeviceMesh, DeviceMesh, DeviceMesh]:
        """Returns the meshes to shard a rank's part of split layers, to split these layers, and to shard the rest.

        If each node holds a copy of the model, the first and the last mesh have a leading dimension of nodes.
        """
        device = self.root_device.type
        if not (self.options.copy_per_node and self.num_nodes > 1):
            every = init_device_mesh(device, (self.world_size,))
            return self.device_mesh["data_parallel"], self.device_mesh["tensor_parallel"], every
        shape = (self.num_nodes, self.num_processes // self.tensor_parallel_size, self.tensor_parallel_size)
        mesh = init_device_mesh(device, shape, mesh_dim_names=("nodes", "groups", "tensor"))
        return mesh["nodes", "groups"], mesh["tensor"], self._mesh()
