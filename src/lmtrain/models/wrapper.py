"""Language models inside multimodal wrappers (Gemma 3, Qwen3.5, Llama 4, Mistral 3, ...): the language model is trained
on its own, and the vision or audio tower and the projector stay in their files until an export is written.

`text_of` takes the language model out of the wrapper: it becomes its family's causal language model, which is all that
training, LoRA, FLOPs and devices see. `write` puts it back among the tensors of the wrapper's files.
"""

import copy
import inspect
import shutil
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import save_torch_state_dict
from safetensors import safe_open
from torch import Tensor, nn
from transformers import AutoModelForMultimodalLM, PretrainedConfig, PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion
from transformers.models.auto import modeling_auto

from lmtrain.data import hub
from lmtrain.errors import RunError, UserError
from lmtrain.models import weight_files
from lmtrain.models.scalar_head import auto_class, has_scalar_head
from lmtrain.terminal import si

ATTRIBUTE = "lmtrain_wrapper"
# The files of a processor, which a tokenizer doesn't write; the tokenizer has the chat template.
PROCESSOR = ("processor_config.json", "preprocessor_config.json", "video_preprocessor_config.json")
_QUANTISED = ("hf_quantizer", "quantization_method", "is_quantized", "is_loaded_in_4bit", "is_loaded_in_8bit")


@dataclass(frozen=True)
class Wrapper:
    """The wrapper that a language model was taken out of."""

    cls: type[PreTrainedModel]
    config: PretrainedConfig
    name_or_path: str
    prefixes: tuple[tuple[str, str], ...]  # (the language model's name of a module, the wrapper's)
    conversions: Any  # between the names of the files and transformers', as from_pretrained found them
    kept: dict[str, int]  # parameters outside the language model, by the module that they are in

    def outer(self, name: str) -> str:
        """Returns the wrapper's name of a module or parameter of the language model."""
        return _renamed(name, self.prefixes)

    def inner(self, name: str) -> str:
        """Returns the language model's name of a module or parameter of the wrapper, others unchanged."""
        return _renamed(name, tuple((there, here) for here, there in self.prefixes))


def _renamed(name: str, prefixes: tuple[tuple[str, str], ...]) -> str:
    for old, new in prefixes:
        if name == old or name.startswith(f"{old}."):
            return new + name[len(old) :]
    return name


def is_wrapper(config: PretrainedConfig) -> bool:
    """Returns whether a config is of a multimodal model around one of transformers' causal language models."""
    text = config.get_text_config()
    known = config.model_type in modeling_auto.MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES
    return known and text is not config and text.model_type in modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES


def text_config(config: PretrainedConfig) -> PretrainedConfig:
    """Returns the config of the language model in a wrapper; any other config is returned unchanged."""
    return config.get_text_config() if is_wrapper(config) else config


def wrapper_of(model: nn.Module) -> Wrapper | None:
    """Returns the wrapper that `text_of` took the model out of, or None."""
    return model.__dict__.get(ATTRIBUTE)


def describe_left_out(wrapper: Wrapper) -> str:
    """Describes the parts that are not trained, for the plan."""
    parts = ", ".join(f"{si(number)} of {name}" for name, number in wrapper.kept.items())
    return f"{parts}: kept as they are in the files, not loaded onto a device, and exported with the trained weights"


def comes_whole(model: nn.Module) -> bool:
    """Returns whether the model's export is a whole wrapper; one with a scalar head is a language model alone."""
    return wrapper_of(model) is not None and not has_scalar_head(model)


def outermost(config: PretrainedConfig, scalar_head: bool) -> Any:
    """Returns the auto class that loads the model of a config: whole wrappers, else as `auto_class`.

    Raises:
        UserError: a multimodal model around none of transformers' causal language models.
    """
    if is_wrapper(config):
        return AutoModelForMultimodalLM
    multimodal = modeling_auto.MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES.keys()
    if (name := config.model_type) in multimodal - modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.keys():
        found = f"{name} reads more than text, and its language model ({config.get_text_config().model_type})"
        causal = "is not one of transformers' causal language models"
        raise UserError(f"{found} {causal}, so it can't be trained on its own")
    return auto_class(scalar_head)


def text_of(model: PreTrainedModel, scalar_head: bool = False) -> PreTrainedModel:
    """Returns the language model of a wrapper, whose modules it shares; any other model is returned unchanged.

    Args:
        scalar_head: the language model gets a new scalar head instead of its output layer.

    Raises:
        UserError: the wrapper's parts are not those of its family's causal language model.
    """
    if not is_wrapper(model.config):
        return model
    outside, names = model.config, {id(module): name for name, module in model.named_modules()}
    decoder, head = model.get_decoder(), model.get_output_embeddings()

    # The language model of its family as a shell, for the decoder in the wrapper, which has to be of the same class.
    with torch.device("meta"):
        text: Any = auto_class(scalar_head).from_config(decoder.config)
    inside = next(name for name, module in text.named_children() if isinstance(module, PreTrainedModel))
    body = decoder if type(decoder) is not type(text) else getattr(decoder, inside)  # Llama 4's has its output layer
    if type(getattr(text, inside)) is not type(body) or head is None:
        found = f"its language model ({type(body).__name__}) is not that of a {type(text).__name__}"
        raise UserError(f"{type(model).__name__}: {found}, so it can't be trained on its own")
    _check_forward(type(model), decoder.config)

    # The decoder and the head in their places; `here` and `there` are their names in the shell and in the wrapper.
    here, there = [inside], [names[id(body)]]
    setattr(text, inside, body)
    text.base_model_prefix = inside  # Llama 4's class gives another name
    if scalar_head:
        text.score = _new_head(text.score, body)
    else:
        text.set_output_embeddings(head)
        here.append(next(name for name, module in text.named_modules() if module is head))
        there.append(names[id(head)])
        text.generation_config = model.generation_config
    _settle_config(text, body.config, outside, head)
    for name in _QUANTISED:
        if hasattr(model, name):
            setattr(text, name, getattr(model, name))

    # What stays behind, for the plan and for the export.
    own = {id(p) for p in text.parameters()} | {id(head.weight)}
    kept = Counter[str]()
    for name, parameter in model.named_parameters():
        if id(parameter) not in own:
            kept[name.removeprefix("model.").partition(".")[0]] += parameter.numel()
    conversions = getattr(model, "_weight_conversions", None)
    place, prefixes = str(outside._name_or_path), tuple(zip(here, there, strict=True))
    text.__dict__[ATTRIBUTE] = Wrapper(type(model), outside, place, prefixes, conversions, dict(kept))
    return text.train(model.training)


def _check_forward(cls: type[PreTrainedModel], text: PretrainedConfig) -> None:
    """Raises UserError if a wrapper can't read text alone, or gives other logits for it than its language model."""
    asked = {p.name for p in inspect.signature(cls.forward).parameters.values() if p.default is p.empty}
    if others := sorted(asked - {"self", "input_ids", "kwargs"}):
        raise UserError(f"{cls.__name__} can't read text alone: its forward asks for {', '.join(others)}")
    if hasattr(text, "logit_scale") and "logit_scale" not in inspect.getsource(cls):
        raise UserError(f"{cls.__name__} leaves out its language model's logit_scale, so an export would differ")


def _new_head(shape: nn.Linear, body: PreTrainedModel) -> nn.Linear:
    head = nn.Linear(shape.in_features, shape.out_features, bias=False, device=body.device, dtype=body.dtype)
    head.weight.data.normal_(0.0, getattr(body.config, "initializer_range", 0.02))
    return head


def _settle_config(text: Any, config: Any, outside: Any, head: nn.Module) -> None:
    """Makes the body's config the model's own, with what only the wrapper's config says."""
    config.num_labels = text.config.num_labels
    text.config = config
    config.tie_word_embeddings = head.weight is text.get_input_embeddings().weight
    for name in ("_name_or_path", "_commit_hash", "bos_token_id", "eos_token_id", "quantization_config"):
        if getattr(outside, name, None) is not None:
            setattr(config, name, getattr(outside, name))


def write(model: PreTrainedModel, state: dict[str, Tensor], tied: dict[str, Tensor], folder: Path) -> None:
    """Writes the whole wrapper: the tensors of its files with those of the language model replaced, and its processor.

    Args:
        state: the language model's tensors, as they are to be stored.
        tied: those which the model computes with another's values; stored if the wrapper's files have them.

    Raises:
        RunError: the files from which the model was loaded are gone.
    """
    wrapper = wrapper_of(model)
    assert wrapper is not None
    files = weight_files.of_model(wrapper.name_or_path, getattr(wrapper.config, "_commit_hash", None))
    if not files:
        gone = f"{wrapper.name_or_path}, from which the model was loaded, has no safetensors files any more"
        raise RunError(f"the vision or audio tower can't be exported: {gone}; put them back and export again")

    # The trained tensors, by their names in the files.
    config = config_of(model, wrapper)
    with torch.device("meta"):
        shell: Any = wrapper.cls._from_config(config)
    shell._weight_conversions = wrapper.conversions

    def in_files(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        return revert_weight_conversion(shell, {wrapper.outer(name): tensor for name, tensor in tensors.items()})

    whole = in_files(state)
    for name, tensor in tied.items():
        whole |= {key: value.clone() for key, value in in_files({name: tensor}).items() if key in files}

    # All others as they are in the files, and the processor.
    for file in sorted(set(files.values())):
        with safe_open(file, "pt") as reader:
            whole |= {name: reader.get_tensor(name) for name in reader.keys() if name not in whole}  # noqa: SIM118
    folder.mkdir(parents=True, exist_ok=True)
    save_torch_state_dict({name: _alone(tensor) for name, tensor in whole.items()}, folder)
    config.save_pretrained(folder)
    for name in PROCESSOR:
        found = hub.optional_file(wrapper.name_or_path, name, revision=getattr(wrapper.config, "_commit_hash", None))
        if found is not None:
            shutil.copyfile(found, folder / name)


def _alone(tensor: Tensor) -> Tensor:
    """Returns the tensor, copied if it is a part of another, as an expert is of the stacked ones."""
    whole = tensor.is_contiguous() and tensor.untyped_storage().nbytes() == tensor.nbytes
    return tensor if whole else tensor.clone(memory_format=torch.contiguous_format)


def config_of(model: PreTrainedModel, wrapper: Wrapper) -> PretrainedConfig:
    """Returns the wrapper's config with the language model's as it is now."""
    config, text = copy.deepcopy(wrapper.config), copy.deepcopy(model.config)
    config.architectures = [wrapper.cls.__name__]
    for each in (config, text):
        each.__dict__.pop("quantization_config", None)
    name = next(n for n, value in vars(wrapper.config).items() if value is wrapper.config.get_text_config())
    setattr(config, name, text)
    return config
