"""ScoredCompletions completions by all rewards of the config: weights, what failed, how long it may take."""

import math
import signal
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FrameType
from typing import Any, NamedTuple

from lmtrain.config.targets import build_target
from lmtrain.errors import RunError, UserError
from lmtrain.rewards.base import MissingColumn, Reward

SOLE = "reward"  # the name of a reward that is alone
_OWN = ("weight",)  # keys beside a reward's own arguments


class Part(NamedTuple):
    """One reward of a weighted sum."""

    name: str
    weight: float
    reward: Reward


@dataclass
class ScoredCompletions:
    """Of N completions, by the name of each reward; NaN where it failed or said nothing."""

    parts: dict[str, list[float]]
    total: list[float]  # the weighted sum; NaN where a part failed
    failed: list[bool]
    reasons: dict[str, int] = field(default_factory=dict)  # how often each failure was seen


def build_rewards(config: Mapping[str, Any], allow_target: Sequence[str]) -> list[Part]:
    """The rewards that config.reward names: one with its arguments, or {parts: {name: {_target_, weight, ...}}}.

    Raises:
        UserError: there is none, or one is no Reward.
    """
    if "_target_" in config and config.get("parts"):
        raise UserError("reward has a _target_ and parts: name one reward, or put both under reward.parts")
    entries = {SOLE: dict(config)} if config.get("_target_") else dict(config.get("parts") or {})
    if not entries:
        raise UserError(
            "objective=grpo learns from rewards, and there is none: choose one with reward=exact_number, regex, "
            "format, length, math_verify, code or model, or name a class of yours with reward=custom reward._target_="
        )
    found = []
    for name, entry in entries.items():
        key = "reward" if name == SOLE else f"reward.parts.{name}"
        if not isinstance(entry, dict):
            raise UserError(f"{key}={entry}: a mapping with _target_ is needed")
        weight = entry.get("weight", 1.0)
        if isinstance(weight, bool) or not isinstance(weight, int | float) or not math.isfinite(weight):
            raise UserError(f"{key}.weight={weight}: a number is needed")
        arguments = {k: v for k, v in entry.items() if k not in _OWN}
        found.append(Part(name, float(weight), build_target(arguments, key, Reward, allow_target)))
    return found


class Scorer:
    """Calls each reward with all completions of a rollout; counts what fails instead of taking it for 0."""

    def __init__(self, parts: Sequence[Part], timeout: float) -> None:
        """timeout: seconds that a call of one reward may take."""
        self.parts, self.timeout = list(parts), timeout

    def __call__(
        self, prompts: Sequence[Any], completions: Sequence[str], columns: Mapping[str, Any]
    ) -> ScoredCompletions:
        """
        Raises:
            UserError: a reward gives what is no list of numbers, or reads a column that isn't there.
        """
        scores = ScoredCompletions({}, [0.0] * len(completions), [False] * len(completions))
        for part in self.parts:
            values = self._values(part, prompts, completions, columns, scores)
            scores.parts[part.name] = values
            for i, value in enumerate(values):
                if scores.failed[i]:
                    scores.total[i] = math.nan
                elif not math.isnan(value):
                    scores.total[i] += part.weight * value
        return scores

    def _values(
        self,
        part: Part,
        prompts: Sequence[Any],
        completions: Sequence[str],
        columns: Mapping[str, Any],
        scores: ScoredCompletions,
    ) -> list[float]:
        try:
            return self._called(part, prompts, completions, columns, list(range(len(completions))), scores)
        except (UserError, RunError):
            raise
        except MissingColumn as error:
            raise UserError(str(error)) from None
        except _TookTooLong:
            reason = f"{part.name} took longer than objective.reward_timeout={self.timeout:g} s"
            self._fail(scores, range(len(completions)), reason)
            return [math.nan] * len(completions)
        except Exception:  # of one of them: which one?
            return [self._alone(part, prompts, completions, columns, i, scores) for i in range(len(completions))]

    def _alone(
        self,
        part: Part,
        prompts: Sequence[Any],
        completions: Sequence[str],
        columns: Mapping[str, Any],
        i: int,
        scores: ScoredCompletions,
    ) -> float:
        one = {name: values[i : i + 1] for name, values in columns.items()}
        try:
            return self._called(part, prompts[i : i + 1], completions[i : i + 1], one, [i], scores)[0]
        except (UserError, RunError):
            raise
        except Exception as error:  # a user's own code
            said = " ".join(str(error).split())[:200]
            self._fail(scores, [i], f"{part.name} raised {type(error).__name__}: {said}")
            return math.nan

    def _called(
        self,
        part: Part,
        prompts: Sequence[Any],
        completions: Sequence[str],
        columns: Mapping[str, Any],
        which: Sequence[int],
        scores: ScoredCompletions,
    ) -> list[float]:
        with at_most(self.timeout):
            values = part.reward(prompts=prompts, completions=completions, **columns)
        who = f"the reward {part.name} ({type(part.reward).__qualname__})"
        if isinstance(values, str | bytes | dict) or not hasattr(values, "__len__"):
            raise UserError(f"{who} returned {_shown(values)}: a list with a number for each completion is needed")
        if len(values) != len(completions):
            raise UserError(
                f"{who} returned {len(values)} values for {len(completions)} completions: one each is needed"
            )
        return [self._number(value, who, part.name, i, scores) for value, i in zip(values, which, strict=True)]

    def _number(self, value: Any, who: str, name: str, i: int, scores: ScoredCompletions) -> float:
        if value is None:
            return math.nan
        try:
            number = math.nan if isinstance(value, str | bytes) else float(value)
        except (TypeError, ValueError):
            number = math.nan
            value = repr(value)
        if isinstance(value, str | bytes):
            raise UserError(
                f"{who} returned {_shown(value)} for a completion: a number is needed, or None for no opinion"
            )
        if not math.isfinite(number):
            self._fail(scores, [i], f"{name} returned {number}")
            return math.nan
        return number

    @staticmethod
    def _fail(scores: ScoredCompletions, which: Sequence[int] | range, reason: str) -> None:
        for i in which:
            scores.failed[i] = True
        scores.reasons[reason] = scores.reasons.get(reason, 0) + len(which)


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:60]}..."


class _TookTooLong(BaseException):
    """Raised inside a reward that runs too long; no `except Exception` of its own can swallow it."""


@contextmanager
def at_most(seconds: float) -> Iterator[None]:
    """Ends what runs within, with _TookTooLong, after so many seconds.

    An alarm of the process interrupts Python code and system calls, not a long call of C code; where this is not the
    main thread, which alone gets signals, nothing ends it.
    """
    if threading.current_thread() is not threading.main_thread() or not hasattr(signal, "setitimer"):
        yield
        return

    def ring(number: int, frame: FrameType | None) -> None:
        raise _TookTooLong

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
