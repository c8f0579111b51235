"""Builds a transformers model from the config section `model`: from scratch by family and shape, or pretrained."""

import contextlib
import logging
from collections.abc import Sequence
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from transformers import PretrainedConfig, PreTrainedModel

from lmtrain.config.options import CustomModelConfig, LoadedModelConfig
from lmtrain.config.schema import ModelConfig
from lmtrain.config.sections import model_class
from lmtrain.config.targets import building
from lmtrain.errors import UserError
from lmtrain.models import folder
from lmtrain.models.architecture import MAX_POSITIONS, architecture
from lmtrain.models.documents import CHOICES
from lmtrain.models.loading import load_pretrained
from lmtrain.models.probe import last_line, set_attention
from lmtrain.models.residual import add_dropout, init_residual_projections
from lmtrain.models.routers import use_experts
from lmtrain.models.scalar_head import give_scalar_head
from lmtrain.models.wrapper import is_wrapper, outermost, text_config, text_of

log = logging.getLogger(__name__)


def build_model(
    cfg: ModelConfig,
    vocab_size: int,
    eos_token_id: int | None,
    seq_len: int,
    *,
    new_tokens: Sequence[int] = (),
    allow_target: Sequence[str] = (),
    scalar_head: bool = False,
    in_files: bool = False,
    **loading: Any,
) -> PreTrainedModel:
    """Builds or loads the model of `cfg`, in training mode with fp32 parameters, using lmtrain's attention.

    Under `torch.device("meta")` nothing is allocated and no weights are read. Weights from scratch are drawn from the
    global random generator, which the caller seeds.

    Args:
        vocab_size: of the tokenizer.
        eos_token_id: the token that ends documents, and begins them, as in GPT-2.
        seq_len: tokens per training row.
        new_tokens: ids of tokens added to a pretrained model's tokenizer; rows that its embeddings lack are added.
        allow_target: run.allow_target, the packages whose classes `model._target_` may name.
        scalar_head: the model outputs one number per row instead of the next token; the head is new if the files have
            none.
        in_files: pretrained weights may stay in files from which ranks can read their rows (models/weight_files.py).
        loading: more arguments of `from_pretrained`, such as a quantisation.

    Raises:
        UserError: the family doesn't know a key, shapes don't fit together, the model can't hold the vocabulary or
            seq_len, or a name is unknown or unreachable.
    """
    if cfg.attention not in CHOICES:
        raise UserError(f"model.attention={cfg.attention} is not one of {', '.join(CHOICES)}")
    # The architecture, and whether it fits the tokenizer and the rows.
    config = folder.checked(architecture(cfg, vocab_size, eos_token_id, allow_target), "model")
    text = text_config(config)
    _check_vocabulary(cfg, config, vocab_size, new_tokens)
    _check_positions(cfg, config, seq_len)
    _settle_config(config)

    # The weights.
    if scalar_head:
        give_scalar_head(text, str(getattr(cfg, "name_or_path", None) or f"model={cfg.name}"))
    if isinstance(cfg, CustomModelConfig):
        if scalar_head:
            raise UserError("model._target_: objective=reward needs a model of transformers with a scalar head")
        model = _custom_model(cfg, config, allow_target)
    elif isinstance(cfg, LoadedModelConfig):
        model = _pretrained(cfg, config, vocab_size, scalar_head, in_files, loading)
    else:
        model = _instantiate(cfg, config, scalar_head)
        init_residual_projections(model)

    # What lmtrain changes about every model.
    _let_padding_learn(model)
    add_dropout(model, cfg.dropout)
    set_attention(cfg.attention, model, seq_len)
    use_experts(model)
    return model.train()


def _custom_model(cfg: CustomModelConfig, config: PretrainedConfig, allow_target: Sequence[str]) -> PreTrainedModel:
    """Builds the model in fp32, with the initial weights of its class.

    The class is registered so that saving the model writes the source of its module beside the weights.

    Raises:
        UserError: the class raises an error, or the model has no body, embeddings or output layer.
    """
    cls = model_class(cfg._target_, allow_target)
    if not cls.__module__.startswith("transformers."):
        type(config).register_for_auto_class()
        cls.register_for_auto_class("AutoModelForCausalLM")
    with building("model", cfg._target_):
        model = cls._from_config(config, dtype=torch.float32)
    with contextlib.suppress(NotImplementedError):  # raised if transformers finds no embeddings under the usual names
        if model.base_model is not model and model.get_input_embeddings() and model.get_output_embeddings():
            return model
    body = "a body (base_model_prefix) with embed_tokens or get_input_embeddings"
    raise UserError(f"model: {cfg._target_} needs {body}, and lm_head or get_output_embeddings")


def _pretrained(
    cfg: LoadedModelConfig,
    config: PretrainedConfig,
    vocab_size: int,
    scalar_head: bool,
    in_files: bool,
    loading: dict[str, Any],
) -> PreTrainedModel:
    """Loads the model, or only its shapes on the meta device, with a row of the embeddings for each token."""
    if torch.get_default_device().type == "meta":
        model = _instantiate(cfg, config, scalar_head)
    else:
        grows = vocab_size > config.get_text_config().vocab_size  # the mean of existing rows is needed then
        model = load_pretrained(cfg, config, scalar_head, in_files and not grows, loading)
    _grow_vocabulary(model, vocab_size)
    return model


def _instantiate(cfg: ModelConfig, config: PretrainedConfig, scalar_head: bool) -> PreTrainedModel:
    cls = outermost(config, scalar_head)
    try:
        model = cls.from_config(config, dtype=torch.float32, trust_remote_code=cfg.trust_remote_code)
        return text_of(model, scalar_head)
    except ValueError as error:
        raise UserError(f"transformers can't build this {config.model_type}: {last_line(error)}") from error


def _grow_vocabulary(model: PreTrainedModel, vocab_size: int) -> None:
    """Adds embedding rows for added tokens, drawn around the mean of the existing rows (Hewitt 2021)."""
    rows = model.get_input_embeddings().weight.shape[0]
    if vocab_size > rows:
        log.warning("the embeddings grow from %d to %d rows, for added tokens", rows, vocab_size)
        on_meta = model.device.type == "meta"
        model.resize_token_embeddings(vocab_size, mean_resizing=not on_meta)  # the mean needs the rows' values


def _settle_config(config: PretrainedConfig) -> None:
    """Removes the padding id, which training doesn't use; a wrapper's forward, with which exports are checked, does.

    With one, transformers' GPT-2 searches every batch for it, which synchronizes with the GPU. RWKV is kept from
    halving weights in place for a validation: a checkpoint would hold them so.
    """
    if getattr(config, "rescale_every", 0):
        config.rescale_every = 0
    if not is_wrapper(config):
        with contextlib.suppress(StrictDataclassError):  # ModernBERT requires a number
            config.pad_token_id = None


def _let_padding_learn(model: PreTrainedModel) -> None:
    """Clears the embeddings' padding_idx, as a row that is both padding and end of text would get no gradient."""
    embeddings: Any = model.get_input_embeddings()
    if getattr(embeddings, "padding_idx", None) is not None:
        embeddings.padding_idx = None


def _check_vocabulary(cfg: ModelConfig, config: PretrainedConfig, vocab_size: int, new_tokens: Sequence[int]) -> None:
    rows = config.get_text_config().vocab_size
    if vocab_size <= rows or (cfg.init == "pretrained" and set(range(rows, vocab_size)) <= set(new_tokens)):
        return
    if isinstance(cfg, LoadedModelConfig):
        found = f"the tokenizer has {vocab_size} tokens, {cfg.name_or_path} has embeddings for {rows}"
        raise UserError(f"{found}: use its own, tokenizer=hub tokenizer.name_or_path={cfg.name_or_path}")
    raise UserError(f"model.vocab_size={rows} is less than the tokenizer's {vocab_size} tokens: make it null")


def _check_positions(cfg: ModelConfig, config: PretrainedConfig, seq_len: int) -> None:
    positions = getattr(config.get_text_config(), MAX_POSITIONS, None)
    if positions is None or not 0 <= positions < seq_len:  # XLNet's -1 stands for no limit
        return
    remedy = f"model.{MAX_POSITIONS}={positions}: lower the first or raise the second"
    if isinstance(cfg, LoadedModelConfig):
        remedy = f"the {positions} positions of {cfg.name_or_path}: set data.seq_len={positions} or less"
    raise UserError(f"data.seq_len={seq_len} exceeds {remedy}")
