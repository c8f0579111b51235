"""Finds bad steps (not finite) on the device, and skips their updates, without a host sync.

torch's fused optimizers read their own attribute `found_inf`, a tensor: where it is 1, a step changes neither weights
nor state. lmtrain's own optimizers do the same; `can_skip` says which optimizers can. For all others the host waits
once per step to know whether to step at all: custom optimizers, and bitsandbytes' 8-bit AdamW, which counts its steps
in Python, so that a step can't be undone on the device.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lmtrain.distributed.dtensor import held
from lmtrain.optim.half import HalfOptimizer

_NEVER = -1


class StepGuard:
    """A detector of bad steps, whose updates are skipped: those whose gradient norm is not finite.

    All state stays on the device; `counts` reads it.
    """

    def __init__(self) -> None:
        self.total = torch.zeros((), dtype=torch.int64)
        self.in_a_row = torch.zeros((), dtype=torch.int64)
        self.streak_start = torch.full((), _NEVER, dtype=torch.int64)
        self._known: tuple[int, int, int] | None = None  # what `counts` returns, once read

    def to(self, device: torch.device) -> None:
        self.total, self.in_a_row = self.total.to(device), self.in_a_row.to(device)
        self.streak_start = self.streak_start.to(device)

    def judge(self, step: int, grad_norm: Tensor) -> Tensor:
        """Returns whether step `step` (0-based) is bad, bool, 0-dim."""
        if grad_norm.device.type == "cpu" and math.isfinite(float(grad_norm)):
            total, in_a_row, start = self.counts()
            if in_a_row:
                self.in_a_row = torch.zeros_like(self.in_a_row)
            self._known = total, 0, start
            return torch.tensor(False, dtype=torch.bool)
        self._known = None
        bad = ~torch.isfinite(grad_norm)
        self.streak_start = torch.where(bad & (self.in_a_row == 0), step, self.streak_start)
        self.total = self.total + bad
        self.in_a_row = (self.in_a_row + 1) * bad
        return bad

    def counts(self) -> tuple[int, int, int]:
        """Returns (bad steps, consecutive bad steps, where these began); waits for the device, once after a step."""
        if self._known is None:
            self.know(torch.stack(self.tensors()).tolist())
        assert self._known is not None
        return self._known

    def tensors(self) -> list[Tensor]:
        """Returns the counts as tensors, 0-dim, for `know` once they are read together with others."""
        return [self.total, self.in_a_row, self.streak_start]

    def know(self, counts: list[float]) -> None:
        total, in_a_row, start = map(int, counts)
        self._known = total, in_a_row, start

    def state_dict(self) -> dict[str, Any]:
        total, in_a_row, start = self.counts()
        return {"total": total, "in_a_row": in_a_row, "streak_start": start}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._known = None
        self.total = torch.tensor(state["total"], dtype=torch.int64)
        self.in_a_row = torch.tensor(state["in_a_row"], dtype=torch.int64)
        self.streak_start = torch.tensor(state["streak_start"], dtype=torch.int64)


class SkippingOptimizer(HalfOptimizer):
    """Base class of lmtrain's own optimizers, with what their steps share."""

    takes_found_inf = True

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._in_full(self._step)
        return loss

    def _step(self) -> None:
        for group in self.param_groups:
            parameters = [p for p in group["params"] if p.grad is not None]
            if parameters:
                self._update(parameters, group)

    def _update(self, parameters: list[Tensor], group: dict[str, Any]) -> None:
        """Takes one step for parameters of one group, all of which have a gradient."""
        raise NotImplementedError

    def _momenta_and_gradients(self, parameters: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        """Returns this rank's shards of the momenta, created if missing, and of the gradients (see `or_else`)."""
        for p in parameters:
            if "momentum" not in self.state[p]:
                self.state[p]["momentum"] = torch.zeros_like(p)
        momenta = [held(self.state[p]["momentum"]) for p in parameters]
        return momenta, or_else(self, [held(p.grad) for p in parameters], momenta)  # type: ignore[arg-type]


def can_skip(optimizer: torch.optim.Optimizer) -> bool:
    """Returns whether a step of the optimizer changes nothing where its `found_inf` is 1."""
    return bool(optimizer.defaults.get("fused")) or bool(getattr(optimizer, "takes_found_inf", False))


def factor(optimizer: torch.optim.Optimizer) -> Tensor | float:
    """Returns the factor of a change, 0-dim fp32, 0 if the step must be skipped; 1.0 if `found_inf` is not set."""
    found_inf = getattr(optimizer, "found_inf", None)
    return 1.0 if found_inf is None else 1.0 - found_inf


def or_else(optimizer: torch.optim.Optimizer, gradients: list[Tensor], instead: list[Tensor]) -> list[Tensor]:
    """Returns the gradients, or `instead` if the step must be skipped: a non-finite gradient times 0 is not finite."""
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
    """Sets weights to `weights * (1 - lr * weight_decay) - lr * scale * directions`; may overwrite `directions`."""
    torch._foreach_mul_(weights, 1 - lr * weight_decay)
    if isinstance(lr, Tensor):
        torch._foreach_mul_(directions, lr * scale)
        torch._foreach_sub_(weights, directions)
    else:
        torch._foreach_add_(weights, directions, alpha=-lr * scale)
