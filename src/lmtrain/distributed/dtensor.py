"""DTensor helpers: full tensors from local shards and back, global gradient norms, clipping.

`gather` makes full tensors from shards, `copy_whole` and `lay_out_state` shard full tensors again, so a checkpoint does
not depend on the number of devices that wrote it.
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

# Numbers of elements: up to _EXACT, an fp32 norm is accurate to 1e-6; larger tensors are summed in blocks of _BLOCK.
_EXACT, _BLOCK = 2**16, 2**12


def whole(tensor: Tensor) -> Tensor:
    """Returns the full tensor of a DTensor, on every rank; returns any other tensor unchanged."""
    if not isinstance(tensor, DTensor):
        return tensor
    if tensor.dtype == torch.int16:  # neither gloo nor NCCL sends it
        return whole(tensor.int()).short()
    return tensor.full_tensor()


def like(tensor: Tensor, parameter: Tensor) -> Tensor:
    """Shards a full tensor like `parameter`; each rank takes its shard from its own copy, without communication."""
    if not isinstance(parameter, DTensor):
        return tensor
    return distribute_tensor(tensor, parameter.device_mesh, parameter.placements, src_data_rank=None)


def total_norm(tensors: list[Tensor]) -> Tensor:
    """Returns the global L2 norm of full or sharded tensors, the same on all ranks; they may be on several meshes."""
    if not any(isinstance(t, DTensor) for t in tensors):
        return _local_norm(tensors)
    world = torch.distributed.get_world_size()
    held: dict[int, list[Tensor]] = defaultdict(list)  # by the number of ranks that hold the same shard
    for tensor in tensors:
        if not isinstance(tensor, DTensor):  # replicated on all ranks
            held[world].append(tensor)
            continue
        sizes = zip(tensor.device_mesh.shape, tensor.placements, strict=True)
        parts = math.prod(size for size, placement in sizes if not isinstance(placement, Replicate))
        held[world // parts].append(tensor.to_local())
    squares = [_local_norm(parts).square() / n for n, parts in held.items()]
    # The sum over all ranks counts each shard once per rank that holds it, hence the division by n.
    total = torch.stack(squares).sum()
    torch.distributed.all_reduce(total)
    return total.sqrt()


def _local_norm(tensors: list[Tensor]) -> Tensor:
    """Returns the L2 norm of all elements, 0-dim fp32.

    On a CPU, torch sums squares one by one in fp32, with an error of 1e-4 for four million elements. Norms of blocks,
    combined in fp64, avoid that error and take no longer.
    """
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
    """Scales the gradients of the optimizer's parameters down to `max_norm` if `norm`, their global norm, is larger."""
    # Else torch multiplies them by 1; a GPU would be waited for.
    if norm.device.type == "cpu" and float(norm) < max_norm - 1e-5:
        return
    by_mesh: dict[DeviceMesh | None, list[Tensor]] = defaultdict(list)
    for parameter in (p for group in optimizer.param_groups for p in group["params"]):
        by_mesh[parameter.device_mesh if isinstance(parameter, DTensor) else None].append(parameter)
    for parameters in by_mesh.values():
        torch.nn.utils.clip_grads_with_norm_(parameters, max_norm, norm)


def is_part(parameter: Tensor) -> bool:
    """Returns whether this rank holds only a shard of the parameter: under fsdp, or ZeRO-3 (attribute `ds_tensor`)."""
    return isinstance(parameter, DTensor) or hasattr(parameter, "ds_tensor")


def full_shape(parameter: Tensor) -> torch.Size:
    """Returns the shape of the full parameter; under ZeRO-3 the parameter itself is empty unless gathered."""
    return getattr(parameter, "ds_shape", parameter.shape)


def held(parameter: Tensor) -> Tensor:
    """Returns this rank's storage of a parameter: its shard (flat under ZeRO-3), or all of an unsharded parameter."""
    if isinstance(parameter, DTensor):
        return parameter.to_local().detach()
    return parameter.ds_tensor if hasattr(parameter, "ds_tensor") else parameter.detach()


def rows_shared_over(parameter: Tensor) -> ProcessGroup | None:
    """Returns the group whose ranks hold equal numbers of rows of a matrix; None if unsharded or cut otherwise."""
    if not isinstance(parameter, DTensor) or parameter.ndim != 2:
        return None
    mesh, placements = parameter.device_mesh, parameter.placements
    cut = [dim for dim, placement in enumerate(placements) if not isinstance(placement, Replicate)]
    even = len(cut) == 1 and placements[cut[0]] == Shard(0) and parameter.shape[0] % mesh.size(cut[0]) == 0
    return mesh.get_group(cut[0]) if even else None


def as_part_of(local: Tensor, parameter: Tensor) -> Tensor:
    """Wraps this rank's shard as a tensor that is sharded like `parameter` (if that is sharded); no communication."""
    if not isinstance(parameter, DTensor):
        return local
    mesh, placements = parameter.device_mesh, parameter.placements
    return DTensor.from_local(
        local, mesh, placements, run_check=False, shape=parameter.shape, stride=parameter.stride()
    )


def laid_out(x: Tensor, mesh: DeviceMesh, now: Placement, then: Placement) -> Tensor:
    """Redistributes local tensor `x` from placement `now` to `then`; the backward redistributes the opposite way."""
    return DTensor.from_local(x, mesh, [now], run_check=False).redistribute(mesh, [then]).to_local()


def part(tensor: Tensor, parameter: Tensor) -> Tensor:
    """Cuts out of a full tensor the shard that corresponds to this rank's shard of `parameter`."""
    if not hasattr(parameter, "ds_tensor"):
        return held(like(tensor, parameter))
    zero: Any = parameter
    size, ranks = zero.ds_tensor.numel(), zero.ds_zero_partition_world_size
    flat = torch.nn.functional.pad(tensor.flatten(), (0, size * ranks - tensor.numel()))
    return flat.narrow(0, size * zero.ds_zero_partition_rank, size)


def swap(one: Tensor, other: Tensor) -> None:
    """Exchanges the values of two tensors of the same shape, in place."""
    kept = one.clone()
    one.copy_(other)
    other.copy_(kept)


def gather(tree: Any, keep: bool) -> Any:
    """Returns `tree` with full tensors on the CPU, gathered one at a time; {} if `keep` is False.

    Every rank must call it with a tree of the same structure.
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
    """Copies full `values` into the (possibly sharded) parameters of the same names."""
    for name, value in values.items():
        parameters[name].copy_(like(value, parameters[name]))


def lay_out_state(state: dict[str, Any], parameters: Iterable[Tensor]) -> dict[str, Any]:
    """Returns an optimizer's state dict in which full tensors of a parameter's shape are sharded like that parameter.

    Args:
        state: the state dict with full tensors.
        parameters: those of the optimizer, in the order of its groups.
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
    # Copied, because tensors read from a checkpoint map its file, which may be pruned.
    # Moved to the parameter's device one by one: under fsdp.cpu_offload a GPU has no room for all of them.
    return like(value, parameter).to(parameter.device, copy=True) if value.shape == parameter.shape else value.clone()
