"""The interface of training features that are not objectives, optimizers or callbacks, such as 8-bit products.

The run calls every feature listed in `run/features.py` and names none itself: a new one is a class and an entry there.
"""

from collections.abc import Mapping
from typing import Any

from transformers import PreTrainedModel

from lmtrain.config.schema import Config

# Name parts of the parameters that LoRA, trained token rows and memories add to a model.
ADDED = ("lora_", "trainable_tokens_delta", ".memory.", ".memory_bank.")


class Feature:
    """Base class of features. The other methods are called only if `is_on` returns True."""

    def is_on(self, config: Config) -> bool:
        raise NotImplementedError

    def check_machine(self, config: Config) -> None:
        """Raises UserError if this machine doesn't support the feature; called before data are prepared."""

    def change_model(self, model: PreTrainedModel, config: Config) -> None:
        """Changes the model, which has its adapters already, in place, before it is compiled or sharded."""

    def restore_model(self, model: PreTrainedModel) -> None:
        """Undoes `change_model`, before the model is exported."""

    def callbacks(self, parts: Any) -> list[Any]:
        """Returns the callbacks of the feature, each with its place (`callbacks.parts` has both, and says `parts`)."""
        return []

    def plan_rows(self, model: PreTrainedModel, config: Config) -> list[tuple[str, str]]:
        """Returns rows (title, description) for the plan."""
        return []

    def advice(self, run: Any) -> list[str]:
        """Returns notes for the plan of a `run.build.Run`."""
        return []

    def content(self, model: PreTrainedModel, config: Config) -> Any:
        """Returns what a checkpoint must match besides config keys, as JSON-serializable data; None if keys suffice."""
        return None

    def speed(self, config: Config) -> Mapping[str, str]:
        """Returns the settings that tokens/s depends on (summary.json, speed_of)."""
        return {}

    def summary(self, model: PreTrainedModel, config: Config) -> Mapping[str, Any]:
        """Returns entries for summary.json."""
        return {}
