"""Completions of several turns: the model's answers, and between them the turns of an environment.

Each answer is sampled from all tokens before it. The environment's turns are tokenized on their own and appended to the
tokens that the model wrote, which are never decoded and tokenized again: so the model is trained on exactly the tokens
that it was given and that it sampled, and only on the latter.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from lmtrain.data.chat.call_formats import reader_of
from lmtrain.data.chat.conversations import Conversation
from lmtrain.data.chat.rendering import check_tools
from lmtrain.data.chat.special_text import AnswerDecoder
from lmtrain.data.chat.templates import ChatEncoder
from lmtrain.data.chat.thoughts import thought_marks
from lmtrain.data.chat.time_limits import TookTooLong
from lmtrain.data.chat.turns import BadRow, turns_of
from lmtrain.data.examples.prompt_rows import PromptRow, conversation_of
from lmtrain.data.order import mix64
from lmtrain.errors import UserError
from lmtrain.rewards.environment import Adapted, Call, Environment, execute, schemas
from lmtrain.rewards.own_process import described
from lmtrain.rewards.user_code import run_user_code
from lmtrain.rollouts.engine import Engine, PrefixCache, Request, SampledText, Sampling

PLAYED = ("turns", "tool_calls", "failed_tool_calls")  # what is recorded of an episode
_EPISODE = 0x65706973  # separates the seeds of episodes from all others


class Limits(NamedTuple):
    """The limits of an episode."""

    turns: int  # answers of the model
    tokens: int  # prompt, answers and the environment's turns together
    seconds: float  # of one call of the environment, or of a tool


@dataclass
class Episode:
    """A completion while it is played; `turns` are those after the prompt."""

    environment: Environment
    prompt: list[int]
    key: int
    options: dict[str, Any] = field(default_factory=dict)  # variables of the chat template, of the prompt's row
    ids: list[int] = field(default_factory=list)
    sampled: list[bool] = field(default_factory=list)  # whether the model wrote each of `ids`
    log_probs: list[float] = field(default_factory=list)  # of the sampled ones
    known: int = 0  # tokens of the prompt and `ids` up to the last answer's end
    entropy: float = 0.0
    ended: bool = False
    turns: list[dict[str, Any]] = field(default_factory=list)
    begun: str = ""  # what the chat template has written of the last answer
    answer: str = ""  # the last one, as the model wrote it
    reward: float | str | None = None  # str: why the environment failed
    tool_calls: int = 0
    failed_tool_calls: int = 0

    def completion(self) -> SampledText:
        return SampledText(self.ids, self.log_probs, self.entropy, self.ended, self.sampled)


class Player:
    """Plays episodes of an environment, all completions of a rollout at the same time, turn by turn."""

    def __init__(
        self, make: Callable[[], Environment], chat: ChatEncoder, decoder: AnswerDecoder, limits: Limits
    ) -> None:
        """
        Args:
            make: makes the environment of an episode.

        Raises:
            UserError: the chat template doesn't show the tools or their results, or its tool calls can't be read.
        """
        self.make, self.chat, self.decoder, self.limits = make, chat, decoder, limits
        environment = make()
        self.name, self.tools = type(played(environment)).__name__, schemas(environment)
        self.thoughts = thought_marks(chat.chat, self.tools or None)
        try:
            if self.tools:
                check_tools(chat.chat, Conversation(_EXAMPLE, self.tools, ""))
            self.reader = reader_of(chat.chat, self.tools) if self.tools else None
            end = chat.replies(self.tools).ends(with_calls=bool(self.tools)).end
        except BadRow as error:
            raise UserError(f"objective.environment: {error.reason}") from None
        # A template may end tool calls with a token of their own, such as gpt-oss's <|call|>.
        self.call_ends = chat.tokenizer(end, add_special_tokens=False)["input_ids"] if self.tools else []
        if self.call_ends:
            self.decoder = AnswerDecoder(chat.tokenizer, [*decoder.left_out, *self.call_ends])

    def words(self) -> str:
        """Describes the episodes for the plan."""
        tools = ", ".join(tool["function"]["name"] for tool in self.tools)
        most = f"up to {self.limits.turns} answers and {self.limits.tokens:,} tokens"
        return f"{self.name}, {most}{', tools ' if tools else ''}{tools}"

    def play(
        self,
        engine: Engine,
        sampling: Sampling,
        prompts: Sequence[PromptRow],
        slots: Sequence[PromptRow],
        keys: Sequence[Sequence[int]],
        seed: int,
    ) -> list[list[Episode]]:
        """Returns an episode for each of the `keys` of each prompt.

        Args:
            slots: of each prompt, the one whose epoch and row seed the environment.

        Raises:
            UserError: a prompt leaves no room for an answer, or the environment is at fault.
        """
        groups = [
            self._begun(prompt, mix64(_EPISODE, seed, slot.epoch, slot.row) >> 1, own)
            for prompt, slot, own in zip(prompts, slots, keys, strict=True)
        ]
        active = [episode for group in groups for episode in group]
        longest = max((len(episode.prompt) for episode in active), default=0)
        if longest + sampling.max_new_tokens > self.limits.tokens:
            needed = f"a prompt of {longest:,} tokens with objective.max_new_tokens={sampling.max_new_tokens}"
            allowed = f"the {self.limits.tokens:,} tokens that the model or objective.max_total_tokens allows"
            raise UserError(f"objective.environment: {needed} exceeds {allowed}: shorten it, or change one of these")
        sampling = sampling._replace(end_ids=tuple(dict.fromkeys([*sampling.end_ids, *self.call_ends])))
        kept: PrefixCache = {}
        for turn in range(self.limits.turns):
            requests = [Request([*e.prompt, *e.ids], mix64(e.key, turn), e.known) for e in active]
            last = turn + 1 == self.limits.turns
            answers = engine.generate(requests, sampling, None if last else kept) if active else []
            found = zip(active, answers, strict=True)
            active = [episode for episode, answer in found if self._goes_on(episode, answer, sampling, last)]
        for episode in (episode for group in groups for episode in group):
            self._end(episode)
        return groups

    def _begun(self, prompt: PromptRow, seed: int, keys: Sequence[int]) -> list[Episode]:
        where = f"prompt {prompt.row + 1}"
        try:
            environments = [self._called(self.make, "__init__") for _ in keys]
            openings = [self._opening(environment, prompt, seed, where) for environment in environments]
            if any(turns != openings[0] for turns in openings):
                found = f"{where}: {self.name}.reset began the completions of one prompt with different messages"
                raise UserError(f"objective.environment: {found}: all that is random follows from the seed it gets")
            own = conversation_of(prompt.columns, self.chat.cfg, where)
            asked = replace(own, messages=[*openings[0], _ANSWER], tools=self.tools or None)
            ids = self.chat.prompt_ids(asked)
        except _Failed as error:  # without a prompt there is nothing to sample from
            raise UserError(f"{where}: {error}") from None
        except BadRow as error:
            raise UserError(f"objective.environment: {error}") from None
        episodes = zip(environments, keys, strict=True)
        return [Episode(environment, ids, key, asked.options) for environment, key in episodes]

    def _opening(self, environment: Environment, prompt: PromptRow, seed: int, where: str) -> list[dict[str, Any]]:
        """Resets an environment and returns the turns that ask for the first answer."""
        said = self._called(lambda: environment.reset(prompt.columns, seed), "reset")
        if said is not None and not isinstance(said, str):
            return turns_of(said, where)
        *turns, _ = conversation_of(prompt.columns, self.chat.cfg, where).messages
        return turns if said is None else [*turns[:-1], {**turns[-1], "content": turns[-1]["content"] + said}]

    def _goes_on(self, episode: Episode, answer: SampledText, sampling: Sampling, last: bool) -> bool:
        """Appends an answer and what the environment says to it; returns whether another answer is sampled."""
        episode.begun = self.thoughts.begun(self.chat.tokenizer, [*episode.prompt, *episode.ids])
        episode.ids += answer.ids
        episode.known = len(episode.prompt) + len(episode.ids)
        episode.sampled += [True] * len(answer.ids)
        episode.log_probs += answer.log_probs
        episode.entropy += answer.entropy
        episode.answer = self.decoder.decode(answer.ids)
        episode.turns.append({"role": "assistant", "content": episode.answer})
        said = self._step(episode, answer.ended)
        if said is None or not answer.ended:
            episode.ended = answer.ended
            return False
        episode.turns += said
        ids = self.chat.reply_ids(said, self.tools, answer.ids[-1], **episode.options)
        if last or len(episode.prompt) + len(episode.ids) + len(ids) + sampling.max_new_tokens > self.limits.tokens:
            return False
        episode.ids += ids
        episode.sampled += [False] * len(ids)
        return True

    def _step(self, episode: Episode, ended: bool) -> list[dict[str, Any]] | None:
        """Executes the tool calls of the last answer and returns the environment's turns after it; None: the end.

        ended: False if the answer was cut off: its reward counts, but its tool calls are not executed.
        """
        environment = episode.environment
        calls: list[Call] = []
        if ended and self.reader is not None:
            calls = execute(episode.begun + episode.answer, environment.tools, self.limits.seconds, self.reader)
        episode.tool_calls += len(calls)
        episode.failed_tool_calls += sum(call.failed for call in calls)
        try:
            said = self._called(lambda: environment.step(episode.answer, calls), "step")
        except _Failed as error:
            episode.reward = str(error)
            return None
        try:
            messages, reward = said
            self._add(episode, reward)
            return None if messages is None else turns_of(messages, "its messages")
        except (TypeError, ValueError, BadRow) as error:
            needed = "a pair is needed, of messages ({role, content}) or None, and a number or None"
            found = f"{self.name}.step returned {said!r:.120}"
            raise UserError(f"objective.environment: {found}: {needed} ({error})") from None

    def _end(self, episode: Episode) -> None:
        if isinstance(episode.reward, str):
            return
        try:
            reward = self._called(episode.environment.get_reward, "get_reward")
        except _Failed as error:
            episode.reward = str(error)
            return
        try:
            self._add(episode, reward)
        except (TypeError, ValueError):
            found = f"{self.name}.get_reward returned {reward!r:.120}"
            raise UserError(f"objective.environment: {found}: a number or None is needed") from None

    @staticmethod
    def _add(episode: Episode, reward: Any) -> None:
        if reward is not None:
            episode.reward = float(episode.reward or 0.0) + float(reward)

    def _called(self, function: Callable[[], Any], name: str) -> Any:
        who = f"{self.name}.{name}"
        try:
            return run_user_code(function, self.limits.seconds)
        except UserError:
            raise
        except TookTooLong:
            raise _Failed(f"{who} took longer than objective.tool_timeout={self.limits.seconds:g} s") from None
        except Exception as error:  # user code may raise anything
            raise _Failed(f"{who} raised {described(error)[:200]}") from None


class _Failed(Exception):
    """Raised with the reason why a call of the environment failed."""


_ANSWER = {"role": "assistant", "content": "..."}
_EXAMPLE = [{"role": "user", "content": "..."}, _ANSWER]


def answers(turns: Sequence[dict[str, Any]]) -> int:
    """Returns how many of the turns are the model's."""
    return sum(turn["role"] == "assistant" for turn in turns)


def played(environment: Environment) -> Any:
    """Returns the user's own object."""
    return environment.played if isinstance(environment, Adapted) else environment


def columns_of(episodes: Sequence[Episode]) -> dict[str, list[Any]]:
    """Returns the columns that rewards get of the episodes besides those of their rows; `environments` as in TRL."""
    return {
        "turns": [e.turns for e in episodes],
        "environment_reward": [e.reward for e in episodes],
        "environments": [played(e.environment) for e in episodes],
    }


def report_of_episode(episode: Episode) -> dict[str, Any]:
    """Returns what is recorded of an episode, in plain containers, which a checkpoint may hold."""
    return {name: getattr(episode, name) for name in PLAYED}


def written(turns: Sequence[dict[str, Any]]) -> str:
    """Returns the turns of an episode as text for people: the model's answers as they are, others with their role."""
    return "\n".join(t["content"] if t["role"] == "assistant" else f"[{t['role']}] {t['content']}" for t in turns)
