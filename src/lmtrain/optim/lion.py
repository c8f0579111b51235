"""Lion: the sign of an interpolated momentum. Chen et al. 2023, "Symbolic Discovery of Optimization Algorithms"."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lmtrain.distributed.dtensor import held
from lmtrain.optim.skipping import change, factor, or_else


class Lion(torch.optim.Optimizer):
    """Lion with decoupled weight decay (arXiv:2302.06675, algorithm 2). State: one `momentum` tensor a parameter.

    Every coordinate moves by exactly `lr`, so it wants a learning rate 3 to 10 times smaller than AdamW's and a weight
    decay larger by the same factor.
    """

    takes_found_inf = True

    def __init__(
        self, params: Any, lr: float = 1e-4, betas: tuple[float, float] = (0.9, 0.99), weight_decay: float = 0.0
    ) -> None:
        if not all(0 <= beta < 1 for beta in betas):
            raise ValueError(f"betas={betas}: each must be at least 0 and below 1")
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            parameters = [p for p in group["params"] if p.grad is not None]
            if parameters:
                self._update(parameters, group)
        return loss

    def _update(self, parameters: list[Tensor], group: dict[str, Any]) -> None:
        """All at once: a handful of kernels instead of five a parameter. Of a sharded one this rank's part."""
        beta1, beta2 = group["betas"]
        for p in parameters:
            if "momentum" not in self.state[p]:
                self.state[p]["momentum"] = torch.zeros_like(p)
        weights, momenta = [held(p) for p in parameters], [held(self.state[p]["momentum"]) for p in parameters]
        gradients = or_else(self, [held(p.grad) for p in parameters], momenta)  # type: ignore[arg-type]
        directions = torch._foreach_lerp(momenta, gradients, 1 - beta1)
        torch._foreach_sign_(directions)
        change(weights, directions, group["lr"] * factor(self), group["weight_decay"])
        torch._foreach_lerp_(momenta, gradients, 1 - beta2)
