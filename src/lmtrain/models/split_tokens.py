"""Sequence parallelism of layers that are split: between them each rank holds its share of the tokens.

Norms and the residual stream, which are the same on all ranks of a tensor-parallel group otherwise, hold T / ranks of
the tokens (Korthikanti et al. 2022, arXiv:2205.05198). Attention and feed-forward gather the tokens as they begin, and
where their outputs were summed over the ranks each gets its share of the sums: as much traffic as before.
"""

from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.parallel import SequenceParallel, parallelize_module

from lmtrain.distributed.dtensor import laid_out

TOKENS = Shard(1)  # of [B, T, D]


class TokenShares:
    """The tokens of the rows in work, shared out over the ranks of a group, whose shares are of one size."""

    def __init__(self, mesh: DeviceMesh) -> None:
        self.mesh = mesh
        self.count = 0  # T; the last shares are filled up with zeros

    def padded(self, x: Tensor) -> Tensor:
        """x [B, T, D] with zeros behind, up to a multiple of the ranks."""
        return nn.functional.pad(x, (0, 0, 0, -self.count % self.mesh.size()))

    def share(self, x: Tensor) -> Tensor:
        """This rank's tokens of x [B, T, D], which all ranks have, and of whose gradient all get the whole."""
        self.count = x.shape[1]
        return laid_out(self.padded(x), self.mesh, Replicate(), TOKENS)

    def whole(self, x: Tensor) -> Tensor:
        """All tokens, for what computes the same on all ranks, whose gradient is the same too."""
        return laid_out(x, self.mesh, TOKENS, Replicate())[:, : self.count]

    def gathered(self, x: Tensor) -> Tensor:
        """All tokens, for layers that are split: each rank's gradient is its part of a sum."""
        lying = DTensor.from_local(x, self.mesh, [TOKENS], run_check=False).redistribute(self.mesh, [Replicate()])
        return lying.to_local(grad_placements=[Partial()])[:, : self.count]

    def summed(self, x: Tensor) -> Tensor:
        """This rank's tokens of the ranks' sum of x [B, T, D]."""
        return laid_out(self.padded(x), self.mesh, Partial(), TOKENS)

    def enter(self, block: nn.Module) -> None:
        """Has the first block take its rank's tokens."""
        block.register_forward_pre_hook(partial(_change_hidden, self.share), with_kwargs=True)

    def leave(self, block: nn.Module) -> None:
        """Has the last block give all tokens."""
        block.register_forward_hook(lambda _block, _args, output: _change_output(self.whole, output))

    def split(self, block: nn.Module, layers: Iterable[nn.Module]) -> None:
        """Has the parts of a block that hold split layers gather their tokens; norms beside them keep to their own."""
        split = set(layers)
        for part in list(block.children()):
            if any(module in split for module in part.modules()):
                part.register_forward_pre_hook(partial(_change_hidden, self.gathered), with_kwargs=True)
            elif any(True for _ in part.parameters()):
                split_norm(part, self.mesh, sequence_dim=1)


def split_norm(module: nn.Module, mesh: DeviceMesh, sequence_dim: int) -> None:
    """A norm of a rank's part of dimension `sequence_dim`: its weight's gradient is summed over the ranks."""
    frozen = {name for name, p in module.named_parameters() if not p.requires_grad}
    parallelize_module(module, mesh, SequenceParallel(sequence_dim=sequence_dim, use_local_output=True))
    for name, p in module.named_parameters():
        p.requires_grad_(name not in frozen)


def _change_hidden(change: Any, _module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Changes the hidden states among a module's arguments: the first, or that of the name."""
    if args and isinstance(args[0], torch.Tensor):
        return (change(args[0]), *args[1:]), kwargs
    return args, kwargs | {"hidden_states": change(kwargs["hidden_states"])}


def _change_output(change: Any, output: Any) -> Any:
    return (change(output[0]), *output[1:]) if isinstance(output, tuple) else change(output)
