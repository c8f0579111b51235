"""The registry of a run's features, which cut across packages; their interface is in models/feature.py."""

from typing import Any

from transformers import PreTrainedModel

from lmtrain.adapters.memory_adapter import Memory
from lmtrain.callbacks.average import Averaging
from lmtrain.callbacks.early_stopping import StoppingEarly
from lmtrain.callbacks.rollouts import ReportingRollouts
from lmtrain.callbacks.step_numbers import Growing
from lmtrain.callbacks.stream import Streaming
from lmtrain.callbacks.time_budget import Budgeted
from lmtrain.config.fingerprint import FEATURE
from lmtrain.config.schema import Config
from lmtrain.models.feature import Feature
from lmtrain.models.fp8 import Fp8
from lmtrain.strategies.choose import Rounding

FEATURES: list[Feature] = [
    Memory(), Fp8(), Rounding(), ReportingRollouts(), Averaging(), StoppingEarly(), Streaming(), Budgeted(), Growing(),
]  # fmt: skip


def features_on(config: Config) -> list[Feature]:
    return [feature for feature in FEATURES if feature.is_on(config)]


def contents_of_features(model: PreTrainedModel, config: Config) -> dict[str, Any]:
    """Returns what a checkpoint must agree in for the active features, by class name; those without it are omitted."""
    found = {f"{FEATURE}{type(f).__name__.lower()}": f.content(model, config) for f in features_on(config)}
    return {name: content for name, content in found.items() if content is not None}
