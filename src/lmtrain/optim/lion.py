"""Lion: the sign of an interpolated momentum. Chen et al. 2023, "Symbolic Discovery of Optimization Algorithms"."""

from typing import Any

import torch
from torch import Tensor

from lmtrain.distributed.dtensor import held
from lmtrain.optim.skipping import SkippingOptimizer, change, factor


class Lion(SkippingOptimizer):
    """Lion with decoupled weight decay (arXiv:2302.06675, algorithm 2). State: one `momentum` tensor per parameter.

    Every coordinate moves by exactly `lr`, so Lion needs a learning rate 3 to 10 times smaller than AdamW's and a
    weight decay larger by the same factor.
    """

    def __init__(
        self, params: Any, lr: float = 1e-4, betas: tuple[float, float] = (0.9, 0.99), weight_decay: float = 0.0
    ) -> None:
        if not all(0 <= beta < 1 for beta in betas):
            raise ValueError(f"betas={betas}: each must be at least 0 and below 1")
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    def _update(self, parameters: list[Tensor], group: dict[str, Any]) -> None:
        """Updates all parameters at once: a handful of kernels instead of five per parameter. Shards stay local."""
        beta1, beta2 = group["betas"]
        momenta, gradients = self._momenta_and_gradients(parameters)
        directions = torch._foreach_lerp(momenta, gradients, 1 - beta1)
        torch._foreach_sign_(directions)
        change([held(p) for p in parameters], directions, group["lr"] * factor(self), group["weight_decay"])
        torch._foreach_lerp_(momenta, gradients, 1 - beta2)
