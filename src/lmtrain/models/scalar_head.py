"""Models that output one number for a row of tokens, read at its last token that is not padding.

They are transformers' `...ForSequenceClassification` with one label, whose head is called `score` in causal families.
Readers of an export (transformers, TRL) find that token by the config's `pad_token_id`: if a row ends with a token of
that id, they read the token before it, and lmtrain does the same.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, PretrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES

from lmtrain.errors import UserError
from lmtrain.models import rotary

HEAD = "score"
KIND = "ForSequenceClassification"  # suffix of the class names


def has_scalar_head(model: nn.Module) -> bool:
    return isinstance(getattr(model, HEAD, None), nn.Module)


def auto_class(scalar_head: bool) -> Any:
    """Returns transformers' auto class for models with a scalar head, or the one for next-token prediction."""
    return AutoModelForSequenceClassification if scalar_head else AutoModelForCausalLM


def says_scalar_head(config: PretrainedConfig) -> bool:
    """Returns whether the config describes a sequence classification model, with one label or several."""
    return any(str(name).endswith(KIND) for name in config.architectures or ())


def give_scalar_head(config: PretrainedConfig, name: str) -> None:
    """Sets the config to one label.

    Raises:
        UserError: transformers has no scalar head for the family, or the model has a head with several labels.
    """
    if config.model_type not in MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES:
        found = f"{name}: transformers has no {config.model_type} with a scalar head ({KIND})"
        raise UserError(f"{found}: choose another family for objective=reward")
    if says_scalar_head(config) and config.num_labels != 1:
        found = f"{name} tells {config.num_labels} classes apart, and a reward is one number"
        raise UserError(f"{found}: start from a model without a head, or with num_labels=1")
    config.num_labels = 1


def set_padding(model: PreTrainedModel, tokenizer: Any) -> None:
    """Sets the config's `pad_token_id` to the tokenizer's padding token, or to the end of text if it has none."""
    pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id
    model.config.get_text_config().pad_token_id = pad


def padding_of(model: PreTrainedModel) -> int | None:
    return getattr(model.config.get_text_config(), "pad_token_id", None)


def last_real(input_ids: Tensor, ends: Tensor, pad: int | None) -> Tensor:
    """Returns the positions where rows are read, int64 [N]: the last token of each that is not padding.

    Args:
        input_ids: [B, T] int64; every row has a token that is not padding.
        ends: [N] int64, positions (in the flattened B * T) of the last token of each row.
        pad: the id of padding; None: no token is padding.
    """
    flat = input_ids.flatten()
    at = torch.arange(len(flat), device=flat.device)
    real = at if pad is None else torch.where(flat != pad, at, 0).cummax(0).values
    return real.index_select(0, ends)


@torch.no_grad()
def scores_of(model: PreTrainedModel, rows: Sequence[Sequence[int]]) -> Tensor:
    """Returns the model's scores of whole rows of ids, fp32 [rows] on the CPU, using transformers' own forward."""
    if len(rows) > 1 and rotary.limit(model) is not None:  # a row's rotary embedding would depend on the longest
        return torch.cat([scores_of(model, [row]) for row in rows])
    longest, pad = max(map(len, rows)), padding_of(model) or 0
    ids = torch.tensor([[*row, *[pad] * (longest - len(row))] for row in rows], dtype=torch.int64, device=model.device)
    masks = [[1] * len(row) + [0] * (longest - len(row)) for row in rows]
    mask = torch.tensor(masks, dtype=torch.int64, device=model.device)
    return model(input_ids=ids, attention_mask=mask, use_cache=False).logits[:, 0].float().cpu()


def refuse_scalar_head(model: nn.Module, doing: str) -> None:
    """Raises UserError if the model has a scalar head, for a caller (`doing`) that needs next-token prediction."""
    if has_scalar_head(model):
        found = f"this model gives a reward, one number for a conversation, and {doing} asks for the next token"
        raise UserError(f"{found}: lmtrain.evaluate scores it on pairs, and reward=model learns from it")
