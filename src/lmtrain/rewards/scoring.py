"""Scores completions with all rewards of the config, with their weights, failures and a timeout."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from lmtrain.config.targets import build_target, check_names, function_named
from lmtrain.data.chat.time_limits import TookTooLong
from lmtrain.errors import RunError, UserError
from lmtrain.rewards.base import FunctionReward, Reward, label
from lmtrain.rewards.environment import EnvironmentReward
from lmtrain.rewards.own_process import described
from lmtrain.rewards.user_code import run_user_code

SOLE = "reward"  # the name of a reward that is the only one
ENVIRONMENT = "environment"  # the name of what an environment returns beside other rewards
_NO_OPINION = "no opinion, as where a row has no value in the column that is compared"


class Part(NamedTuple):
    """One reward of a weighted sum."""

    name: str
    weight: float
    reward: Reward


@dataclass
class ScoredCompletions:
    """The scores of N completions, by name of the reward; NaN where it failed or returned None."""

    parts: dict[str, list[float]]
    total: list[float]  # the weighted sum; NaN where a part failed, or all returned None
    failed: list[bool]  # whether the total is NaN
    reasons: Counter[str] = field(default_factory=Counter)  # how often each failure was seen


def build_rewards(config: Mapping[str, Any], allow_target: Sequence[str], with_environment: bool = False) -> list[Part]:
    """Builds the rewards that config.reward names: one with its arguments, or {parts: {name: {_target_, weight, ...}}}.

    with_environment: what an environment returns is a reward too, of weight 1.

    Raises:
        UserError: there is none, or one is not a Reward.
    """
    if "_target_" in config and config.get("parts"):
        raise UserError("reward has a _target_ and parts: name one reward, or put both under reward.parts")
    parts = dict(config.get("parts") or {})
    if SOLE in parts:
        raise UserError(f"reward.parts.{SOLE}: the sum itself is recorded under this name: give the part another one")
    entries = {SOLE: dict(config)} if config.get("_target_") else parts
    if with_environment and SOLE in entries:  # it is one of two
        entries = {str(config["_target_"]).rpartition(".")[2].lower(): dict(config)}
    found = [Part(ENVIRONMENT if entries else SOLE, 1.0, EnvironmentReward())] if with_environment else []
    if not entries and not found:
        named = "reward=exact_number, regex, format, length, math_verify, code, model or custom (reward._target_=)"
        raise UserError(f"objective=grpo learns from rewards, and there is none: choose one with {named}")
    for name, entry in entries.items():
        key = f"reward.parts.{name}" if name in parts else "reward"
        if not isinstance(entry, dict):
            raise UserError(f"{key}={entry}: a mapping with _target_ is needed")
        weight = entry.get("weight", 1.0)
        if isinstance(weight, bool) or not isinstance(weight, int | float) or not math.isfinite(weight):
            raise UserError(f"{key}.weight={weight}: a number is needed")
        arguments = {k: v for k, v in entry.items() if k != "weight"}
        found.append(Part(name, float(weight), _built(arguments, key, allow_target)))
    return found


def _built(entry: dict[str, Any], key: str, allow_target: Sequence[str]) -> Reward:
    """Builds one reward, a class or a function of the user's; raises UserError as `build_target` does."""
    check_names(key, entry, allow_target)
    function = function_named(str(entry["_target_"]), key, allow_target)
    if function is None:
        return build_target(entry, key, Reward, allow_target)
    return FunctionReward(function, {name: v for name, v in entry.items() if name != "_target_"}, key)


class Scorer:
    """A scorer that calls each reward with all completions of a rollout; it counts failures instead of scoring 0."""

    def __init__(self, parts: Sequence[Part], timeout: float) -> None:
        """timeout: maximum seconds of one call of a reward."""
        self.parts, self.timeout = list(parts), timeout

    def __call__(
        self, prompts: Sequence[Any], completions: Sequence[str], columns: Mapping[str, Any]
    ) -> ScoredCompletions:
        """
        Raises:
            UserError: a reward does not return a list of numbers, or reads a column that isn't there.
        """
        scores = ScoredCompletions({}, [0.0] * len(completions), [False] * len(completions))
        for part in self.parts:
            outcomes = self._outcomes(part, prompts, completions, columns)
            scores.parts[part.name] = [math.nan if isinstance(found, str) else found for found in outcomes]
            for i, found in enumerate(outcomes):
                if isinstance(found, str):
                    scores.failed[i], scores.total[i] = True, math.nan
                    scores.reasons[found] += 1
                elif not math.isnan(found):
                    scores.total[i] += part.weight * found
        for i, values in enumerate(zip(*scores.parts.values(), strict=True)):
            if not scores.failed[i] and all(map(math.isnan, values)):
                scores.failed[i], scores.total[i] = True, math.nan
                scores.reasons[f"{' and '.join(scores.parts)} returned None: {_NO_OPINION}"] += 1
        return scores

    def _outcomes(
        self,
        part: Part,
        prompts: Sequence[Any],
        completions: Sequence[str],
        columns: Mapping[str, Any],
        alone: bool = False,
    ) -> list[float | str]:
        """Returns for each completion a number, NaN if the reward returned None, or a message if it failed.

        alone: it is one of several for which the reward raised, so that an exception is its own.
        """
        try:
            return self._called(part, prompts, completions, columns)
        except (UserError, RunError):
            raise
        except TookTooLong:
            return [f"{part.name} took longer than objective.reward_timeout={self.timeout:g} s"] * len(completions)
        except Exception as error:  # user code may raise anything
            if alone:
                return [f"{part.name} raised {described(error)[:200]}"]
        found: list[float | str] = []
        for one in (slice(i, i + 1) for i in range(len(completions))):  # find out for which completion
            own = {name: values[one] for name, values in columns.items()}
            found += self._outcomes(part, prompts[one], completions[one], own, alone=True)
        return found

    def _called(
        self, part: Part, prompts: Sequence[Any], completions: Sequence[str], columns: Mapping[str, Any]
    ) -> list[float | str]:
        values = run_user_code(lambda: part.reward(prompts=prompts, completions=completions, **columns), self.timeout)
        who = f"the reward {part.name} ({label(part.reward)})"
        if isinstance(values, str | bytes | dict) or not hasattr(values, "__len__"):
            raise UserError(f"{who} returned {_shown(values)}: a list with a number for each completion is needed")
        if len(values) != len(completions):
            raise UserError(f"{who} returned {len(values)} values for {len(completions)} completions, not one each")
        return [_number(value, part.name, who) for value in values]


def _number(value: Any, name: str, who: str) -> float | str:
    if value is None:
        return math.nan
    try:
        if isinstance(value, str | bytes):
            raise TypeError
        number = float(value)
    except (TypeError, ValueError):
        raise UserError(f"{who} returned {_shown(value)} for a completion: a number is needed, or None") from None
    return number if math.isfinite(number) else f"{name} returned {number}"


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:60]}..."
