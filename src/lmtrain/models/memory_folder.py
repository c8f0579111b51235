"""Hugging Face folders of models with a memory: told apart; the base's config, read without their code."""

import json
from pathlib import Path
from typing import Any

from transformers import CONFIG_MAPPING, PretrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from lmtrain.errors import UserError

PREFIX = "memory_"  # before the base's model_type
ADDED = ("model_type", "architectures", "auto_map", "memory")  # what config.json has beside, or unlike, the base's


def is_exported(folder: Path) -> bool:
    """Whether a folder is the export of a model with a memory."""
    try:
        config = json.loads((folder.expanduser() / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(config, dict) and str(config.get("model_type")).startswith(PREFIX) and "memory" in config


def written_config(folder: Path) -> tuple[str, dict[str, Any]]:
    """(model_type of the base, all that config.json holds).

    Raises:
        UserError: the base is none of transformers' causal language models.
    """
    written = json.loads((folder.expanduser() / "config.json").read_text(encoding="utf-8"))
    base = str(written["model_type"]).removeprefix(PREFIX)
    if base not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        raise UserError(f"{folder}: a memory of {base}, which is no causal language model of transformers here")
    return base, written


def base_config(folder: Path) -> PretrainedConfig:
    """The config of the base; with it, from_pretrained reads the base's weights and leaves the memory's.

    Raises:
        UserError: as `written_config`.
    """
    base, written = written_config(folder)
    return CONFIG_MAPPING[base].from_dict({name: value for name, value in written.items() if name not in ADDED})
