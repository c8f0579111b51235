"""The options of learning from rewards, and the definitions of the numbers it records."""

from dataclasses import dataclass
from typing import Annotated, ClassVar

from lmtrain.config.constraints import (
    MACHINE,
    SHOWN,
    TRAJECTORY,
    ReadWhere,
    above_zero,
    at_least,
    choice,
    not_negative,
    up_to_one,
)
from lmtrain.config.schema import Config, ObjectiveConfig
from lmtrain.config.schema_data import PROMPT_ROWS
from lmtrain.config.strategies import refuse_split_layers
from lmtrain.errors import UserError
from lmtrain.losses.policy import KL_ESTIMATORS, VARIANTS
from lmtrain.objectives.parts import Definition

_PARITY = "tests/parity/test_grpo_trl.py"
_TRL = {"TRL's GRPOTrainer and RLOOTrainer": f"{_PARITY}::test_losses_and_gradient_norms"}
_LOOP = {"plain loop": "tests/objectives/test_grpo.py::test_a_record_is_what_a_plain_loop_counts"}
_ENGINE = {"trainer's own forward": "tests/rollouts/test_in_process.py::test_log_probs_are_the_trainers"}

_COMPLETIONS = "completions"
_TOKENS = "sampled tokens"
ROLLOUTS = {
    "loss": Definition(
        "weight of advantages",
        _COMPLETIONS,
        "objective.loss (losses/policy.py), with its KL term; val/: minus val/reward",
        _TRL,
    ),
    "reward": Definition(
        "reward",
        "completions that were scored",
        "sum of weight x reward, with overlong_penalty; val/: of one greedy completion a prompt",
        _LOOP,
    ),
    "reward/<name>": Definition(
        "reward", "completions it was given to", "one term of a summed reward, unweighted", _LOOP
    ),
    "reward_failures": Definition(
        "share",
        _COMPLETIONS,
        "a reward raised, took too long or gave no finite number, or none had an opinion; they are in no group's mean "
        "and have no advantage",
        _LOOP,
    ),
    "reward_spread": Definition(
        "reward", "groups", "standard deviation of a group's rewards, n - 1 in its divisor", _LOOP
    ),
    "advantage_spread": Definition(
        "advantage", "groups", "standard deviation of a group's advantages, n in its divisor", _LOOP
    ),
    "groups_without_signal": Definition(
        "share", "groups", "all advantages are 0, as where all rewards are equal", _LOOP
    ),
    "resampled": Definition(
        "times", "groups", "how often another prompt's group took the place of one without signal", _LOOP
    ),
    "overlong_penalty": Definition(
        "reward", _COMPLETIONS, "max(-1, min(0, (max_new_tokens - buffer - tokens) / buffer))", _LOOP
    ),
    "response_length": Definition("tokens", _COMPLETIONS, "tokens of a completion, with its ending token", _LOOP),
    "cut_off": Definition("share", _COMPLETIONS, "objective.max_new_tokens came before an ending token", _LOOP),
    "entropy": Definition(
        "nats", _TOKENS, "of the distribution that a token was drawn from, at the sampling temperature", _LOOP
    ),
    "clip_fraction": Definition(
        "share",
        _TOKENS,
        "the ratio is outside the clip range on the side that the advantage pushes to, so the token has no gradient",
        _TRL,
    ),
    "kl": Definition(
        "nats", _TOKENS, "objective.kl_estimator of KL(policy || reference); where kl_coef is above 0", _TRL
    ),
    "logps/sampler": Definition("nats", _TOKENS, "log-probability of a token as the sampler computed it", _ENGINE),
    "logps/trainer": Definition(
        "nats", _TOKENS, "the same by the forward of training, under the same weights", _ENGINE
    ),
    "sampler_difference": Definition("nats", _TOKENS, "|logps/sampler - logps/trainer|", _ENGINE),
}

_CLIPS = ReadWhere(lambda c: c.objective.loss != "reinforce", "reinforce has no ratio to clip; set objective.loss=grpo")
_WITH_KL_IN_LOSS = ReadWhere(
    lambda c: c.objective.kl_coef > 0 and not VARIANTS[c.objective.loss].kl_in_reward,
    "set objective.kl_coef=0.01 too, and a loss that adds the KL itself, such as objective.loss=grpo",
)
_WITH_KL = ReadWhere(lambda c: c.objective.kl_coef > 0, "set objective.kl_coef=0.01 too")


@dataclass(kw_only=True)
class GRPOOptions(ObjectiveConfig):
    rows: ClassVar[str] = PROMPT_ROWS
    headline: ClassVar[str] = "reward"

    loss: Annotated[str, TRAJECTORY, choice(*VARIANTS)]
    group_size: Annotated[int, TRAJECTORY, at_least(1)]
    updates_per_rollout: Annotated[int, TRAJECTORY, at_least(1)]
    max_new_tokens: Annotated[int, TRAJECTORY, at_least(1)]
    temperature: Annotated[float, TRAJECTORY, above_zero]
    top_p: Annotated[float, TRAJECTORY, above_zero, up_to_one]
    stop_tokens: Annotated[list[str], TRAJECTORY]
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
    engine: Annotated[str, MACHINE, choice("in_process", "vllm")]
    rollout_batch_size: Annotated[int, MACHINE, at_least(1)]
    reward_timeout: Annotated[float, SHOWN, above_zero]
    warn_after_steps: Annotated[int | None, SHOWN, at_least(1)]
    keep_rollouts: Annotated[bool, SHOWN]

    def check(self, config: Config) -> None:
        variant = VARIANTS[self.loss]
        if self.group_size < 2 and variant.baseline != "none":
            raise UserError(
                f"objective.group_size=1: objective.loss={self.loss} compares the completions of a prompt with each "
                f"other, so it needs 2 or more, better 8; objective.loss=reinforce takes one"
            )
        if self.kl_coef and variant.kl_in_reward and self.kl_estimator != "k1":
            raise UserError(
                f"objective.loss={self.loss} takes the KL off a completion's reward, for which objective.kl_estimator="
                f"k1 is the unbiased one: set it"
            )
        if self.engine == "vllm" and self.top_p < 1:  # its processed log-probabilities are those of the tokens left
            raise UserError(
                f"objective.top_p={self.top_p:g}: vLLM gives log-probabilities after top_p, and the loss compares them "
                f"with the model's before it: set objective.top_p=1 or objective.engine=in_process"
            )
        if self.engine == "vllm" and config.peft.method != "none":
            raise UserError(
                f"objective.engine=vllm takes the weights of a whole model, and peft.method={config.peft.method} "
                f"trains an adapter: set objective.engine=in_process"
            )
        if config.trainer.spike_factor is not None:
            raise UserError(
                f"trainer.spike_factor={config.trainer.spike_factor:g}: objective=grpo has losses around 0, of which "
                f"no multiple is a spike: set trainer.spike_factor=null"
            )
        refuse_split_layers(config.trainer.strategy, "rollouts need all weights on each device while they are sampled")
        if self.overlong_buffer is not None and self.overlong_buffer > self.max_new_tokens:
            raise UserError(
                f"objective.overlong_buffer={self.overlong_buffer} is more than objective.max_new_tokens="
                f"{self.max_new_tokens}, of which it is the last part"
            )
