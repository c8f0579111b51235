"""Effects of typed overrides: unread keys are refused.

An unread key that is set to its default value is accepted, since it states what happens anyway. Imports no torch.
"""

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from omegaconf import DictConfig, OmegaConf

from lmtrain.config.constraints import PREPARED, TRAINING, ReadBy
from lmtrain.config.keys import annotations_of, unread
from lmtrain.config.override_text import typed_keys
from lmtrain.config.schema import Config
from lmtrain.config.trust import CODE
from lmtrain.errors import UserError

# Environment variable set in the trials of a sweep ("1") and the stages of a pipeline ("stage"). They accept keys
# without effect, since a key may have an effect in other trials or stages, and don't repeat output they share.
TRIAL = "LMTRAIN_TRIAL"

_ABSENT = object()
# Commands that share one set of keys; generate and export take all but a few keys from the run's own config.
_OF_RUNS = ("train", "prepare", "inspect", "tune", "verify", "estimate")
_OF_EXPORTS = ("generate", "export")


def without_effect(verb: str, overrides: Sequence[str], config: Config, default: Callable[[str], Any]) -> list[str]:
    """Returns a message for each typed key that nothing reads and that differs from its default, in typed order.

    Args:
        default: returns the value that a key has if it is not typed.
    """
    messages = []
    for key in typed_keys(overrides):
        waits = unread(key, config)
        why = _of_another_verb(verb, key, config) or (waits and f"here: {waits.instead}")
        if why is not None and _value(config, key) != default(key):
            messages.append(f"{key} has no effect {why}")
    return messages


def refuse(verb: str, overrides: Sequence[str], config: Config, default: Callable[[str], Any]) -> None:
    """Raises UserError for the first key reported by `without_effect`, except in sweep trials and pipeline stages."""
    if os.environ.get(TRIAL):
        return
    for message in without_effect(verb, overrides, config, default):
        raise UserError(message)


def _of_another_verb(verb: str, key: str, config: Config) -> str | None:
    annotations = annotations_of(key, config)
    if verb == "evaluate" and "." in key and TRAINING in annotations:
        return "in `lmtrain evaluate`, which trains nothing (evaluate.limit=100 takes fewer rows)"
    if verb == "evaluate" and key.startswith("data.") and PREPARED in annotations and not names_data(config):
        instead = "name the data too (data=text data.val_path=test.txt), or set evaluate.data=named"
        return f"in `lmtrain evaluate` on what the run held out, with the run's own settings: {instead}"
    if verb in _OF_EXPORTS:
        own = ("run_dir", verb, "seed", *CODE)
        if any(key == name or key.startswith(f"{name}.") for name in own):
            return None
        reads = ", ".join(f"{name}.*" if name == verb else name for name in own)
        return f"in `lmtrain {verb}`, which takes all other settings from the run itself (it reads {reads})"
    readers = next((mark.verbs for mark in annotations if isinstance(mark, ReadBy)), None)
    if verb not in _OF_RUNS or readers is None or verb in readers:
        return None
    here = "; the folder of this run is run.dir" if key == "run_dir" else ""
    by = " and ".join(f"lmtrain {v}" for v in readers) + (" reads" if len(readers) == 1 else " read")
    return f"in `lmtrain {verb}`: {by} it{here}"


def names_data(config: Config) -> bool:
    """Returns whether `lmtrain evaluate` gets its data from the command; otherwise it is the run's validation split."""
    data, choice = config.data, config.evaluate.data
    if choice != "auto":
        return choice == "named"
    return bool(data.val_path or data.path) or data.source != "python_stdlib" or data.rows != "text"


def _value(config: Any, key: str) -> Any:
    for name in key.split("."):
        config = config.get(name, _ABSENT) if isinstance(config, Mapping) else getattr(config, name, _ABSENT)
    return config


def default_in(tree: DictConfig) -> Callable[[str], Any]:
    """Returns a function that looks up a dotted key in a composed config, for `default` of `without_effect`."""
    return lambda key: OmegaConf.select(tree, key, default=_ABSENT)
