"""Models that give one number for a row of tokens, read at its last token that is no padding.

They are transformers' `...ForSequenceClassification` with one label, whose head is called `score` in the families that
attend from left to right. Whoever reads an export (transformers, TRL) finds the token by the config's `pad_token_id`:
where that is also the token a row ends with, the one before it is read, and so it is here.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, PretrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES

from lmtrain.errors import UserError

HEAD = "score"
KIND = "ForSequenceClassification"  # how the names of such classes end


def has_scalar_head(model: nn.Module) -> bool:
    return isinstance(getattr(model, HEAD, None), nn.Module)


def auto_class(scalar_head: bool) -> Any:
    """The class of transformers that builds and loads such models, or else those that predict the next token."""
    return AutoModelForSequenceClassification if scalar_head else AutoModelForCausalLM


def says_scalar_head(config: PretrainedConfig) -> bool:
    """Whether config.json describes a model that classifies rows or gives them a number."""
    return any(str(name).endswith(KIND) for name in config.architectures or ())


def give_scalar_head(config: PretrainedConfig, name: str) -> None:
    """Makes it the config of a model with one label.

    Raises:
        UserError: the family has none, or the model has a head of several labels.
    """
    if config.model_type not in MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES:
        raise UserError(
            f"{name}: transformers has no {config.model_type} with a scalar head ({KIND}): choose another family for "
            f"objective=reward"
        )
    if says_scalar_head(config) and config.num_labels != 1:
        raise UserError(
            f"{name} tells {config.num_labels} classes apart, and a reward is one number: start from a model without "
            f"a head, or with num_labels=1"
        )
    config.num_labels = 1


def set_padding(model: PreTrainedModel, tokenizer: Any) -> None:
    """Says in the config by which token readers of the model tell padding; the end of text, where there is none."""
    pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id
    model.config.get_text_config().pad_token_id = pad


def padding_of(model: PreTrainedModel) -> int | None:
    return getattr(model.config.get_text_config(), "pad_token_id", None)


def last_real(input_ids: Tensor, ends: Tensor, pad: int | None) -> Tensor:
    """Where rows are read: the last token of each up to its end that is no padding, int64 [N].

    Args:
        input_ids: [B, T] int64; every row has such a token.
        ends: [N] int64, positions (of the flattened B * T) of the last token of each row.
        pad: the id of padding.
    """
    flat = input_ids.flatten()
    at = torch.arange(len(flat), device=flat.device)
    real = at if pad is None else torch.where(flat != pad, at, 0).cummax(0).values
    return real.index_select(0, ends)


@torch.no_grad()
def scores_of(model: PreTrainedModel, rows: Sequence[Sequence[int]]) -> Tensor:
    """What a model says of whole rows of ids, fp32 [rows] on the CPU, by its own forward."""
    longest, pad = max(map(len, rows)), padding_of(model) or 0
    ids = torch.tensor([[*row, *[pad] * (longest - len(row))] for row in rows], device=model.device)
    mask = torch.tensor([[1] * len(row) + [0] * (longest - len(row)) for row in rows], device=model.device)
    return model(input_ids=ids, attention_mask=mask, use_cache=False).logits[:, 0].float().cpu()


def refuse_scalar_head(model: nn.Module, doing: str) -> None:
    """Raises UserError for a model that gives a number where the next token is asked for."""
    if has_scalar_head(model):
        raise UserError(
            f"this model gives a reward, one number for a conversation, and {doing} asks for the next token: "
            f"python -m lmtrain.evaluate scores it on pairs (data=preference_jsonl), and objective=grpo learns from it "
            f"with reward=model"
        )
