"""Environments, which answer a completion with further turns: the results of tool calls, a game's next move.

A completion then has several turns. The environment's turns are context for the model and never part of its loss
(rollouts/episodes.py).
"""

import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from transformers.utils import get_json_schema
from transformers.utils.chat_template_utils import DocstringParsingException, TypeHintParsingException

from lmtrain.config.targets import build_target, check_names
from lmtrain.data.chat.jinja_rendering import TookTooLong, time_limit
from lmtrain.data.chat.tool_calls import requested
from lmtrain.errors import UserError
from lmtrain.rewards.base import Reward

LONGEST = 4000  # characters of a tool's result that the model is given

Tool = Callable[..., Any]
Messages = Sequence[Mapping[str, Any]]


class Call(NamedTuple):
    """A tool call of an answer, after it was executed."""

    name: str
    arguments: Any  # a dict if the call could be read
    result: str  # what the model is told: the result, or the error
    failed: bool  # whether the tool is unknown, was called with wrong arguments, raised, or took too long


class Environment:
    """Base class of environments; your own is a subclass in a package that run.allow_target allows.

        class Guess(Environment):
            def reset(self, row, seed):
                self.secret = seed % 100
                return [{"role": "user", "content": "Guess my number between 0 and 99."}]

            def step(self, answer, calls):
                if answer.strip() == str(self.secret):
                    return None, 1.0
                return [{"role": "user", "content": "No."}], 0.0

    `objective.environment._target_=my_package.Guess` selects it; further keys are arguments of its constructor. Each
    completion is played by a deep copy of its own.

    tools: functions, or methods of the environment, with type hints and a docstring in Google's style. The chat
    template shows the model their names, descriptions and arguments.
    """

    tools: Sequence[Tool] = ()

    def reset(self, row: Mapping[str, Any], seed: int) -> Messages | None:
        """Begins an episode and returns the messages that ask for the first answer; None for the row's own prompt.

        All completions of a group get the same row and the same seed of 63 bits. Everything random has to follow from
        them, so that a run that was interrupted continues exactly.
        """
        return None

    def step(self, answer: str, calls: Sequence[Call]) -> tuple[Messages | None, float | None]:
        """Returns the messages that follow an answer, or None to end the episode, and a reward for the answer or None.

        The rewards of a completion's answers are added up. Here: the results of the tool calls follow an answer, and
        an answer without calls ends the episode.

        Args:
            answer: text, as rewards get it; it may have been cut off, and then the episode ends after it.
            calls: the tool calls in it, already executed.
        """
        return results(calls) or None, None


class EnvironmentReward(Reward):
    """The sum of what an environment's steps returned; None if none of them returned a reward."""

    def __call__(self, prompts: Sequence[Any], completions: Sequence[str], **columns: Sequence[Any]) -> Sequence[Any]:
        found = columns["environment_reward"]
        failed = next((reason for reason in found if isinstance(reason, str)), None)
        if failed is not None:
            raise RuntimeError(failed)
        return found


def build_environment(entry: dict[str, Any], allow_target: Sequence[str]) -> Environment:
    """Builds objective.environment; raises UserError if it is none, or a tool lacks type hints or descriptions."""
    key = "objective.environment"
    check_names(key, entry, allow_target)
    found = build_target(entry, key, Environment, allow_target)
    schemas(found)
    return found


def schemas(environment: Environment) -> list[dict[str, Any]]:
    """Returns the descriptions of an environment's tools in OpenAI's form, as chat templates read them."""
    found = []
    for tool in environment.tools:
        try:
            found.append(get_json_schema(tool))
        except (DocstringParsingException, TypeHintParsingException) as error:
            raise UserError(
                f"objective.environment: the tool {_name(tool)} can't be described to the model: "
                f"{' '.join(str(error).split())}: give each argument a type hint and a line under Args:"
            ) from None
    return found


def results(calls: Sequence[Call]) -> list[dict[str, Any]]:
    """Returns the turns that tell a model the results of its tool calls."""
    return [{"role": "tool", "name": call.name, "content": call.result} for call in calls]


def execute(answer: str, tools: Sequence[Tool], seconds: float) -> list[Call]:
    """Executes the tool calls in an answer, each within `seconds`; errors become text for the model."""
    if not tools:
        return []
    by_name = {_name(tool): tool for tool in tools}
    return [_executed(name, arguments, by_name, seconds) for name, arguments in requested(answer)]


def _executed(name: str, arguments: Any, tools: Mapping[str, Tool], seconds: float) -> Call:
    def failed(words: str) -> Call:
        return Call(name, arguments, f"error: {words}"[:LONGEST], True)

    if not name:
        return failed('a call must be JSON with "name" and "arguments"')
    if name not in tools:
        return failed(f"there is no tool {name!r:.80}; there are {', '.join(tools)}")
    if not isinstance(arguments, dict):
        return failed("arguments must be a JSON object")
    try:
        inspect.signature(tools[name]).bind(**arguments)
    except TypeError as error:
        return failed(str(error))
    try:
        with time_limit(seconds):
            return Call(name, arguments, _as_text(tools[name](**arguments)), False)
    except TookTooLong:
        return failed(f"{name} took longer than {seconds:g} s")
    except Exception as error:  # a tool may raise anything
        return failed(f"{type(error).__name__}: {' '.join(str(error).split())}")


def _as_text(value: Any) -> str:
    """Returns a tool's result as text of at most LONGEST characters that UTF-8 can encode."""
    if isinstance(value, bytes | bytearray):
        value = bytes(value[:LONGEST]).decode("utf-8", "replace")
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
    cut = text[:LONGEST].encode("utf-8", "replace").decode()
    return cut if len(text) <= LONGEST else f"{cut}... ({len(text):,} characters)"


def _name(tool: Tool) -> str:
    return str(getattr(tool, "__name__", type(tool).__name__))
