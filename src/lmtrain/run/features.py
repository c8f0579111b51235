"""The features of a run: all that cut across rooms, each asked for what it says of itself (models/feature.py)."""

from lmtrain.adapters.memory_adapter import Memory
from lmtrain.config.schema import Config
from lmtrain.models.feature import Feature
from lmtrain.models.fp8 import Fp8

FEATURES: list[Feature] = [Memory(), Fp8()]


def features_on(config: Config) -> list[Feature]:
    return [feature for feature in FEATURES if feature.is_on(config)]
