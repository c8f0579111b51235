"""Before DeepSpeed's engine: its process group, and for ZeRO-3 the model partitioned block by block."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from lmtrain.strategies.loading import outside, spread


def connect(backend: str, device: torch.device) -> None:
    """Lets DeepSpeed talk through the process group that is there, or makes one."""
    import deepspeed

    if device.type == "cpu":  # it would compile collectives of its own, for a minute: gloo's do
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    if not deepspeed.comm.is_initialized():
        deepspeed.init_distributed(dist_backend=backend, auto_mpi_discovery=False)


def partition(model: nn.Module, blocks: Sequence[nn.Module], device: torch.device, config: dict[str, Any]) -> None:
    """Makes each parameter this rank's part of the first rank's value, and each buffer the first rank's value.

    The other ranks may have the model on the meta device: none ever holds more than its parts and one block, and the
    first frees what it has given away. Parameters stay the objects they are, so an optimizer of them goes on.

    Args:
        blocks: modules of `model` that share no parameters with the rest of it.
        device: of this rank.
        config: DeepSpeed's, with where parts lie if they are offloaded.
    """
    import deepspeed

    first: Any = None  # knows how to make others what it is
    for group in [*(list(block.modules()) for block in blocks), outside(model, blocks)]:
        spread(group, device)
        parameters = [p for module in group for p in module.parameters(recurse=False)]
        if first is None and parameters:
            first = parameters[0]
            deepspeed.zero.Init(module=nn.ParameterList([first]), config_dict_or_path=config)
        for parameter in parameters:
            first.convert_to_zero_parameters(param_list=[parameter])  # does nothing with what is one already
