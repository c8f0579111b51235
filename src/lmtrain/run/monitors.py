"""Checks the metrics that decide on checkpoints and the end of a run: they exist, and the better value is the best."""

import re

from lmtrain.callbacks.samples import Samples
from lmtrain.config.schema import CheckpointConfig, Config, EarlyStoppingConfig
from lmtrain.errors import UserError
from lmtrain.objectives.base import Objective
from lmtrain.run.data import RunData


def check_monitors(config: Config, data: RunData, objective: Objective, samples: Samples | None) -> None:
    """Checks the metrics of checkpoint.monitor and of early stopping.

    Raises:
        UserError: a metric is not reported by every validation, or its worst value would count as the best.
    """
    stopping = config.callbacks.early_stopping
    if stopping.enabled and not data.validated:
        how = data.corpus.how_to_validate(config.data)
        raise UserError(f"callbacks.early_stopping.enabled=true needs a validation split: {how}")
    scores = samples.text_metrics.names() if samples is not None else []
    known = []
    for name, val_set in data.validated.items():
        prefix = f"val/{name}/" if name else "val/"
        known += [f"{prefix}{number}" for number in _reported(objective, val_set.bytes_per_token)]
        known += [f"{prefix}{score}" for score in scores if not name]
    watching: dict[str, CheckpointConfig | EarlyStoppingConfig] = {"checkpoint": config.checkpoint}
    if stopping.enabled:
        watching["callbacks.early_stopping"] = stopping
    every = config.callbacks.samples.every_n_validations
    for section, cfg in watching.items():
        key, name = f"{section}.monitor", cfg.monitor
        if every > 1 and name in [f"val/{score}" for score in scores]:
            raise UserError(f"{key}={name} is needed at every validation: set callbacks.samples.every_n_validations=1")
        if known and name not in known and not config.callbacks.extra:  # extra callbacks may log others
            raise UserError(f"{key}={name}: this run's validations report {', '.join(known)}")
        _check_direction(section, name, cfg.mode)


_MORE_IS_BETTER = re.compile(
    r"val/([^/]+/)?(reward|reward/.+|rewards/accuracy|rewards/margin|exact_match|bleu|rouge[12]?|bertscore)"
)
_LESS_IS_BETTER = re.compile(r"val/([^/]+/)?(loss|perplexity|bits_per_byte)")


def _check_direction(section: str, name: str, mode: str) -> None:
    """Raises UserError if the worst value of a metric would count as the best."""
    wrong = _MORE_IS_BETTER.fullmatch(name) if mode == "min" else _LESS_IS_BETTER.fullmatch(name)
    if wrong is not None and (mode == "min" or section == "checkpoint"):  # to stop where the loss rises is of use
        right = "max" if mode == "min" else "min"
        found = f"{section}.monitor={name} with {section}.mode={mode} takes the worst value for the best"
        raise UserError(f"{found}: set {section}.mode={right}")


def _reported(objective: Objective, bytes_per_token: float | None) -> list[str]:
    """Returns the names of the metrics that the validation of one set reports."""
    names = objective.validation_names()
    if not objective.loss_is_nll:
        return names
    return [*names, "perplexity", *(["bits_per_byte"] if bytes_per_token else [])]
