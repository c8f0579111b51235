"""Skips an update that the device found to be bad (not finite, a spike), without a host sync.

torch's fused optimizers read a tensor `found_inf` from themselves: where it is 1, a step changes neither weights nor
state. lmtrain's own optimizers do the same; `can_skip` says which can. For any other the host waits once a step to know
whether to step at all: those of a user's own, and bitsandbytes' 8-bit AdamW, which counts its steps in Python and so
can't have one taken back on the device.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lmtrain.distributed.dtensor import held


class SkippingOptimizer(torch.optim.Optimizer):
    """Base of lmtrain's own optimizers: what their steps share."""

    takes_found_inf = True

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._step()
        return loss

    def _step(self) -> None:
        for group in self.param_groups:
            parameters = [p for p in group["params"] if p.grad is not None]
            if parameters:
                self._update(parameters, group)

    def _update(self, parameters: list[Tensor], group: dict[str, Any]) -> None:
        """One step for parameters of one group, all of which have a gradient."""
        raise NotImplementedError

    def _momenta_and_gradients(self, parameters: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        """What this rank holds of the momenta, made where there are none, and of the gradients."""
        for p in parameters:
            if "momentum" not in self.state[p]:
                self.state[p]["momentum"] = torch.zeros_like(p)
        momenta = [held(self.state[p]["momentum"]) for p in parameters]
        return momenta, or_else(self, [held(p.grad) for p in parameters], momenta)  # type: ignore[arg-type]


def can_skip(optimizer: torch.optim.Optimizer) -> bool:
    """Whether a step of the optimizer leaves everything as it is where its `found_inf` is 1."""
    return bool(optimizer.defaults.get("fused")) or bool(getattr(optimizer, "takes_found_inf", False))


def factor(optimizer: torch.optim.Optimizer) -> Tensor | float:
    """What a change is multiplied by: 0-dim fp32, 0 where the step is to be left out; 1.0 where nobody asked."""
    found_inf = getattr(optimizer, "found_inf", None)
    return 1.0 if found_inf is None else 1.0 - found_inf


def or_else(optimizer: torch.optim.Optimizer, gradients: list[Tensor], instead: list[Tensor]) -> list[Tensor]:
    """The gradients, or where the step is to be left out `instead`: a gradient that isn't finite stays so times 0."""
    found_inf = getattr(optimizer, "found_inf", None)
    if found_inf is None:
        return gradients
    bad = found_inf.bool()
    return [torch.where(bad, other, gradient) for gradient, other in zip(gradients, instead, strict=True)]


def change(
    weights: list[Tensor],
    directions: list[Tensor] | tuple[Tensor, ...],
    lr: Tensor | float,
    weight_decay: float,
    scale: float = 1.0,
) -> None:
    """`weights * (1 - lr * weight_decay) - lr * scale * directions`, in place; `directions` may be overwritten."""
    torch._foreach_mul_(weights, 1 - lr * weight_decay)
    if isinstance(lr, Tensor):
        torch._foreach_mul_(directions, lr * scale)
        torch._foreach_sub_(weights, directions)
    else:
        torch._foreach_add_(weights, directions, alpha=-lr * scale)
