"""The keys under `model` of each way to have one, apart from the code that builds it: checked without torch."""

from dataclasses import dataclass
from typing import Annotated, ClassVar

from lmtrain.config.constraints import CONTENT, MODEL, TRAJECTORY
from lmtrain.config.schema import Config, ModelConfig


@dataclass(kw_only=True)
class ScratchModelConfig(ModelConfig):
    """A family of transformers with a shape; where a family lacks a setting, its key is null."""

    family: Annotated[str | None, MODEL] = None  # a transformers model_type: gpt2, llama, qwen3, qwen3_moe
    # The fields below are the transformers config's own names.
    hidden_size: Annotated[int | None, MODEL] = None
    num_hidden_layers: Annotated[int | None, MODEL] = None
    num_attention_heads: Annotated[int | None, MODEL] = None
    num_key_value_heads: Annotated[int | None, MODEL] = None
    head_dim: Annotated[int | None, MODEL] = None
    intermediate_size: Annotated[int | None, MODEL] = None
    hidden_act: Annotated[str | None, MODEL] = None
    tie_word_embeddings: Annotated[bool | None, MODEL] = None
    rope_theta: Annotated[float | None, MODEL] = None
    norm_eps: Annotated[float | None, MODEL] = None
    initializer_range: Annotated[float | None, MODEL] = None
    num_experts: Annotated[int | None, MODEL] = None
    num_experts_per_tok: Annotated[int | None, MODEL] = None
    moe_intermediate_size: Annotated[int | None, MODEL] = None
    router_aux_loss_coef: Annotated[float | None, TRAJECTORY] = None


@dataclass(kw_only=True)
class LoadedModelConfig(ModelConfig):
    """Weights of the hub or of a folder, which bring their shape."""

    name_or_path: Annotated[str | None, MODEL, CONTENT] = None
    revision: Annotated[str | None, MODEL, CONTENT] = None
    router_aux_loss_coef: Annotated[float | None, TRAJECTORY] = None


@dataclass(kw_only=True)
class CustomModelConfig(ModelConfig):
    """A class that `_target_` names, from scratch; the keys beside these are fields of its config class."""

    # What lmtrain reads of its config, under transformers' names: FLOPs, memory and the tiny copy depend on them.
    NEEDED: ClassVar[tuple[str, ...]] = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads")

    _target_: Annotated[str, MODEL]


# model.init -> the keys of a model that no `_target_` names.
OWN: dict[str, type[ModelConfig]] = {"scratch": ScratchModelConfig, "pretrained": LoadedModelConfig}


def over_layers(config: Config) -> str:
    """router.over_layers, auto resolved: a loaded model's weight means what its authors meant by it."""
    if config.router.over_layers != "auto":
        return config.router.over_layers
    return "joint" if isinstance(config.model, LoadedModelConfig) else "sum"
