"""Builds a transformers model from the config section `model`: from scratch by family and shape, or pretrained."""

import contextlib
import dataclasses
import functools
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from torch import nn
from transformers import CONFIG_MAPPING, AutoConfig, PretrainedConfig, PreTrainedModel
from transformers.activations import ACT2FN
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from lmtrain.config.batch import nearest_divisor
from lmtrain.config.checks import check_pretrained_name
from lmtrain.config.options import CustomModelConfig, LoadedModelConfig, ScratchModelConfig
from lmtrain.config.schema import ModelConfig
from lmtrain.config.sections import fields_of, model_class
from lmtrain.config.targets import building
from lmtrain.data import hub
from lmtrain.errors import UserError, did_you_mean
from lmtrain.models import folder, weight_files
from lmtrain.models.documents import CHOICES
from lmtrain.models.folder import base_config, is_exported
from lmtrain.models.nulls import field_name, filled
from lmtrain.models.probe import DROPOUTS, last_line, set_attention
from lmtrain.models.routers import use_experts
from lmtrain.models.scalar_head import give_scalar_head
from lmtrain.models.wrapper import is_wrapper, outermost, text_config, text_of

log = logging.getLogger(__name__)

MAX_POSITIONS = "max_position_embeddings"
# Keys of `model` that are handled separately, and those that go into the transformers config by the family's name.
_GENERAL = {"family", "depth", *(f.name for f in dataclasses.fields(ModelConfig))}
SHAPE_KEYS = (*(f.name for f in dataclasses.fields(ScratchModelConfig) if f.name not in _GENERAL), MAX_POSITIONS)


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
    config = folder.checked(_config(cfg, vocab_size, eos_token_id, allow_target), "model")
    text = text_config(config)
    _check_vocabulary(cfg, config, vocab_size, new_tokens)
    _check_positions(cfg, config, seq_len)
    _settle_config(config)
    if scalar_head:
        give_scalar_head(text, str(getattr(cfg, "name_or_path", None) or f"model={cfg.name}"))
    if isinstance(cfg, CustomModelConfig):
        if scalar_head:
            raise UserError("model._target_: objective=reward needs a model of transformers with a scalar head")
        model = _custom_model(cfg, config, allow_target)
    elif not isinstance(cfg, LoadedModelConfig):
        model = _instantiate(cfg, config, scalar_head)
        init_residual_projections(model)
    else:
        if torch.get_default_device().type == "meta":
            model = _instantiate(cfg, config, scalar_head)
        else:
            grows = vocab_size > config.get_text_config().vocab_size  # the mean of existing rows is needed then
            model = _pretrained(cfg, config, scalar_head, in_files and not grows, loading)
        _grow_vocabulary(model, vocab_size)
    _let_padding_learn(model)
    _add_dropout(model, cfg.dropout)
    set_attention(cfg.attention, model, seq_len)
    use_experts(model)
    return model.train()


def _config(
    cfg: ModelConfig, vocab_size: int, eos_token_id: int | None, allow_target: Sequence[str]
) -> PretrainedConfig:
    if isinstance(cfg, LoadedModelConfig):
        return _pretrained_config(cfg)
    rows = cfg.vocab_size or vocab_size
    given: dict[str, Any] = {
        "vocab_size": -(-rows // cfg.vocab_multiple_of) * cfg.vocab_multiple_of,
        "bos_token_id": eos_token_id,
        "eos_token_id": eos_token_id,
        "use_cache": True,  # for generation with the export; training passes False
    }
    if isinstance(cfg, ScratchModelConfig):
        return _scratch_config(cfg, given)
    assert isinstance(cfg, CustomModelConfig)
    config = _custom_config(cfg, given, allow_target)
    if cfg.dropout and not any(hasattr(config, name) for name in DROPOUTS):
        raise UserError(f"model.dropout={cfg.dropout}: {type(config).__qualname__} has no field dropout")
    config.update(_free_fields(cfg, config))
    return config


def _scratch_config(cfg: ScratchModelConfig, given: dict[str, Any]) -> PretrainedConfig:
    family = str(cfg.family)
    if family not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        hint = did_you_mean(family, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, most=3)
        raise UserError(f"model.family={family} is no causal language model of transformers{hint} (gpt2, llama, ...)")
    _check_shape(cfg)
    known = CONFIG_MAPPING[family]()
    if is_wrapper(known):
        text = text_config(known).model_type
        raise UserError(f"model.family={family} reads more than text: its language model is model.family={text}")
    for key in SHAPE_KEYS:
        value = getattr(cfg, key)
        if value is not None:
            name = field_name(known, key)
            if name is None:
                raise UserError(f"model.{key}={value}: the family {family} has no such setting; make it null")
            given[name] = {"rope_type": "default", "rope_theta": value} if key == "rope_theta" else value
    given |= _free_fields(cfg, known)
    pattern = given.get("layer_types")
    if isinstance(pattern, list) and pattern and cfg.num_hidden_layers:
        first = max(0, len(pattern) - cfg.num_hidden_layers)  # a single layer takes the last entry, which attends
        given["layer_types"] = [pattern[(first + i) % len(pattern)] for i in range(cfg.num_hidden_layers)]
    try:
        return filled(cfg, given, known)
    except UserError:
        raise
    except Exception as error:  # transformers' configs validate themselves, with various exceptions
        raise UserError(f"model.family={family} refuses this shape: {last_line(error)}") from error


def _custom_config(cfg: CustomModelConfig, fields: dict[str, Any], allow_target: Sequence[str]) -> PretrainedConfig:
    """Builds the config of the class `_target_` from the class's own options in `cfg`.

    Args:
        fields: values set by lmtrain: vocab_size, use_cache and the tokens that begin and end a document.

    Raises:
        UserError: see `model_class`; the config class raises an error, or `cfg` sets max_position_embeddings and the
            class has no such field.
    """
    config_class = model_class(cfg._target_, allow_target).config_class
    positions = cfg.max_position_embeddings
    if positions is not None and MAX_POSITIONS not in fields_of(config_class):
        raise UserError(
            f"model.{MAX_POSITIONS}={positions}: {config_class.__qualname__} has no such field; make it null"
        )
    general = {field.name for field in dataclasses.fields(CustomModelConfig)}
    options = {f.name: getattr(cfg, f.name) for f in dataclasses.fields(cfg) if f.name not in general}
    if positions is not None:
        options[MAX_POSITIONS] = positions
    with building("model", cfg._target_):
        return config_class(**fields, **options)


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
    raise UserError(
        f"model: {cfg._target_} needs a body, the attribute that its base_model_prefix names, with embed_tokens in it "
        f"(or get_input_embeddings), and lm_head (or get_output_embeddings), by which the loss is computed"
    )


def _free_fields(cfg: ModelConfig, config: PretrainedConfig) -> dict[str, Any]:
    """Returns values for those fields of `config` that are dropouts, and for those that model.extra names."""
    for name in cfg.extra:
        if name.startswith("_") or not hasattr(config, name):  # a private one may name a kernel to download
            hint = did_you_mean(name, config.to_dict())
            raise UserError(f"model.extra.{name}: {type(config).__name__} of transformers has no such field{hint}")
    return {name: cfg.dropout for name in DROPOUTS if hasattr(config, name)} | cfg.extra


def _check_shape(cfg: ScratchModelConfig) -> None:
    for key in (*SHAPE_KEYS, "vocab_size"):
        value = getattr(cfg, key)
        if isinstance(value, int) and not isinstance(value, bool) and value < 1:
            raise UserError(f"model.{key}={value}: at least 1 is needed")
    if cfg.hidden_act is not None and cfg.hidden_act not in ACT2FN:
        hint = did_you_mean(cfg.hidden_act, ACT2FN, most=3) or "; did you mean gelu?"
        raise UserError(f"model.hidden_act={cfg.hidden_act} is not known{hint}")
    width, heads, groups = cfg.hidden_size, cfg.num_attention_heads, cfg.num_key_value_heads
    if width and heads and cfg.head_dim is None and width % heads:
        fits = f"model.num_attention_heads={nearest_divisor(width, heads)}"
        found = f"model.hidden_size={width} does not divide into model.num_attention_heads={heads}"
        raise UserError(f"{found}: set {fits} or model.hidden_size={heads * max(1, round(width / heads))}")
    if heads and groups and heads % groups:
        found = f"model.num_attention_heads={heads} is not a multiple of model.num_key_value_heads={groups}"
        raise UserError(f"{found}: set model.num_key_value_heads to a divisor of {heads}")
    experts, chosen = cfg.num_experts, cfg.num_experts_per_tok
    if experts and chosen and chosen > experts:
        raise UserError(f"model.num_experts_per_tok={chosen} of model.num_experts={experts}: lower the first")


def _pretrained_config(cfg: LoadedModelConfig) -> PretrainedConfig:
    check_pretrained_name(cfg.init, cfg.name_or_path)
    if cfg.max_position_embeddings is not None:
        own = f"{cfg.name_or_path} has its own; make it null"
        raise UserError(f"model.{MAX_POSITIONS}={cfg.max_position_embeddings}: {own}")
    here = Path(str(cfg.name_or_path))
    config = base_config(here) if is_exported(here) else _from_hub(AutoConfig.from_pretrained, cfg)
    outermost(config, scalar_head=False)
    text = text_config(config)
    text.update(_free_fields(cfg, text))
    if cfg.router_aux_loss_coef is not None:
        text.router_aux_loss_coef = cfg.router_aux_loss_coef
    return config


def _pretrained(
    cfg: LoadedModelConfig, config: PretrainedConfig, scalar_head: bool, in_files: bool, loading: dict[str, Any]
) -> PreTrainedModel:
    """Loads the model in fp32, or with `in_files` leaves its weights in their files if these can supply them."""
    load = functools.partial(_from_hub, folder.from_pretrained, cfg, config=config, scalar_head=scalar_head)
    if in_files and weight_files.may_leave(config, str(cfg.name_or_path)):
        model: PreTrainedModel = load(dtype="auto")
        if weight_files.leave(model, str(cfg.name_or_path)):
            return model
        del model  # its memory is needed for the weights
    # The checkpoint's own dtype is often bf16, too coarse for small updates.
    return load(dtype=torch.float32, **loading)


def _grow_vocabulary(model: PreTrainedModel, vocab_size: int) -> None:
    """Adds embedding rows for added tokens, drawn around the mean of the existing rows (Hewitt 2021)."""
    rows = model.get_input_embeddings().weight.shape[0]
    if vocab_size > rows:
        log.warning("the embeddings grow from %d to %d rows, for added tokens", rows, vocab_size)
        on_meta = model.device.type == "meta"
        model.resize_token_embeddings(vocab_size, mean_resizing=not on_meta)  # the mean needs the rows' values


def _from_hub(function: Any, cfg: LoadedModelConfig, **options: Any) -> Any:
    name = str(cfg.name_or_path)
    is_path = Path(name).is_dir() or name.startswith((".", "/", "~"))
    # A single request first, since transformers would retry an unreachable hub for half a minute.
    unreachable = "" if is_path else hub.commit_of("model", name, cfg.revision)[1]
    options |= {"revision": cfg.revision, "trust_remote_code": cfg.trust_remote_code}
    try:
        return function(name, local_files_only=bool(unreachable), **options)
    except Exception as error:  # the hub's, requests' and transformers' errors share no base class
        if unreachable:
            raise UserError(hub.explain_unreachable("model", name, unreachable)) from error
        raise error if isinstance(error, UserError) else UserError(_explain_loading(cfg, error)) from error


def _explain_loading(cfg: LoadedModelConfig, error: Exception) -> str:
    name = str(cfg.name_or_path)
    if (Path(name).expanduser() / "adapter_config.json").is_file():
        return f"model.name_or_path={name} is an adapter: name its base there, and set peft=lora peft.adapter={name}"
    reason = f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}"
    if "trust_remote_code" in str(error):
        return f"model.name_or_path={name} brings its own code: if you trust it, set model.trust_remote_code=true"
    if Path(name).is_dir():
        return f"model.name_or_path={name} is a folder without a model that loads ({reason})"
    if name.startswith((".", "/", "~")):
        return f"model.name_or_path={name}: no such folder"
    return (
        f"model.name_or_path={name} can't be loaded from {hub.endpoint()} ({reason}): check the spelling, the "
        f"network or HF_ENDPOINT, run `hf auth login` for a gated model, or give the folder of a downloaded one"
    )


def _instantiate(cfg: ModelConfig, config: PretrainedConfig, scalar_head: bool) -> PreTrainedModel:
    cls = outermost(config, scalar_head)
    try:
        model = cls.from_config(config, dtype=torch.float32, trust_remote_code=cfg.trust_remote_code)
        return text_of(model, scalar_head)
    except ValueError as error:
        raise UserError(f"transformers can't build this {config.model_type}: {last_line(error)}") from error


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


# The matrices that write into the residual stream, by their names in transformers' families: GPT-2's; Llama's and its
# descendants', with stacked experts; OPT's and LFM2's attention; the feed-forward layers of nanochat and LFM2.
RESIDUAL_PROJECTIONS = (
    *("c_proj.weight", "o_proj.weight", "down_proj.weight", "experts.down_proj"),
    *("out_proj.weight", "fc2.weight", "feed_forward.w2.weight"),
)


@torch.no_grad()
def init_residual_projections(model: PreTrainedModel) -> None:
    """Draws the residual projections from N(0, initializer_range / sqrt(2 L)), using the global random generator.

    Two of them per layer add to the residual stream, so its variance would grow with depth (Radford et al. 2019,
    section 2.3). transformers does this for GPT-2 in some versions only (not in 5.12) and draws all of a Llama's
    matrices from N(0, initializer_range); Megatron-LM (Shoeybi et al. 2019, section 4.1) and the Llama-shaped
    TinyLlama scale them as GPT-2 does. All other weights are transformers' own: N(0, initializer_range), norms 1,
    biases 0.
    """
    config = model.config.get_text_config()
    deviation = getattr(config, "initializer_range", 0.02) / (2 * config.num_hidden_layers) ** 0.5
    for name, parameter in model.named_parameters():
        if name.endswith(RESIDUAL_PROJECTIONS):
            parameter.normal_(0.0, deviation)


def _add_dropout(model: PreTrainedModel, share: float) -> None:
    """Adds dropout to the outputs of attention, convolutions and feed-forward layers, which enter the residual stream.

    Only for families that have no dropout of their own, such as LFM2. The added modules have no weights, so that
    checkpoints and exports are the same.
    """
    if share == 0 or any(hasattr(model.config.get_text_config(), name) for name in DROPOUTS):
        return
    names = [n.removesuffix(".weight") for n, _ in model.named_parameters() if n.endswith(RESIDUAL_PROJECTIONS)]
    if not names:
        raise UserError(f"model.dropout={share}: {model.config.model_type} has no dropout, and no layers to add it to")
    for name in names:
        module = model.get_submodule(name.rpartition(".")[0])
        module.add_module("residual_dropout", nn.Dropout(share))
        module.register_forward_hook(_drop)


def _drop(module: Any, _: Any, output: Any) -> Any:
    """Applies dropout to a module's output, or to the first of its outputs."""
    if isinstance(output, tuple):
        return (module.residual_dropout(output[0]), *output[1:])
    return module.residual_dropout(output)
