"""The options of learning from rewards."""

from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

from lmtrain.config.constraints import *  # the vocabulary of declarations
from lmtrain.config.schema import Config, ObjectiveConfig
from lmtrain.config.schema_data import PROMPT_ROWS, DataConfig
from lmtrain.errors import UserError
from lmtrain.losses.policy import KL_ESTIMATORS, VARIANTS

_CLIPS = ReadWhere(lambda c: c.objective.loss != "reinforce", "reinforce has no ratio to clip; set objective.loss=grpo")
_WITH_KL_IN_LOSS = ReadWhere(
    lambda c: c.objective.kl_coef > 0 and not VARIANTS[c.objective.loss].kl_in_reward,
    "set objective.kl_coef=0.01 too, and a loss that adds the KL itself, such as objective.loss=grpo",
)
_WITH_KL = ReadWhere(lambda c: c.objective.kl_coef > 0, "set objective.kl_coef=0.01 too")


_WITH_ENVIRONMENT = ReadWhere(
    lambda c: c.objective.plays, "name an environment too, with objective.environment._target_"
)


@dataclass(kw_only=True)
class GRPOOptions(ObjectiveConfig):
    rows: ClassVar[str] = PROMPT_ROWS
    headline: ClassVar[tuple[str, ...]] = ("reward",)
    trains_on_rollouts: ClassVar[bool] = True

    loss: Annotated[str, TRAJECTORY, choice(*VARIANTS)]
    group_size: Annotated[int, TRAJECTORY, at_least(1)]
    updates_per_rollout: Annotated[int, TRAJECTORY, at_least(1)]
    max_new_tokens: Annotated[int, TRAJECTORY, at_least(1)]
    temperature: Annotated[float, TRAJECTORY, above_zero]
    top_p: Annotated[float, TRAJECTORY, above_zero, up_to_one]
    stop_tokens: Annotated[list[str], TRAJECTORY, OPEN]
    environment: Annotated[dict[str, Any] | None, TRAJECTORY, only("most", "cost", of=("lmtrain.rewards.games",))]
    max_turns: Annotated[int, TRAJECTORY, at_least(1), _WITH_ENVIRONMENT]
    max_total_tokens: Annotated[int | None, TRAJECTORY, at_least(1), _WITH_ENVIRONMENT]
    tool_timeout: Annotated[float, SHOWN, above_zero, _WITH_ENVIRONMENT]
    clip_low: Annotated[float | None, TRAJECTORY, not_negative, _CLIPS]
    clip_high: Annotated[float | None, TRAJECTORY, not_negative, _CLIPS]
    kl_coef: Annotated[float, TRAJECTORY, not_negative]
    kl_estimator: Annotated[str, TRAJECTORY, choice(*KL_ESTIMATORS), _WITH_KL]
    kl_by_ratio: Annotated[bool, TRAJECTORY, _WITH_KL_IN_LOSS]
    reference: Annotated[str, MACHINE, choice("auto", "frozen_copy", "adapter_off"), _WITH_KL]
    importance_cap: Annotated[float | None, TRAJECTORY, above_zero]
    resample: Annotated[int | None, TRAJECTORY, not_negative]
    overlong_buffer: Annotated[int | None, TRAJECTORY, not_negative]
    mask_cut_off: Annotated[bool, TRAJECTORY]
    rollout_batch_size: Annotated[int, MACHINE, at_least(1)]
    reward_timeout: Annotated[float, SHOWN, above_zero]
    warn_after_steps: Annotated[int | None, SHOWN, at_least(1)]
    keep_rollouts: Annotated[bool, SHOWN]

    @property
    def plays(self) -> bool:
        """Whether an environment answers the completions."""
        return bool((self.environment or {}).get("_target_"))

    @property
    def max_sampled(self) -> int:
        """The maximum number of tokens that the model may sample for a completion."""
        return self.max_new_tokens * (self.max_turns if self.plays else 1)

    def reference_in_use(self) -> str:
        return self.reference if self.kl_coef else "none"

    def row_tokens(self, data: DataConfig, model: Any) -> int:
        prompts = self.group_size if getattr(model, "unpacked_because", None) else 1  # completions may share it
        return prompts * (data.max_prompt_length or data.seq_len) + self.group_size * self.max_sampled

    def check(self, config: Config) -> None:
        if self.overlong_buffer is not None and self.overlong_buffer > self.max_new_tokens:
            most = f"objective.max_new_tokens={self.max_new_tokens}, of which it is the last part"
            raise UserError(f"objective.overlong_buffer={self.overlong_buffer} is more than {most}")
