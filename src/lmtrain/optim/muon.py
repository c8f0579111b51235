"""Muon for hidden matrices and AdamW for all other parameters, as one optimizer.

Muon (Jordan et al. 2024, kellerjordan.github.io/posts/muon) replaces a matrix's momentum by the nearest orthogonal
matrix. Its update is scaled to AdamW's usual size (Liu et al. 2025, arXiv:2502.16982, "Moonlight"), so both parts share
one learning rate and one weight decay.

Why not `torch.optim.Muon`, which computes the same: it rejects experts, which transformers stacks into one parameter
[experts, rows, columns]; it processes one matrix at a time, although equal shapes can be batched; and it always
multiplies in bfloat16, 25 times slower than float32 on a CPU that only emulates it.
"""

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lmtrain.distributed import process_group as world
from lmtrain.distributed.devices import cpu_multiplies_bf16
from lmtrain.distributed.dtensor import as_part_of, held, is_part, like, rows_shared_over, whole
from lmtrain.optim.skipping import SkippingOptimizer, change, factor

# Jordan's quintic: steepest at zero, so small singular values grow fastest; all end up between about 0.7 and 1.2.
NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)
# AdamW's updates have a root mean square of 0.2 to 0.4 (arXiv:2502.16982, section 2.2).
ADAMW_UPDATE_RMS = 0.2
# Maximum elements of a batch of matrices: bounds the extra memory; larger batches would be no faster.
BATCH_ELEMENTS = 2**25


def orthogonalize(matrices: Tensor) -> Tensor:
    """Approximates U V^T for each matrix U S V^T of a batch, by a Newton-Schulz iteration.

    Args:
        matrices: [N, rows, columns], any floating dtype. A transposed (GPT-2's Conv1D) or fused (q, k and v in one)
            matrix works as well as any other.

    Returns: [N, rows, columns] in bfloat16, or in float32 where bfloat16 isn't native.
    """
    a, b, c = NEWTON_SCHULZ
    x = matrices.to(_matmul_dtype(matrices.device.type))
    tall = x.size(-2) > x.size(-1)
    if tall:  # the smaller Gram matrix is cheaper
        x = x.mT
    x = x / torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True).clamp(min=1e-7)  # singular values at most 1
    for _ in range(5):  # which the coefficients were chosen for
        gram = x @ x.mT  # [N, n, n], n the smaller side
        polynomial = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        x = torch.baddbmm(x, polynomial, x, beta=a)
    return x.mT if tall else x


def orthogonalize_together(matrices: Tensor) -> Tensor:
    """Orthogonalizes matrices that all ranks hold: each rank computes its share of them and sends it to the others.

    The work is divided by the number of ranks; only the updates are sent, in the dtype they are computed in.
    """
    ranks, n = world.size(), len(matrices)
    if ranks == 1 or n == 1:
        return orthogonalize(matrices)
    share = -(-n // ranks)  # the last ranks may have fewer, or none
    mine = matrices[world.rank() * share : (world.rank() + 1) * share]
    shape = (share, *matrices.shape[1:])
    found = torch.zeros(shape, dtype=_matmul_dtype(matrices.device.type), device=matrices.device)
    if len(mine):
        found[: len(mine)] = orthogonalize(mine)
    gathered = found.new_empty((ranks * share, *matrices.shape[1:]))
    dist.all_gather_into_tensor(gathered, found)
    return gathered[:n]


def orthogonalize_rows(rows: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Orthogonalizes matrices whose rows are sharded evenly over the ranks of a group.

    Each rank gets all rows of its share of the matrices, orthogonalizes these and sends every rank its rows of the
    result, so a rank receives twice the size of its own rows, whatever the number of ranks.

    Args:
        rows: [N, rows / ranks, columns], this rank's rows.

    Returns: [N, rows / ranks, columns], this rank's rows of the results, in the dtype they are computed in.
    """
    ranks, n = dist.get_world_size(group), len(rows)
    share = -(-n // ranks)  # the last ranks may have fewer, or none
    mine = max(0, min(share, n - dist.get_rank(group) * share))
    sent = rows.new_zeros((ranks * share, *rows.shape[1:]), dtype=_matmul_dtype(rows.device.type))
    sent[:n] = rows
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=group)
    matrices = received.unflatten(0, (ranks, share)).transpose(0, 1).flatten(1, 2)  # [share, rows, columns]
    if mine:
        matrices[:mine] = orthogonalize(matrices[:mine])
    sent = matrices.unflatten(1, (ranks, -1)).transpose(0, 1).flatten(0, 1).contiguous()
    found = torch.empty_like(sent)  # not `received`: with one matrix per rank, `sent` is a view of it
    dist.all_to_all_single(found, sent, group=group)
    return found[:n]


def _matmul_dtype(device_type: str) -> torch.dtype:
    native = device_type != "cpu" or cpu_multiplies_bf16()
    return torch.bfloat16 if native else torch.float32


class Muon(SkippingOptimizer):
    """Muon with Moonlight's update scale 0.2 * sqrt(max(rows, columns)) and decoupled weight decay.

    Parameters are matrices [rows, columns] or stacks of them [..., rows, columns]. State: one `momentum` tensor each.
    The scale is symmetric in rows and columns, so transposed weights need no special case.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        momentum: float = 0.95,
        weight_decay: float = 0.0,
    ) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    def _step(self) -> None:
        for group in self.param_groups:
            for batch in _equal_shapes(p for p in group["params"] if p.grad is not None):
                self._update(batch, group)

    def _update(self, parameters: list[Tensor], group: dict[str, Any]) -> None:
        """Updates parameters of one shape, with as many kernels for a hundred of them as for one."""
        directions, ranks = self._directions(parameters, group), rows_shared_over(parameters[0])
        if ranks is None:
            parts = _of_whole_matrices(directions, parameters)
        else:
            rows = torch.stack([held(d) for d in directions])
            parts = list(orthogonalize_rows(rows, ranks).to(parameters[0].dtype))
        scale = ADAMW_UPDATE_RMS * math.sqrt(max(parameters[0].shape[-2:]))
        change([held(p) for p in parameters], parts, group["lr"] * factor(self), group["weight_decay"], scale)

    def _directions(self, parameters: list[Tensor], group: dict[str, Any]) -> list[Tensor]:
        """Adds the new gradients to the momenta; returns the directions, the gradient added once more (Nesterov)."""
        weight, (momenta, gradients) = group["momentum"], self._momenta_and_gradients(parameters)
        torch._foreach_lerp_(momenta, gradients, 1 - weight)
        directions = torch._foreach_lerp(gradients, momenta, weight)
        return [as_part_of(d, p) for d, p in zip(directions, parameters, strict=True)]


def _of_whole_matrices(directions: list[Tensor], parameters: list[Tensor]) -> list[Tensor]:
    """Returns this rank's shards of the orthogonalized matrices, gathering the directions first if they are sharded."""
    if is_part(parameters[0]):
        dtype = _matmul_dtype(parameters[0].device.type)  # they are rounded to it anyway, and half as much is sent
        directions = [whole(d.to(dtype)) for d in directions]
    stacked = torch.stack(directions)  # [P, ..., rows, columns]
    matrices = stacked.flatten(0, -3)  # [N, rows, columns]
    updates = orthogonalize_together(matrices).unflatten(0, stacked.shape[:-2]).to(parameters[0].dtype)
    return [held(like(update, p)) for update, p in zip(updates, parameters, strict=True)]


def _equal_shapes(parameters: Iterable[Tensor]) -> Iterator[list[Tensor]]:
    """Yields lists of parameters of one shape, dtype and device, at most BATCH_ELEMENTS elements, or one per rank."""
    alike: dict[tuple[Any, ...], list[Tensor]] = defaultdict(list)
    for p in parameters:
        alike[p.shape, p.dtype, p.device].append(p)
    for members in alike.values():
        size = max(world.size(), BATCH_ELEMENTS // members[0].numel())
        for start in range(0, len(members), size):
            yield members[start : start + size]


class MuonWithAdamW(SkippingOptimizer):
    """An optimizer that steps groups with `algorithm: muon` by Muon, those with `algorithm: adamw` by torch's AdamW.

    To its users it is one optimizer (Lightning would count the steps of two twice). The parts are views: they use this
    optimizer's own group dicts and its state, so there is one copy to read, change, save and load.
    """

    def __init__(self, params: Any, *, muon: dict[str, Any], adamw: dict[str, Any]) -> None:
        self._options = {"muon": muon, "adamw": adamw}  # options of Muon and of torch.optim.AdamW
        super().__init__(params, {})

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(param_group)
        self._build_parts()

    def __setstate__(self, state: dict[str, Any]) -> None:
        # Loading a state dict and unpickling replace groups and state, so the parts must be rebuilt.
        super().__setstate__(state)
        self._build_parts()

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_options": self._options}

    def _build_parts(self) -> None:
        self._parts: list[torch.optim.Optimizer] = []
        classes: dict[str, type[torch.optim.Optimizer]] = {"muon": Muon, "adamw": torch.optim.AdamW}
        for algorithm, cls in classes.items():
            groups = [g for g in self.param_groups if g["algorithm"] == algorithm]
            if groups:
                part = cls(groups, **self._options[algorithm])  # fills in the options that a group's dict lacks
                part.state = self.state
                self._parts.append(part)

    def _step(self) -> None:
        for part in self._parts:
            if hasattr(self, "found_inf"):
                part.found_inf = self.found_inf  # type: ignore[attr-defined]
            part.step()
