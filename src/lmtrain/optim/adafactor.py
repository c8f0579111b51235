"""Adafactor: Adam's second moment stored as one row and one column. Shazeer & Stern 2018 (arXiv:1804.04235).

Why not a library's: torch's caps the step at 1/sqrt(t) whatever the schedule, waits for the GPU twice per parameter
and fails on sharded parameters; transformers' also fails on those and, with bfloat16 weights, doesn't resume exactly.
"""

from typing import Any

import torch
from torch import Tensor

from lmtrain.distributed.dtensor import like, whole
from lmtrain.optim.skipping import SkippingOptimizer, factor, or_else

_BETA2_DECAY, _EPS = -0.8, 1e-30  # the paper's: beta2 at step t is 1 - t^-0.8, and epsilon_1 is added to squares


class Adafactor(SkippingOptimizer):
    """Algorithms 4 and 5 of the paper without momentum; the relative step size is the given `lr`.

    A parameter moves by `lr` times its own root mean square (at least `min_parameter_rms`, the paper's epsilon_2); its
    update's root mean square is clipped to 1. Weight decay is decoupled: lr * weight_decay, as in AdamW.
    State in float32: `step`, and `row` [..., rows] and `column` [..., columns] of a matrix or `square` of a vector
    (that of a half-precision vector: see half.py).
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-2,
        min_parameter_rms: float = 1e-3,
        weight_decay: float = 0.0,
    ) -> None:
        super().__init__(params, {"lr": lr, "min_parameter_rms": min_parameter_rms, "weight_decay": weight_decay})

    def _update(self, parameters: list[Tensor], group: dict[str, Any]) -> None:
        for parameter in parameters:
            self._update_one(parameter, group)

    def _update_one(self, parameter: Tensor, group: dict[str, Any]) -> None:
        gradient: Tensor = parameter.grad.float()  # type: ignore[union-attr]
        if parameter.ndim >= 2:
            gradient = whole(gradient)  # gathered if sharded: rows and columns are averaged over the full matrix
        state = self.state[parameter]
        if not state:
            state.update(_initial_state(gradient))
        kept = factor(self)
        (gradient,) = or_else(self, [gradient], [torch.zeros_like(gradient)])
        state["step"] += kept
        weight = _share_of_new(state["step"]) * kept
        square = gradient.square()
        if parameter.ndim >= 2:
            row = state["row"].lerp_(square.mean(-1) + _EPS, weight)  # [..., rows]
            column = state["column"].lerp_(square.mean(-2) + _EPS, weight)  # [..., columns]
            row_factor = (row / row.mean(-1, keepdim=True)).rsqrt().unsqueeze(-1)
            update = (gradient * row_factor).mul_(column.rsqrt().unsqueeze(-2))
        else:
            update = gradient * state["square"].lerp_(square + _EPS, weight).rsqrt()
        clip = whole(_rms(update)).clamp(min=1)
        scale = whole(_rms(parameter.float())).clamp(min=group["min_parameter_rms"])
        change = update.mul_(group["lr"] * scale / clip)
        (change,) = or_else(self, [change], [torch.zeros_like(change)])  # not finite if the first step is skipped
        parameter.mul_(1 - group["lr"] * group["weight_decay"] * kept)
        parameter.sub_(like(change, parameter))


def _share_of_new(step: Tensor) -> Tensor | float:
    """Returns 1 - beta2, the weight of the new squares in the means; on a GPU as 0-dim fp32, without a host sync."""
    if step.device.type == "cpu":
        return float(max(step.item(), 1.0) ** _BETA2_DECAY)
    return (step.double().clamp(min=1) ** _BETA2_DECAY).float()


def _initial_state(gradient: Tensor) -> dict[str, Tensor]:
    shape, step = gradient.shape, torch.zeros((), dtype=torch.float32, device=gradient.device)
    if gradient.ndim < 2:
        return {"step": step, "square": torch.zeros_like(gradient)}
    column = gradient.new_zeros([*shape[:-2], shape[-1]])
    return {"step": step, "row": gradient.new_zeros(shape[:-1]), "column": column}


def _rms(tensor: Tensor) -> Tensor:
    return torch.linalg.vector_norm(tensor) / tensor.numel() ** 0.5
