"""Models that predict masked tokens from both sides: said in their config, where whoever reads them finds it.

`is_causal: false` is what transformers' own mask functions ask for, `mask_token_id` what stands for a hidden token, as
in the config of LLaDA (arXiv:2502.09992).
"""

import json
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from lmtrain.errors import UserError


def mask_token(model: PreTrainedModel) -> int | None:
    """The id that a model which predicts masked tokens knows hidden ones by; None for all other models."""
    config = model.config
    return getattr(config, "mask_token_id", None) if getattr(config, "is_causal", True) is False else None


def set_mask_token(model: PreTrainedModel, token: int | None) -> None:
    """Makes it a model that predicts masked tokens, or with None one that predicts the next token."""
    if token is not None or mask_token(model) is not None:
        config: Any = model.config
        config.is_causal, config.mask_token_id = token is None, token


def refuse_denoising(model: PreTrainedModel, doing: str) -> None:
    """Raises UserError for a model that predicts masked tokens where the next one is asked for."""
    if mask_token(model) is not None:
        raise UserError(
            f"this model predicts masked tokens from both sides, and {doing} asks for the next token: its score is "
            f"val/loss of its training, and python -m lmtrain.generate writes its texts"
        )


def mark_folder(folder: Path) -> None:
    """Names the architecture in config.json by what it is: programs that write from left to right don't know it."""
    path = folder / "config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    names = [name.removesuffix("ForCausalLM").removesuffix("LMHeadModel") for name in config["architectures"]]
    config["architectures"] = [f"{name}ForDenoising" for name in names]
    path.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def is_denoising(folder: Path) -> bool:
    """Whether a model folder holds a model that predicts masked tokens."""
    path = folder / "config.json"
    config = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    return config.get("is_causal") is False and config.get("mask_token_id") is not None
