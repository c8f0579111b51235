"""Models that predict masked tokens from context on both sides, as recorded in their config.

`is_causal: false` is the field that transformers' own mask functions read; `mask_token_id` is the id that replaces a
masked token, as in the config of LLaDA (arXiv:2502.09992).
"""

from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from lmtrain.errors import UserError
from lmtrain.models.folder import change_config, read_config


def mask_token(model: PreTrainedModel) -> int | None:
    """Returns the mask token's id of a model that predicts masked tokens, or None for any other model."""
    config = model.config
    return getattr(config, "mask_token_id", None) if getattr(config, "is_causal", True) is False else None


def set_mask_token(model: PreTrainedModel, token: int | None) -> None:
    """Marks the model in its config as predicting masked tokens, or with `token` None as predicting the next token."""
    if token is not None or mask_token(model) is not None:
        config: Any = model.config
        config.is_causal, config.mask_token_id = token is None, token


def refuse_denoising(model: PreTrainedModel, doing: str) -> None:
    """Raises UserError if the model predicts masked tokens, for a caller (`doing`) that needs next-token prediction."""
    if mask_token(model) is not None:
        found = f"this model predicts masked tokens from both sides, and {doing} asks for the next token"
        raise UserError(f"{found}: its score is val/loss of its training, and lmtrain.generate writes its texts")


def mark_folder(folder: Path) -> None:
    """Renames the architectures in config.json to `...ForDenoising`, so that left-to-right generators reject them."""
    names = [name.removesuffix("ForCausalLM") for name in read_config(folder)["architectures"]]
    change_config(folder, architectures=[f"{name.removesuffix('LMHeadModel')}ForDenoising" for name in names])
