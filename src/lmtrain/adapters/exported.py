"""What an exported folder holds, by its config.json and adapter_config.json; loads no model."""

import json
from pathlib import Path
from typing import Any


def gives_rewards(export: Path) -> bool:
    """Returns whether an exported folder holds a model with a scalar head, or an adapter for one."""
    adapter = export / "adapter_config.json"
    if adapter.exists():
        return json.loads(adapter.read_text(encoding="utf-8")).get("task_type") == "SEQ_CLS"
    return any(str(name).endswith("ForSequenceClassification") for name in _config(export).get("architectures") or [])


def predicts_masked_tokens(export: Path) -> bool:
    """Returns whether an exported folder holds a model of masked tokens, which predicts no next token."""
    config = _config(export)
    return config.get("is_causal") is False and config.get("mask_token_id") is not None


def brings_code(export: Path) -> bool:
    """Returns whether an exported folder contains its own modeling code, which transformers runs only if trusted."""
    return "auto_map" in _config(export)


def loading_class(export: Path) -> tuple[str, str]:
    """Returns the names of the package and the class that load an exported folder."""
    kind, adapter = "SequenceClassification" if gives_rewards(export) else "CausalLM", export / "adapter_config.json"
    if adapter.exists():
        names_class = json.loads(adapter.read_text(encoding="utf-8")).get("auto_mapping")  # that of a wrapper
        return "peft", "AutoPeftModel" if names_class else f"AutoPeftModelFor{kind}"
    whole = any(name.endswith("ForConditionalGeneration") for name in _config(export).get("architectures") or [])
    return "transformers", "AutoModelForImageTextToText" if whole else f"AutoModelFor{kind}"


def _config(export: Path) -> dict[str, Any]:
    path = export / "config.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
