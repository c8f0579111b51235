"""FSDP2 (torch's fully_shard): every parameter lies in equal parts on all devices and is gathered block by block.

Zhao et al. 2023, arXiv:2304.11277; Rajbhandari et al. 2020 (ZeRO stage 3), arXiv:1910.02054.
"""

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
    register_fsdp_forward_method,
)

from lmtrain.adapters.quantized import is_quantized
from lmtrain.config.schema import Config, FsdpConfig
from lmtrain.distributed import process_group as world
from lmtrain.models.blocks import decoder_blocks
from lmtrain.models.language_model import LanguageModel

RELEASE = "release_gathered"  # attribute of a model under ZeRO-3: DeepSpeed's function for `reshard`
_HALF = {"bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}


def shard(
    model: LanguageModel,
    mesh: DeviceMesh,
    device: torch.device,
    precision: str,
    options: FsdpConfig,
    *,
    root_mesh: DeviceMesh | None = None,
    split: Callable[[nn.Module], None] = lambda block: None,
) -> None:
    """Shards each decoder block, then the rest (embeddings, last norm, output layer) as one group with the root.

    In mixed precision the blocks are gathered in half precision, in which autocast multiplies, and gradients
    are summed in fp32. The rest is gathered as it is: the residual stream starts in its dtype, as on one device.

    The first rank's weights are spread just before: no rank ever holds more than its parts and one block.

    Args:
        mesh: one dimension to shard over, or two: copies (the first) of a model sharded over the second (HSDP).
        device: of this rank.
        precision: as in trainer.precision.
        root_mesh: what the rest is sharded over, where that differs from `mesh`.
        split: splits the layers of a block, whole by then, over the ranks of a tensor-parallel group.
    """
    offload = CPUOffloadPolicy(pin_memory=torch.cuda.is_available()) if options.cpu_offload else OffloadPolicy()
    plain = MixedPrecisionPolicy(cast_forward_inputs=False)
    half = MixedPrecisionPolicy(_HALF.get(precision), torch.float32, cast_forward_inputs=False)
    # A CPU's LayerNorm takes no half-precision weight beside an fp32 input.
    policy = half if precision in _HALF and mesh.device_type != "cpu" else plain
    if is_quantized(model.model):
        from lmtrain.adapters import packed

        packed.take_apart(model, world.from_first(lambda: packed.format_of(model)))
    blocks = decoder_blocks(model.model)
    for block in blocks:
        spread(block.modules(), device)
        split(block)
        fully_shard(
            block,
            mesh=mesh,
            mp_policy=policy,
            offload_policy=offload,
            reshard_after_forward=options.reshard_after_forward,
        )
    spread(outside(model, blocks), device)
    # The root's own parameters are needed first in backward, so they stay.
    fully_shard(model, mesh=root_mesh or mesh, mp_policy=plain, offload_policy=offload, reshard_after_forward=False)
    for method in ("log_probs", "divergence", "scores"):
        register_fsdp_forward_method(model, method)


def is_sharded(model: nn.Module) -> bool:
    """Whether a forward needs all ranks: FSDP2, or ZeRO-3, whose parameters have an id of DeepSpeed's."""
    return isinstance(model, FSDPModule) or any(hasattr(p, "ds_id") for p in model.parameters())


@contextlib.contextmanager
def root_gathered(model: nn.Module) -> Iterator[None]:
    """Within it the model inside the root can be called by itself, on all ranks alike; blocks gather themselves."""
    if not isinstance(model, FSDPModule):
        yield
        return
    model.unshard()
    try:
        yield
    finally:
        model.reshard()


@contextlib.contextmanager
def gathered(model: nn.Module) -> Iterator[None]:
    """Within it every rank holds all weights of the model and calls it by itself, as often as it likes."""
    if isinstance(model, FSDPModule):
        model._get_fsdp_state()._lazy_init()  # a rollout comes before the first forward of the root, which would do it
    sharded = [module for module in model.modules() if isinstance(module, FSDPModule)]
    kept = [module._get_fsdp_state()._fsdp_param_group for module in sharded]
    before = [group.post_forward_mesh_info if group is not None else None for group in kept]
    for module in sharded:
        module.set_reshard_after_forward(False, recurse=False)
        module.unshard()
    try:
        yield
    finally:
        for module, group, mesh in zip(sharded, kept, before, strict=True):
            if group is not None:
                module.set_reshard_after_forward(mesh is not None, recurse=False)
            module.reshard()


def reshard(model: nn.Module) -> None:
    """Frees what is gathered of a sharded model, so that the next forward gathers again."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
    release = getattr(model, RELEASE, None)
    if release is not None:
        release()


def sync_gradients(model: nn.Module, last: bool) -> None:
    """Gradients of a sharded model are reduced in the backward of the last micro-batch only."""
    if isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(last)


T = TypeVar("T")


def why_on_every_rank(c: Config) -> str | None:
    """Why each rank has to build the whole model; None where the first one's is enough."""
    if c.peft.quantization is not None and c.trainer.strategy != "fsdp":
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
