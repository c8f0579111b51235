"""What a part of training says about itself that is not an objective, optimizer or callback, such as 8-bit products.

The run asks every feature of `run/features.py` in turn and knows none by name: a new one is a class, and a line there.
"""

from collections.abc import Mapping
from typing import Any

from transformers import PreTrainedModel

from lmtrain.config.schema import Config

# In the names of the parameters that are put into a model beside its own.
ADDED = ("lora_", "trainable_tokens_delta", ".memory.", ".memory_bank.")


class Feature:
    """Base class. A feature that is off changes nothing and says nothing: `is_on` is asked before everything else."""

    def is_on(self, config: Config) -> bool:
        raise NotImplementedError

    def check_machine(self, config: Config) -> None:
        """Raises UserError where this machine can't do it; called before data are prepared."""

    def change_model(self, model: PreTrainedModel, config: Config) -> None:
        """Changes the model in place, with its adapters on it, before it is compiled or shared out."""

    def restore_model(self, model: PreTrainedModel) -> None:
        """Takes the change back, before the model is exported."""

    def plan_rows(self, model: PreTrainedModel, config: Config) -> list[tuple[str, str]]:
        """(what, in words) for the plan."""
        return []

    def notes(self, config: Config) -> list[str]:
        """What the plan should advise on a GPU."""
        return []

    def content(self, model: PreTrainedModel, config: Config) -> Any:
        """What a checkpoint has to agree in beside the keys, as JSON can hold it; None where keys tell it all."""
        return None

    def speed(self, config: Config) -> Mapping[str, str]:
        """What tokens/s depends on (summary.json, speed_of)."""
        return {}

    def summary(self, model: PreTrainedModel, config: Config) -> Mapping[str, Any]:
        """Entries of summary.json."""
        return {}
