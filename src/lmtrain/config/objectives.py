"""The options of lmtrain's own objectives, apart from their classes so that a config is checked without torch.

The options of any other objective stand beside its class, as its `Options`.
"""

from dataclasses import dataclass
from typing import Annotated, ClassVar

from lmtrain.config.constraints import MACHINE, TRAJECTORY, above_zero, choice, not_negative, share
from lmtrain.config.schema import Config, ObjectiveConfig
from lmtrain.errors import UserError

# Those of losses.preferences.LOSSES, which imports torch.
PREFERENCE_LOSSES = ("sigmoid", "robust", "ipo", "hinge", "dpop", "kto_pair", "apo_zero", "apo_down", "simpo", "orpo")
REFERENCES = ("auto", "frozen_copy", "adapter_off", "precomputed", "none")


@dataclass(kw_only=True)
class CausalLMConfig(ObjectiveConfig):
    label_smoothing: Annotated[float, TRAJECTORY, share]
    z_loss: Annotated[float, TRAJECTORY, not_negative]


@dataclass(kw_only=True)
class SFTConfig(CausalLMConfig):
    rows: ClassVar[str] = "conversations"

    neftune_alpha: Annotated[float | None, TRAJECTORY] = None


@dataclass(kw_only=True)
class DPOConfig(ObjectiveConfig):
    rows: ClassVar[str] = "pairs"

    loss: Annotated[str, TRAJECTORY, choice(*PREFERENCE_LOSSES)]
    beta: Annotated[float, TRAJECTORY, above_zero]
    label_smoothing: Annotated[float, TRAJECTORY, share]
    gamma: Annotated[float, TRAJECTORY, not_negative]
    dpop_lambda: Annotated[float, TRAJECTORY, not_negative]
    sft_weight: Annotated[float, TRAJECTORY, not_negative]
    length_normalize: Annotated[bool | str, TRAJECTORY, choice("auto")]
    reference: Annotated[str, MACHINE, choice(*REFERENCES)]

    def check(self, config: Config) -> None:
        if self.label_smoothing >= 0.5:
            raise UserError(
                f"objective.label_smoothing={self.label_smoothing}: below 0.5, or most labels would be wrong"
            )

    def why_on_every_rank(self) -> str | None:
        if self.reference == "precomputed":
            return "objective.reference=precomputed is computed before the model is shared out"
        return None


# objective.name -> the class that trains it, and its options.
OWN: dict[str, tuple[str, type[ObjectiveConfig]]] = {
    "causal_lm": ("lmtrain.objectives.causal_lm.CausalLM", CausalLMConfig),
    "sft": ("lmtrain.objectives.sft.SFT", SFTConfig),
    "dpo": ("lmtrain.objectives.dpo.DPO", DPOConfig),
}
