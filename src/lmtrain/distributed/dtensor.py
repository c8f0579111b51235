"""DTensor helpers: full tensors from local shards and back, global gradient norms, clipping.

`gather` makes whole tensors of parts, `copy_whole` and `lay_out_state` put whole ones in their place, so a checkpoint
never knows how many devices wrote it.
"""

import math
from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import Placement

# Elements: up to the first a norm in fp32 is right to 1e-6; the second is what is summed at a time beyond.
_EXACT, _BLOCK = 2**16, 2**12


def whole(tensor: Tensor) -> Tensor:
    """The full tensor of a sharded one, on every rank; any other tensor as it is."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def like(tensor: Tensor, parameter: Tensor) -> Tensor:
    """A whole tensor laid out as `parameter`; each rank takes its part of its own, nothing is sent."""
    if not isinstance(parameter, DTensor):
        return tensor
    return distribute_tensor(tensor, parameter.device_mesh, parameter.placements, src_data_rank=None)


def _mesh(tensor: Tensor) -> DeviceMesh | None:
    return tensor.device_mesh if isinstance(tensor, DTensor) else None


def total_norm(tensors: list[Tensor]) -> Tensor:
    """The global L2 norm of tensors or their parts, the same on all ranks; they may lie on several meshes."""
    if not any(isinstance(t, DTensor) for t in tensors):
        return _local_norm(tensors)
    world = torch.distributed.get_world_size()
    held: dict[int, list[Tensor]] = defaultdict(list)  # by how many ranks hold the same part
    for tensor in tensors:
        if not isinstance(tensor, DTensor):  # the same on all ranks
            held[world].append(tensor)
            continue
        sizes = zip(tensor.device_mesh.shape, tensor.placements, strict=True)
        parts = math.prod(size for size, placement in sizes if not isinstance(placement, Replicate))
        held[world // parts].append(tensor.to_local())
    squares = [_local_norm(parts).square() / n for n, parts in held.items()]
    # A sum over all ranks counts each part as often as it is held.
    total = torch.stack(squares).sum()
    torch.distributed.all_reduce(total)
    return total.sqrt()


def _local_norm(tensors: list[Tensor]) -> Tensor:
    """L2 norm of all elements, 0-dim fp32. On a CPU torch sums squares one by one in fp32, which is off by 1e-4 for
    four million: norms of blocks, and of these in fp64, are not, and take no longer."""
    large = [t for t in tensors if t.device.type == "cpu" and t.numel() > _EXACT]
    if not large:
        return torch.nn.utils.get_total_norm(tensors).float()
    rest = [t for t in tensors if t.device.type != "cpu" or t.numel() <= _EXACT]
    norms = [torch.nn.utils.get_total_norm(rest).view(1)] if rest else []
    for tensor in large:
        flat = tensor.flatten()
        blocks = flat.numel() // _BLOCK * _BLOCK
        norms.append(torch.linalg.vector_norm(flat[:blocks].view(-1, _BLOCK), dim=1, dtype=torch.float32))
        norms.append(torch.linalg.vector_norm(flat[blocks:], dtype=torch.float32).view(1))
    return torch.cat([norm.double() for norm in norms]).norm().float()


def clip(optimizer: torch.optim.Optimizer, max_norm: float, norm: Tensor) -> None:
    """Scales the gradients of the optimizer's parameters down to max_norm where `norm`, theirs, is larger."""
    by_mesh: dict[DeviceMesh | None, list[Tensor]] = defaultdict(list)
    for parameter in (p for group in optimizer.param_groups for p in group["params"]):
        by_mesh[_mesh(parameter)].append(parameter)
    for parameters in by_mesh.values():
        torch.nn.utils.clip_grads_with_norm_(parameters, max_norm, norm)


def is_part(parameter: Tensor) -> bool:
    """Whether this rank holds a part of the parameter only: fsdp, or ZeRO-3, which keeps it beside the parameter."""
    return isinstance(parameter, DTensor) or hasattr(parameter, "ds_tensor")


def full_shape(parameter: Tensor) -> torch.Size:
    """The shape of the whole parameter; under ZeRO-3 a parameter itself is empty between its uses."""
    return getattr(parameter, "ds_shape", parameter.shape)


def held(parameter: Tensor) -> Tensor:
    """The memory this rank holds of a parameter: its part of a sharded one (under ZeRO-3 flat), else all of it."""
    if isinstance(parameter, DTensor):
        return parameter.to_local().detach()
    return parameter.ds_tensor if hasattr(parameter, "ds_tensor") else parameter.detach()


def rows_shared_over(parameter: Tensor) -> ProcessGroup | None:
    """The ranks that hold as many rows of a matrix each; None where a rank has all of it, or it is cut otherwise."""
    if not isinstance(parameter, DTensor) or parameter.ndim != 2:
        return None
    mesh, placements = parameter.device_mesh, parameter.placements
    cut = [dim for dim, placement in enumerate(placements) if not isinstance(placement, Replicate)]
    even = len(cut) == 1 and placements[cut[0]] == Shard(0) and parameter.shape[0] % mesh.size(cut[0]) == 0
    return mesh.get_group(cut[0]) if even else None


def as_part_of(local: Tensor, parameter: Tensor) -> Tensor:
    """What this rank holds of a tensor laid out as `parameter`, as (its part of) that tensor; nothing is sent."""
    if not isinstance(parameter, DTensor):
        return local
    mesh, placements = parameter.device_mesh, parameter.placements
    return DTensor.from_local(
        local, mesh, placements, run_check=False, shape=parameter.shape, stride=parameter.stride()
    )


def laid_out(x: Tensor, mesh: DeviceMesh, now: Placement, then: Placement) -> Tensor:
    """This rank's part of what lies on the ranks as `now`, when it lies as `then`; the backward goes the other way."""
    return DTensor.from_local(x, mesh, [now], run_check=False).redistribute(mesh, [then]).to_local()


def part(tensor: Tensor, parameter: Tensor) -> Tensor:
    """Cuts the part that this rank holds of `parameter` out of a full tensor."""
    if not hasattr(parameter, "ds_tensor"):
        return held(like(tensor, parameter))
    zero: Any = parameter
    size, ranks = zero.ds_tensor.numel(), zero.ds_zero_partition_world_size
    flat = torch.nn.functional.pad(tensor.flatten(), (0, size * ranks - tensor.numel()))
    return flat.narrow(0, size * zero.ds_zero_partition_rank, size)


def swap(one: Tensor, other: Tensor) -> None:
    """Exchanges the values of two tensors of one shape, in place."""
    kept = one.clone()
    one.copy_(other)
    other.copy_(kept)


def gather(tree: Any, keep: bool) -> Any:
    """`tree` with whole tensors on the CPU in place of sharded ones, one after the other; {} where not `keep`.

    Every rank must call it with a tree of the same form.
    """
    leaves, form = torch.utils._pytree.tree_flatten(tree)
    kept: list[Any] = []
    seen: dict[int, Tensor | None] = {}  # tied weights are one parameter with two names
    for leaf in leaves:
        if isinstance(leaf, Tensor) and id(leaf) not in seen:
            gathered = whole(leaf.detach())
            seen[id(leaf)] = gathered.cpu() if keep else None
        kept.append(seen[id(leaf)] if isinstance(leaf, Tensor) else leaf)
    return torch.utils._pytree.tree_unflatten(kept, form) if keep else {}


@torch.no_grad()
def copy_whole(parameters: dict[str, Tensor], values: dict[str, Tensor]) -> None:
    """Copies whole `values` into the (sharded) parameters of the same names."""
    for name, value in values.items():
        parameters[name].copy_(like(value, parameters[name]))


def lay_out_state(state: dict[str, Any], parameters: Iterable[Tensor]) -> dict[str, Any]:
    """An optimizer's state dict of whole tensors, each of a parameter's shape laid out as that parameter.

    Args:
        parameters: of the optimizer, in the order of its groups.
    """
    laid_out: dict[int, dict[str, Any]] = {}
    for index, parameter in enumerate(parameters):
        values = state["state"].get(index)
        if values is not None:
            laid_out[index] = {name: _as_state(value, parameter) for name, value in values.items()}
    return {**state, "state": laid_out}


def _as_state(value: Any, parameter: Tensor) -> Any:
    if not isinstance(value, Tensor):
        return value
    # Copied: what is read from a checkpoint is a mapped file, which may be pruned.
    # To its device at once: under fsdp.cpu_offload a GPU has no room for all of it.
    return like(value, parameter).to(parameter.device, copy=True) if value.shape == parameter.shape else value.clone()
