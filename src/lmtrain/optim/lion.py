"""Lion: the sign of an interpolated momentum. Chen et al. 2023, "Symbolic Discovery of Optimization Algorithms"."""

from collections.abc import Callable
from typing import Any

import torch


class Lion(torch.optim.Optimizer):
    """Lion with decoupled weight decay (arXiv:2302.06675, algorithm 2). State: one `momentum` tensor a parameter.

    Every coordinate moves by exactly `lr`, so it wants a learning rate 3 to 10 times smaller than AdamW's and a weight
    decay larger by the same factor.
    """

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
            beta1, beta2 = group["betas"]
            for parameter in group["params"]:
                gradient = parameter.grad
                if gradient is None:
                    continue
                state = self.state[parameter]
                if "momentum" not in state:
                    state["momentum"] = torch.zeros_like(parameter)
                momentum = state["momentum"]
                direction = momentum.lerp(gradient, 1 - beta1).sign_()
                parameter.mul_(1 - group["lr"] * group["weight_decay"])
                parameter.add_(direction, alpha=-group["lr"])
                momentum.lerp_(gradient, 1 - beta2)
        return loss
