"""FSDP2 (torch's fully_shard): every parameter is sharded evenly over all devices and gathered block by block.

Zhao et al. 2023, arXiv:2304.11277; Rajbhandari et al. 2020 (ZeRO stage 3), arXiv:1910.02054.
"""

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import fsdp
from torch.distributed.device_mesh import DeviceMesh

from lmtrain.adapters.quantized import is_quantized
from lmtrain.config.options import LoadedModelConfig
from lmtrain.config.schema import Config, FsdpConfig
from lmtrain.distributed import process_group as world
from lmtrain.models.blocks import AROUND, decoder_blocks, untied_layers
from lmtrain.models.language_model import LanguageModel
from lmtrain.models.weight_files import LEFT, WeightFiles, identities

RELEASE = "release_gathered"  # model attribute under ZeRO-3: DeepSpeed's function that `reshard` calls
MIXED = {"bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}


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
    """Shards each decoder block, then embeddings and output layer if they are untied, and the rest with the root.

    In mixed precision, blocks and output layer are gathered in half precision, in which autocast multiplies, and
    gradients are summed in fp32. The rest is gathered in its own dtype, so that the residual stream starts in the same
    dtype as on one device.

    The first rank's weights are distributed just before each module is sharded, so no device ever holds more than its
    shards and one block.

    Args:
        mesh: one dimension to shard over, or two: replicas (the first) of a model sharded over the second (HSDP).
        device: this rank's device.
        precision: as in trainer.precision.
        root_mesh: the mesh for everything outside the blocks, if it differs from `mesh`.
        split: splits the layers of a block, which are unsharded at that point, over a tensor-parallel group.
    """
    to_host = fsdp.CPUOffloadPolicy(pin_memory=torch.cuda.is_available())
    offload = to_host if options.cpu_offload else fsdp.OffloadPolicy()
    plain = fsdp.MixedPrecisionPolicy(cast_forward_inputs=False)
    half = fsdp.MixedPrecisionPolicy(MIXED.get(precision), torch.float32, cast_forward_inputs=False)
    policy = half if _in_half(precision, mesh.device_type) else plain
    _take_apart_quantized(model)
    blocks = decoder_blocks(model.model)
    dim = mesh.ndim - 1
    # With tensor parallelism, ranks need full layers, which are then split, and not only their own rows.
    source = source_of(model, (mesh.get_local_rank(dim), mesh.size(dim)) if root_mesh is None else None)
    freed: dict[str, Any] = {"offload_policy": offload, "reshard_after_forward": options.reshard_after_forward}
    kept = {**freed, "reshard_after_forward": False}
    for block in blocks:
        spread(block.modules(), device, source)
        split(block)
        fsdp.fully_shard(block, mesh=mesh, mp_policy=policy, **freed)
    spread(outside(model, blocks), device, source)
    everywhere = root_mesh or mesh
    apart = untied_layers(model.model)
    if apart is not None:
        embeddings, head = apart
        fsdp.fully_shard(embeddings, mesh=everywhere, mp_policy=plain, **freed)
        embeddings.set_unshard_in_backward(False)  # backward does not read them
        # Needed last in forward and first in backward, so it stays gathered in between, like the root's own parameters.
        fsdp.fully_shard(head, mesh=everywhere, mp_policy=policy, **kept)
        setattr(head, AROUND, lambda compute, hidden: compute(hidden))
        fsdp.register_fsdp_forward_method(head, AROUND)
    fsdp.fully_shard(model, mesh=everywhere, mp_policy=plain, **kept)
    for method in ("log_probs", "divergence", "scores"):
        fsdp.register_fsdp_forward_method(model, method)


def _take_apart_quantized(model: LanguageModel) -> None:
    """Turns the packed weights and scales of a 4-bit base model into parameters that can be sharded, on all ranks."""
    if is_quantized(model.model):
        from lmtrain.adapters import packed

        packed.take_apart(model, world.from_first(lambda: packed.format_of(model)))


def _in_half(precision: str, device_type: str) -> bool:
    """Returns whether matrices are gathered in half precision. On a CPU, LayerNorm rejects them with fp32 inputs."""
    return precision in MIXED and device_type != "cpu"


def is_sharded(model: nn.Module) -> bool:
    """Returns whether a forward needs all ranks: under FSDP2, or ZeRO-3, whose parameters have a `ds_id`."""
    return isinstance(model, fsdp.FSDPModule) or any(hasattr(p, "ds_id") for p in model.parameters())


@contextlib.contextmanager
def root_gathered(model: nn.Module) -> Iterator[None]:
    """Gathers the root's parameters, so that all ranks together can call the inner model; blocks gather themselves."""
    if not isinstance(model, fsdp.FSDPModule):
        yield
        return
    model.unshard()
    try:
        yield
    finally:
        model.reshard()


@contextlib.contextmanager
def gathered(model: nn.Module) -> Iterator[None]:
    """Gathers all weights on every rank, so that each rank can call the model by itself, any number of times."""
    if isinstance(model, fsdp.FSDPModule):
        model._get_fsdp_state()._lazy_init()  # a rollout precedes the root's first forward, which would do it
    sharded = [module for module in model.modules() if isinstance(module, fsdp.FSDPModule)]
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
    """Frees the gathered parameters of a sharded model, so that the next forward gathers them again."""
    for module in model.modules():
        if isinstance(module, fsdp.FSDPModule):
            module.reshard()
    release = getattr(model, RELEASE, None)
    if release is not None:
        release()


def sync_gradients(model: nn.Module, last: bool) -> None:
    """Makes a sharded model reduce gradients only in the backward of the `last` micro-batch."""
    if isinstance(model, fsdp.FSDPModule):
        model.set_requires_gradient_sync(last)


T = TypeVar("T")


def why_on_every_rank(c: Config) -> str | None:
    """Returns why each rank must build the whole model, or None if it is enough that the first rank does."""
    if c.peft.quantization is not None and c.trainer.strategy != "fsdp":
        return f"peft.quantization={c.peft.quantization} packs weights on each device"
    if c.peft.method != "none" and not c.peft.adapter and str(c.peft.init_weights).startswith(("pissa", "olora")):
        return f"peft.init_weights={c.peft.init_weights} computes the adapter from the base's weights"
    if c.model.trust_remote_code:
        return "model.trust_remote_code=true may need weights while it builds the model"
    return c.objective.why_on_every_rank()


def reads_files(c: Config) -> bool:
    """Returns whether ranks may read pretrained weights from the files: nothing else may need them before sharding."""
    return (
        world.size() > 1
        and c.trainer.strategy in ("fsdp", "fsdp_tp")
        and isinstance(c.model, LoadedModelConfig)
        and c.objective.may_stay_in_files
        and c.objective._target_.startswith("lmtrain.")  # a user's class may read weights when it is built
        and c.peft.method == "none"
        and c.memory.num_chapters is None
        and why_on_every_rank(c) is None
    )


def build(config: Config, make: Callable[[], T]) -> T:
    """Returns what `make` builds: with weights on the first rank, on the meta device on the others if that suffices.

    Raises:
        UserError: an error of any rank, on all ranks.
    """
    if world.rank() == 0 or why_on_every_rank(config) is not None:
        return world.together(make)
    with torch.device("meta"):
        return world.together(make)


def outside(model: nn.Module, blocks: Iterable[nn.Module]) -> list[nn.Module]:
    """Returns the modules of a model that are in none of its blocks."""
    inside = {id(module) for block in blocks for module in block.modules()}
    return [module for module in model.modules() if id(module) not in inside]


def source_of(model: LanguageModel, part: tuple[int, int] | None) -> WeightFiles | None:
    """Returns how ranks get the weights that the first rank may have left in files, or None if it has not.

    If any rank does not find the same files as the first rank, the first rank reads and broadcasts the weights.
    """
    left = world.from_first(lambda: getattr(model.model, LEFT, None))
    if left is None:
        return None
    found = world.gathered(identities(left))
    return WeightFiles(left, model.model, part if all(each == found[0] for each in found) else None)


@torch.no_grad()
def spread(modules: Iterable[nn.Module], device: torch.device, source: WeightFiles | None = None) -> None:
    """Copies the first rank's parameters and buffers of `modules` (not of their submodules) to every rank's `device`.

    Tensors remain the same objects, so tied ones stay tied. Every rank must call it with the same modules.

    Args:
        source: where to read parameters that are in files. A rank gets only the rows it keeps; others are undefined.
    """
    done: set[int] = set()
    for module in modules:
        for tensor in (*module._parameters.values(), *module._buffers.values()):
            if tensor is not None and id(tensor) not in done:
                _receive(tensor, device, source)
                done.add(id(tensor))


def _receive(tensor: Tensor, device: torch.device, source: WeightFiles | None) -> None:
    is_meta = tensor.device.type == "meta"
    here = torch.empty_like(tensor, device=device) if is_meta else tensor.detach().to(device)
    here, has_own = here.contiguous(), False
    name = None if source is None else source.take(tensor)
    if source is not None and name is not None:
        has_own = source.part is not None
        if has_own or world.rank() == 0:
            source.read(name, here, source.rows(len(here)))
    if here.numel() and not has_own:
        dist.broadcast(here.view(-1).view(torch.uint8), src=0)  # as bytes: gloo and NCCL each lack some dtypes
    if isinstance(tensor, nn.Parameter):
        here = nn.Parameter(here, tensor.requires_grad)
    torch.utils.swap_tensors(tensor, here)
