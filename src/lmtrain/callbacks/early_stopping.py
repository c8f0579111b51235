"""Stopping early: when a validation score has not improved for long, or has reached a value."""

from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import numpy as np
from lightning.pytorch.callbacks import EarlyStopping as LightningEarlyStopping
from transformers import PreTrainedModel

from lmtrain.callbacks.parts import Parts, Phase, Placed
from lmtrain.config.schema import Config, EarlyStoppingConfig
from lmtrain.models.feature import Feature


class EarlyStopping(LightningEarlyStopping):
    """Lightning's EarlyStopping, but it ignores the validation before the first step and restarts on other rows.

    A resumed run has the patience of its config, which may have changed, not that of its checkpoint.
    """

    def __init__(self, *args: Any, scored_on: str | None = None, **kwargs: Any) -> None:
        """
        Args:
            scored_on: names the rows that the monitored score is measured on, see `val_sets.scored_on`.
        """
        super().__init__(*args, **kwargs)
        self.scored_on = scored_on

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "scored_on": self.scored_on}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if state_dict.get("scored_on", self.scored_on) == self.scored_on:
            super().load_state_dict({**state_dict, "patience": self.patience})

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if trainer.global_step > 0:
            super().on_validation_end(trainer, pl_module)


class StoppingEarly(Feature):
    """The callback of callbacks.early_stopping."""

    def is_on(self, config: Config) -> bool:
        return config.callbacks.early_stopping.enabled

    def callbacks(self, parts: Parts) -> list[Placed]:
        return [(Phase.READS_SCORES, early_stopping(parts.config.callbacks.early_stopping, parts.scored_on))]

    def plan_rows(self, model: PreTrainedModel, config: Config) -> list[tuple[str, str]]:
        es = config.callbacks.early_stopping
        by = f" by more than {es.threshold:g}" if es.threshold else ""
        reached = "" if es.stop_at is None else f"when {es.monitor} reaches {es.stop_at:g}, or "
        text = f"{reached}when {es.monitor} ({es.mode}) has not improved{by} for {es.patience} validations"
        return [("early stopping", text)]


def early_stopping(cfg: EarlyStoppingConfig, scored_on: Callable[[str], str | None]) -> EarlyStopping:
    threshold, worse = cfg.stop_at, np.float32(-np.inf if cfg.mode == "max" else np.inf)
    if threshold is not None:  # Lightning's has to be passed and ours only reached; scores are fp32
        threshold = float(np.nextafter(np.float32(threshold), worse))
    return EarlyStopping(
        monitor=cfg.monitor,
        mode=cfg.mode,
        patience=cfg.patience,
        min_delta=cfg.threshold,
        stopping_threshold=threshold,
        check_on_train_epoch_end=False,
        scored_on=scored_on(cfg.monitor),
    )
