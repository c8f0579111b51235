"""ZeRO-3: a model that is whole on rank 0 becomes parts on all ranks, one parameter after the other."""

from typing import Any

import torch
from torch import Tensor, nn


def partition(model: nn.Module, device: torch.device, config: dict[str, Any]) -> None:
    """Makes each parameter this rank's part of rank 0's value, and each buffer rank 0's value.

    Rank 0 holds the whole model and frees it as it goes. On the other ranks parameters and buffers may be on the meta
    device: one is made real at a time, so a node never holds more than one model and one parameter. Parameters stay the
    objects they are, so an optimizer may have been built of them.

    Args:
        device: where the ranks talk to each other, and where the parts lie unless they are offloaded.
        config: DeepSpeed's.
    """
    import deepspeed

    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            module._buffers[name] = _of_rank_zero(buffer, device)
    first, *rest = model.parameters()
    _make_real(first, device)
    deepspeed.zero.Init(module=nn.ParameterList([first]), config_dict_or_path=config)
    for parameter in rest:
        _make_real(parameter, device)
        first.convert_to_zero_parameters(param_list=[parameter])  # type: ignore[attr-defined]  # DeepSpeed's


def _of_rank_zero(buffer: Tensor, device: torch.device) -> Tensor:
    real = torch.empty(buffer.shape, dtype=buffer.dtype, device=device) if buffer.is_meta else buffer.to(device)
    real = real.contiguous()
    if real.numel() > 0:
        torch.distributed.broadcast(real.view(-1).view(torch.uint8), 0)
    return real


def _make_real(parameter: nn.Parameter, device: torch.device) -> None:
    """A contiguous tensor on `device`, its values undefined where it was on the meta device."""
    if not parameter.is_meta:
        parameter.data = parameter.data.to(device).contiguous()
        return
    real = nn.Parameter(
        torch.empty(parameter.shape, dtype=parameter.dtype, device=device), requires_grad=parameter.requires_grad
    )
    real.__dict__.update(parameter.__dict__)
    torch.utils.swap_tensors(parameter, real)  # a meta tensor can't be given data; its object stays in all its places
