"""Says early which loss a run with a budget of time will end at, so that one need not wait for too little."""

from typing import Any

import lightning.pytorch as pl
from rich.console import Console

from lmtrain.callbacks.metrics import Metrics
from lmtrain.config.options import WarmupStableDecayConfig
from lmtrain.models import dial
from lmtrain.objectives.base import Objective
from lmtrain.optim.schedules import lr_factor

SCORE = "val/bits_per_byte"
_VALIDATIONS = 3  # the first of the run, at the full rate; with ten of them they take three tenths of it
_FULL = 0.9  # of the peak: the clock may have made the run shorter since its validations were spread


class Forecast(pl.Callback):
    """For model=dial, whose curves models/dial.py was fitted to."""

    def __init__(
        self, metrics: Metrics, schedule: WarmupStableDecayConfig, minutes: float, at_most: float, console: Console
    ) -> None:
        """
        Args:
            minutes: of the budget.
            at_most: steps of a run that the law holds for: dial.PASSES over the text.
        """
        self.metrics, self.schedule, self.minutes, self.console = metrics, schedule, minutes, console
        self.at_most = at_most
        self.scores: list[tuple[int, float]] = []  # (step, bits per byte)
        self.made: dict[str, float] | None = None  # of summary.json

    def state_dict(self) -> dict[str, Any]:
        return {"minutes": self.minutes, "scores": [list(score) for score in self.scores], "made": self.made}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.scores = [(step, bits) for step, bits in state_dict["scores"]]
        if state_dict["minutes"] == self.minutes:  # a larger budget is another run's length
            self.made = state_dict["made"]

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        assert isinstance(pl_module, Objective)
        step, bits, steps = trainer.global_step, self.metrics.last_val.get(SCORE), pl_module.total_steps
        if bits is None or step == 0 or len(self.scores) >= _VALIDATIONS:
            return
        if lr_factor(self.schedule, step, steps) < _FULL:  # in the warmup, or where the rate falls already
            return
        self.scores.append((step, bits))
        if len(self.scores) == _VALIDATIONS and steps <= self.at_most:
            self._say(step, steps)

    def _say(self, step: int, steps: int) -> None:
        bits = dial.forecast(self.scores, steps)
        low, high = bits * (1 - dial.SPREAD), bits * (1 + dial.SPREAD)
        self.made = {SCORE: bits, "low": low, "high": high, "step": step}
        said = f"by these validations {SCORE} will be about {bits:.3f} at the end ({low:.2f} to {high:.2f})"
        self.console.print(said, highlight=False)
