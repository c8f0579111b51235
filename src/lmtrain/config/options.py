"""The keys of lmtrain's own objectives, models, optimizers and schedules, defined without importing torch.

Other objectives and schedules declare theirs as the `Options` of the class; custom models and optimizers use the
arguments of the class. sections.py chooses among them.
"""

import re
from collections.abc import Container, Sequence
from dataclasses import dataclass, fields
from typing import Annotated, Any, ClassVar

from lmtrain.config.constraints import *  # the vocabulary of declarations
from lmtrain.config.schema import Config, ModelConfig, ObjectiveConfig, OptimizerConfig, ScheduleConfig

# The names in losses.preferences.LOSSES, a module that imports torch.
PREFERENCE_LOSSES = ("sigmoid", "robust", "ipo", "hinge", "dpop", "kto_pair", "apo_zero", "apo_down", "simpo", "orpo")
REFERENCES = ("auto", "frozen_copy", "adapter_off", "precomputed", "none")


def _of_loss(*names: str) -> ReadWhere:
    choices = " or ".join(f"objective.loss={name}" for name in names)
    return ReadWhere(lambda c: c.objective.loss in names, f"set {choices}")


_PER_TOKEN = "simpo and orpo always take log-probabilities per token; leave it out"
WITHOUT_REFERENCE = ("simpo", "orpo")
_CHOOSES = ReadWhere(lambda c: c.objective.loss not in WITHOUT_REFERENCE, _PER_TOKEN)


@dataclass(kw_only=True)
class CausalLMConfig(ObjectiveConfig):
    headline: ClassVar[tuple[str, ...]] = ("bits_per_byte", "loss")
    may_stay_in_files: ClassVar[bool] = True


@dataclass(kw_only=True)
class SFTConfig(CausalLMConfig):
    rows: ClassVar[str] = "conversations"
    headline: ClassVar[tuple[str, ...]] = ("loss",)


@dataclass(kw_only=True)
class DPOConfig(ObjectiveConfig):
    rows: ClassVar[str] = "pairs"
    headline: ClassVar[tuple[str, ...]] = ("rewards/accuracy", "loss")

    loss: Annotated[str, TRAJECTORY, choice(*PREFERENCE_LOSSES)]
    beta: Annotated[float, TRAJECTORY, above_zero]
    label_smoothing: Annotated[float, TRAJECTORY, less_than_half, _of_loss("sigmoid", "robust")]
    gamma: Annotated[float, TRAJECTORY, not_negative, _of_loss("simpo")]
    dpop_lambda: Annotated[float, TRAJECTORY, not_negative, _of_loss("dpop")]
    sft_weight: Annotated[float, TRAJECTORY, not_negative]
    length_normalize: Annotated[bool | str, TRAJECTORY, choice("auto"), _CHOOSES]
    reference: Annotated[str, MACHINE, choice(*REFERENCES)]

    def reference_in_use(self) -> str:
        return "none" if self.loss in WITHOUT_REFERENCE else self.reference

    def why_on_every_rank(self) -> str | None:
        if self.reference == "precomputed":
            return "objective.reference=precomputed is computed before the model is shared out"
        return None


# objective.name -> the path of the objective's class, and its options.
OBJECTIVES: dict[str, tuple[str, type[ObjectiveConfig]]] = {
    "causal_lm": ("lmtrain.objectives.causal_lm.CausalLM", CausalLMConfig),
    "sft": ("lmtrain.objectives.sft.SFT", SFTConfig),
    "dpo": ("lmtrain.objectives.dpo.DPO", DPOConfig),
}


@dataclass(kw_only=True)
class ScratchModelConfig(ModelConfig):
    """A transformers architecture trained from scratch; keys that the model family doesn't have are null."""

    family: Annotated[str | None, MODEL, OPEN] = None  # a transformers model_type: gpt2, llama, qwen3, qwen3_moe
    # The fields below are named as in transformers' configs.
    hidden_size: Annotated[int | None, MODEL] = None
    num_hidden_layers: Annotated[int | None, MODEL] = None
    depth: Annotated[int | None, SHOWN] = None  # model=dial only; num_hidden_layers follows from it
    num_attention_heads: Annotated[int | None, MODEL] = None
    num_key_value_heads: Annotated[int | None, MODEL] = None
    head_dim: Annotated[int | None, MODEL] = None
    intermediate_size: Annotated[int | None, MODEL] = None
    hidden_act: Annotated[str | None, MODEL, OPEN] = None
    tie_word_embeddings: Annotated[bool | None, MODEL] = None
    rope_theta: Annotated[float | None, MODEL, above_zero] = None
    norm_eps: Annotated[float | None, MODEL, not_negative] = None
    initializer_range: Annotated[float | None, MODEL, not_negative] = None
    num_experts: Annotated[int | None, MODEL] = None
    num_experts_per_tok: Annotated[int | None, MODEL] = None
    moe_intermediate_size: Annotated[int | None, MODEL] = None
    router_aux_loss_coef: Annotated[float | None, TRAJECTORY] = None


_OWN_VOCABULARY = ReadWhere(lambda c: False, "a pretrained model has its own, which tokenizer.add_tokens extends")


@dataclass(kw_only=True)
class LoadedModelConfig(ModelConfig):
    """A pretrained model from the hub or a folder, which determines the architecture."""

    vocab_size: Annotated[int | None, MODEL, _OWN_VOCABULARY]
    name_or_path: Annotated[str | None, MODEL, SOURCE, CONTENT] = None
    revision: Annotated[str | None, MODEL, OPEN, CONTENT] = None
    router_aux_loss_coef: Annotated[float | None, TRAJECTORY] = None


@dataclass(kw_only=True)
class CustomModelConfig(ModelConfig):
    """A custom class, named by `_target_`, trained from scratch; all other keys are fields of its config class."""

    # Fields that lmtrain reads from its config, under transformers' names: for FLOPs, memory and the tiny copy.
    NEEDED: ClassVar[tuple[str, ...]] = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads")

    _target_: Annotated[str, MODEL, classes()]


# model.init -> the keys of a model without a `_target_`.
MODELS: dict[str, type[ModelConfig]] = {"scratch": ScratchModelConfig, "pretrained": LoadedModelConfig}


def over_layers(config: Config) -> str:
    """Returns router.over_layers; auto is joint for a pretrained model, as its authors define the loss, else sum."""
    if config.router.over_layers != "auto":
        return config.router.over_layers
    return "joint" if isinstance(config.model, LoadedModelConfig) else "sum"


# The `state_bytes` of each optimizer are the bytes it keeps for a number, of `itemsize` bytes, of a weight.


@dataclass(kw_only=True)
class LionConfig(OptimizerConfig):
    betas: Annotated[Any, TRAJECTORY, OPEN, two_betas]

    def state_bytes(self, name: str, shape: Sequence[int], itemsize: int) -> float:
        return itemsize


@dataclass(kw_only=True)
class AdamWConfig(OptimizerConfig):
    betas: Annotated[Any, TRAJECTORY, OPEN, two_betas]
    eps: Annotated[float, TRAJECTORY, not_negative]

    def state_bytes(self, name: str, shape: Sequence[int], itemsize: int) -> float:
        return 2 * itemsize


@dataclass(kw_only=True)
class AdamW8bitConfig(AdamWConfig):
    full_state_pattern: Annotated[str, TRAJECTORY, OPEN, regular_expression]

    def state_bytes(self, name: str, shape: Sequence[int], itemsize: int) -> float:
        return 8 if re.search(self.full_state_pattern, name) else 2  # two moments in 32 bits, or in 8


@dataclass(kw_only=True)
class AdafactorConfig(OptimizerConfig):
    min_parameter_rms: Annotated[float, TRAJECTORY, not_negative]

    def state_bytes(self, name: str, shape: Sequence[int], itemsize: int) -> float:
        return 0  # a number per row and column


@dataclass(kw_only=True)
class MuonConfig(AdamWConfig):
    """Keys of Muon, and of the AdamW that updates every parameter other than hidden matrices."""

    momentum: Annotated[float, TRAJECTORY, share]
    adamw_pattern: Annotated[str, TRAJECTORY, OPEN, regular_expression]

    def state_bytes(self, name: str, shape: Sequence[int], itemsize: int) -> float:
        """Returns the bytes of one momentum of hidden matrices, and of AdamW's two moments of all other weights."""
        hidden = len(shape) == 2 or (len(shape) == 3 and "experts" in name)
        return itemsize if hidden and not re.search(self.adamw_pattern, name) else 2 * itemsize


def arguments_of(optimizer: OptimizerConfig, takes: Container[str]) -> dict[str, Any]:
    """Returns the arguments of a custom class: its own keys, and lr and weight_decay if it `takes` them."""
    common = {f.name for f in fields(OptimizerConfig)}
    own = {f.name: getattr(optimizer, f.name) for f in fields(optimizer) if f.name not in common}
    return own | {name: getattr(optimizer, name) for name in ("lr", "weight_decay") if name in takes}


# optimizer.name -> its keys; `optim.optimizers` builds the optimizer.
OPTIMIZERS: dict[str, type[OptimizerConfig]] = {
    "adamw": AdamWConfig,
    "adamw_8bit": AdamW8bitConfig,
    "adafactor": AdafactorConfig,
    "lion": LionConfig,
    "muon": MuonConfig,
}


@dataclass(kw_only=True)
class ToFloorConfig(ScheduleConfig):
    """A schedule that decays to a floor, reached at the end of the run."""

    min_lr_ratio: Annotated[float, RATE, up_to_one]


@dataclass(kw_only=True)
class CosineRestartsConfig(ToFloorConfig):
    num_cycles: Annotated[int, RATE, at_least(1)]


@dataclass(kw_only=True)
class PolynomialConfig(ToFloorConfig):
    power: Annotated[float, RATE, above_zero]


_NO_STEP = ReadWhere(lambda c: c.schedule.decay_from is None, "it is set by schedule.decay_from or run.cooldown_from")


@dataclass(kw_only=True)
class WarmupStableDecayConfig(ToFloorConfig):
    decay_ratio: Annotated[float, RATE, above_zero, up_to_one, _NO_STEP]
    decay_from: Annotated[int | None, RATE, not_negative] = None  # first step of the decay; overrides decay_ratio
    decay_shape: Annotated[str, RATE, choice("linear", "cosine", "sqrt")]


@dataclass(kw_only=True)
class RangeTestConfig(ScheduleConfig):
    """A schedule that rises exponentially (by the same factor each step) to the full rate, for `lmtrain.tune`."""

    min_lr_ratio: Annotated[float, RATE, above_zero, up_to_one]


@dataclass(kw_only=True)
class InverseSqrtConfig(ScheduleConfig):
    timescale: Annotated[int, RATE, at_least(1)]


# schedule.name -> its keys; `optim.schedules.lr_factor` computes the schedule.
SCHEDULES: dict[str, type[ScheduleConfig]] = {
    "constant": ScheduleConfig,
    "linear": ToFloorConfig,
    "cosine": ToFloorConfig,
    "cosine_restarts": CosineRestartsConfig,
    "polynomial": PolynomialConfig,
    "inverse_sqrt": InverseSqrtConfig,
    "wsd": WarmupStableDecayConfig,
    "range_test": RangeTestConfig,
}
