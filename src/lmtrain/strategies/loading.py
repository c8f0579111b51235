"""Loading on several ranks: the first reads or draws the weights, the others get them from it part by part.

So a node holds the model once in host memory while it loads, not once per rank, and all ranks begin with the very same
bits, whatever their machines make of a random draw or a decomposition.
"""

from collections.abc import Callable, Iterable
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lmtrain.config.schema import Config
from lmtrain.distributed import process_group as world

T = TypeVar("T")


def why_on_every_rank(c: Config) -> str | None:
    """Why each rank has to build the whole model; None where the first one's is enough."""
    if c.peft.quantization is not None:
        return f"peft.quantization={c.peft.quantization} packs weights on each device"
    if c.peft.method != "none" and not c.peft.adapter and str(c.peft.init_weights).startswith(("pissa", "olora")):
        return f"peft.init_weights={c.peft.init_weights} takes the adapter out of the base's weights"
    if c.model.trust_remote_code:
        return "model.trust_remote_code=true may need weights while it builds the model"
    return c.objective.why_on_every_rank()


def build(config: Config, make: Callable[[], T]) -> T:
    """What `make` builds: with weights on the first rank, on the meta device on the others where that will do.

    Raises:
        UserError: of any rank, on all of them.
    """
    if world.rank() == 0 or why_on_every_rank(config) is not None:
        return world.together(make)
    with torch.device("meta"):
        return world.together(make)


def outside(model: nn.Module, blocks: Iterable[nn.Module]) -> list[nn.Module]:
    """The modules of a model that are in none of its blocks."""
    inside = {id(module) for block in blocks for module in block.modules()}
    return [module for module in model.modules() if id(module) not in inside]


@torch.no_grad()
def spread(modules: Iterable[nn.Module], device: torch.device) -> None:
    """Puts the first rank's parameters and buffers of `modules` (not of what is in them) onto every rank's `device`.

    Tensors stay the objects they are, so tied ones stay tied. Every rank must call it with the same modules.
    """
    done: set[int] = set()
    for module in modules:
        for tensor in (*module._parameters.values(), *module._buffers.values()):
            if tensor is not None and id(tensor) not in done:
                _receive(tensor, device)
                done.add(id(tensor))


def _receive(tensor: Tensor, device: torch.device) -> None:
    is_meta = tensor.device.type == "meta"
    here = torch.empty_like(tensor, device=device) if is_meta else tensor.detach().to(device)
    here = here.contiguous()
    if here.numel():
        dist.broadcast(here.view(-1).view(torch.uint8), src=0)  # bytes: gloo and NCCL each lack some dtypes
    if isinstance(tensor, nn.Parameter):
        here = nn.Parameter(here, tensor.requires_grad)
    torch.utils.swap_tensors(tensor, here)
