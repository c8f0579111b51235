"""Environments, which answer a completion with further turns: the results of tool calls, a game's next move.

A completion then has several turns. The environment's turns are context for the model and never part of its loss
(rollouts/episodes.py).
"""

import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from transformers.utils import get_json_schema
from transformers.utils.chat_template_utils import DocstringParsingException, TypeHintParsingException

from lmtrain.config.targets import build_target, check_names, class_named
from lmtrain.data.chat.arguments import Misfit, fitted
from lmtrain.data.chat.time_limits import TookTooLong
from lmtrain.data.chat.tool_calls import CallReader
from lmtrain.errors import UserError
from lmtrain.rewards.base import Reward
from lmtrain.rewards.own_process import described
from lmtrain.rewards.user_code import Escaped, run_user_code

LONGEST = 4000  # characters of a tool's result that the model is given

Tool = Callable[..., Any]
Messages = Sequence[Mapping[str, Any]]


class Call(NamedTuple):
    """A tool call of an answer, after it was executed."""

    name: str
    arguments: Any  # a dict if the call could be read
    result: str  # what the model is told: the result, or the error
    failed: bool  # whether the tool is unknown, was called with wrong arguments, raised, or took too long
    id: str = ""  # the call's, if the model gives calls one (Mistral's do)


class Environment:
    """Base class of environments; your own is a class in a package that run.allow_target allows.

        class Guess(Environment):
            def reset(self, row, seed):
                self.secret = seed % 100
                return [{"role": "user", "content": "Guess my number between 0 and 99."}]

            def step(self, answer, calls):
                if answer.strip() == str(self.secret):
                    return None, 1.0
                return [{"role": "user", "content": "No."}], 0.0

    `objective.environment._target_=my_package.Guess` selects it; further keys are arguments of its constructor. Each
    completion is played by an object of its own, so keep what takes long to load in the module. Methods and tools may
    be coroutines (`async def`). `Adapted` says which other classes can be environments.

    tools: functions, or methods of the environment, with type hints and a docstring in Google's style. The chat
    template shows the model their names, descriptions and arguments.
    """

    tools: Sequence[Tool] = ()

    def reset(self, row: Mapping[str, Any], seed: int) -> Messages | str | None:
        """Begins an episode and returns the messages that ask for the first answer.

        None stands for the row's own prompt, and text for that prompt with the text at its end.

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

    def get_reward(self) -> float | None:
        """Returns what is added to the rewards of the steps, or None; called when the episode has ended in any way."""
        return None


class Adapted(Environment):
    """Plays a class that isn't derived from Environment.

    One whose reset can be called with a row and a seed, and which has step, is called as an Environment is. Any other
    is a class for TRL's environment_factory: reset gets the columns of the row as keywords (and, if it names it, the
    seed), its other public methods are the tools, and get_reward, if there is one, gives the reward.
    """

    def __init__(self, played: Any) -> None:
        self.played = played
        self.steps = hasattr(played, "step") and _takes(played.reset, {}, 0)
        functions = inspect.getmembers(type(played), inspect.isfunction)
        own = [name for name, _ in functions if name not in ("reset", "get_reward") and not name.startswith("_")]
        self.tools = getattr(played, "tools", ()) if self.steps else [getattr(played, name) for name in own]

    def reset(self, row: Mapping[str, Any], seed: int) -> Any:
        if self.steps:
            return self.played.reset(row, seed)
        parameters = inspect.signature(self.played.reset).parameters
        takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
        given = {"seed": seed} if "seed" in parameters else {}
        return self.played.reset(**given | {name: v for name, v in row.items() if takes_all or name in parameters})

    def step(self, answer: str, calls: Sequence[Call]) -> Any:
        return self.played.step(answer, calls) if self.steps else super().step(answer, calls)

    def get_reward(self) -> Any:
        return self.played.get_reward() if hasattr(self.played, "get_reward") else None


class EnvironmentReward(Reward):
    """The sum of what an environment's steps returned; None if none of them returned a reward."""

    def __call__(self, prompts: Sequence[Any], completions: Sequence[str], **columns: Sequence[Any]) -> Sequence[Any]:
        found = columns["environment_reward"]
        failed = next((reason for reason in found if isinstance(reason, str)), None)
        if failed is not None:
            raise RuntimeError(failed)
        return found


def build_environment(entry: dict[str, Any], allow_target: Sequence[str]) -> Callable[[], Environment]:
    """Returns what makes an environment as objective.environment says, after making one.

    Raises:
        UserError: it is none, its constructor fails, or a tool lacks type hints or descriptions.
    """
    key = "objective.environment"
    check_names(key, entry, allow_target)
    target = str(entry["_target_"])
    cls = class_named(target, key, allow_target)
    foreign = any(f"{cls.__module__}.".startswith(f"{package}.") for package in allow_target)
    if issubclass(cls, Environment) or not foreign:
        make = partial(build_target, entry, key, Environment, allow_target)
    elif not callable(getattr(cls, "reset", None)):
        raise UserError(f"{key}: _target_={target} has no method reset, which begins an episode")
    else:
        make = partial(_adapted, entry, key, cls, allow_target)
    try:
        environment = run_user_code(make, None)
        schemas(environment)
    except Escaped as error:
        raise UserError(f"{key}: {target} raised {error}") from None
    for tool in environment.tools:
        if hasattr(tool, "start_process"):  # own_process.py; it is ready when the first call comes
            tool.start_process()
    return make


def _adapted(entry: dict[str, Any], key: str, cls: type, allow_target: Sequence[str]) -> Environment:
    return Adapted(build_target(entry, key, cls, allow_target))


def schemas(environment: Environment) -> list[dict[str, Any]]:
    """Returns the descriptions of an environment's tools in OpenAI's form, as chat templates read them."""
    found = []
    for tool in environment.tools:
        try:
            found.append(get_json_schema(tool))
        except (DocstringParsingException, TypeHintParsingException) as error:
            why = f"the tool {_name(tool)} can't be described to the model ({' '.join(str(error).split())})"
            advice = "give each argument a type hint and a line under Args:"
            raise UserError(f"objective.environment: {why}: {advice}") from None
    return found


def results(calls: Sequence[Call]) -> list[dict[str, Any]]:
    """Returns the turns that tell a model the results of its tool calls."""
    return [
        {"role": "tool", "name": call.name, "content": call.result, **({"tool_call_id": call.id} if call.id else {})}
        for call in calls
    ]


def execute(answer: str, tools: Sequence[Tool], seconds: float, reader: CallReader) -> list[Call]:
    """Executes the tool calls in an answer, each within `seconds`; errors become text for the model.

    reader: reads the calls as the model's chat template writes them.
    """
    by_name = {_name(tool): tool for tool in tools}
    calls = reader.calls(answer)
    executed = [_executed(call.name, call.arguments, by_name, seconds, reader) for call in calls]
    return [done._replace(id=call.id) for done, call in zip(executed, calls, strict=True)]


def _executed(name: str, arguments: Any, tools: Mapping[str, Tool], seconds: float, reader: CallReader) -> Call:
    def failed(words: str) -> Call:
        return Call(name, arguments, f"error: {words}"[:LONGEST], True)

    if not name:
        return failed(f"the call can't be read: it must be written like {reader.example}")
    if name not in tools:
        return failed(f"there is no tool {name!r:.80}; there are {', '.join(tools)}")
    if not isinstance(arguments, dict):
        return failed("arguments must be a JSON object")
    tool = tools[name]
    try:
        inspect.signature(tool).bind(**arguments)
        known = reader.parameters(name)
        arguments = {key: fitted(value, known.get(key, {}), key) for key, value in arguments.items()}
    except (TypeError, Misfit) as error:
        return failed(str(error))
    try:
        value = run_user_code(lambda: tool(**arguments), seconds)
        return Call(name, arguments, run_user_code(lambda: _as_text(value), seconds), False)
    except TookTooLong:
        return failed(f"{name} took longer than {seconds:g} s")
    except Exception as error:  # a tool may raise anything
        return failed(described(error))


def _as_text(value: Any) -> str:
    """Returns a tool's result as text of at most LONGEST characters that UTF-8 can encode."""
    if isinstance(value, bytes | bytearray):
        value = bytes(value[:LONGEST]).decode("utf-8", "replace")
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
    cut = text[:LONGEST].encode("utf-8", "replace").decode()
    return cut if len(text) <= LONGEST else f"{cut}... ({len(text):,} characters)"


def _takes(function: Callable[..., Any], *arguments: Any) -> bool:
    try:
        inspect.signature(function).bind(*arguments)
    except TypeError:
        return False
    return True


def _name(tool: Tool) -> str:
    return str(getattr(tool, "__name__", type(tool).__name__))
