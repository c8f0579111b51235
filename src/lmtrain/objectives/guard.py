"""A guard that decides, on the device and without waiting for it, whether a step's update is applied."""

from typing import Any

import torch
from torch import Tensor

_NEVER = -1


class StepGuard:
    """A detector of bad steps, whose updates are skipped: loss or gradient norm are not finite, or the loss is a spike.

    A spike is a loss above `spike_factor` times the median of the last `spike_window` good losses; it is checked for
    once that many have been seen. All state stays on the device; `counts` reads it.
    """

    def __init__(self, spike_factor: float | None, spike_window: int) -> None:
        self.spike_factor = spike_factor
        self.total = torch.zeros((), dtype=torch.int64)
        self.in_a_row = torch.zeros((), dtype=torch.int64)
        self.streak_start = torch.full((), _NEVER, dtype=torch.int64)
        self.recent = torch.full((spike_window,), float("nan"), dtype=torch.float64)

    def to(self, device: torch.device) -> None:
        self.total, self.in_a_row = self.total.to(device), self.in_a_row.to(device)
        self.streak_start, self.recent = self.streak_start.to(device), self.recent.to(device)

    def judge(self, step: int, loss: Tensor | None, grad_norm: Tensor) -> Tensor:
        """Returns whether step `step` (0-based) is bad, bool, 0-dim; `loss` is its mean, needed for spikes only."""
        bad = ~torch.isfinite(grad_norm)
        if loss is not None and self.spike_factor is not None:
            loss = loss.double()
            # The median is NaN until the window is full, and comparisons with NaN are false.
            bad = bad | ~torch.isfinite(loss) | (loss > self.spike_factor * self.recent.median())
            self.recent = torch.where(bad, self.recent, torch.cat([self.recent[1:], loss[None]]))
        self.streak_start = torch.where(bad & (self.in_a_row == 0), step, self.streak_start)
        self.total = self.total + bad
        self.in_a_row = (self.in_a_row + 1) * bad
        return bad

    def counts(self) -> tuple[int, int, int]:
        """Returns (bad steps, current consecutive bad steps, step at which these began); waits for the device."""
        total, in_a_row, start = torch.stack([self.total, self.in_a_row, self.streak_start]).tolist()
        return total, in_a_row, start

    def state_dict(self) -> dict[str, Any]:
        total, in_a_row, start = self.counts()
        return {"total": total, "in_a_row": in_a_row, "streak_start": start, "recent": self.recent.tolist()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.total = torch.tensor(state["total"])
        self.in_a_row = torch.tensor(state["in_a_row"])
        self.streak_start = torch.tensor(state["streak_start"])
        if len(state["recent"]) == len(self.recent):  # else spike_window has changed: start empty
            self.recent = torch.tensor(state["recent"], dtype=torch.float64)
