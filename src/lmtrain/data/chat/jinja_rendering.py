"""Renders messages with a Jinja chat template, and knows the tokens that end an answer."""

import contextlib
import json
import re
from typing import Any

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerFast
from transformers.utils.chat_template_utils import render_jinja_template

from lmtrain.data.chat import template_sandbox  # noqa: F401  # which transformers renders in from now on
from lmtrain.data.chat.beginnings import MessageReader, NeedsLaterMessages, reading
from lmtrain.data.chat.conversations import Conversation
from lmtrain.data.chat.special_text import special_tokens
from lmtrain.data.chat.time_limits import TookTooLong, time_limit
from lmtrain.data.chat.turns import BadRow
from lmtrain.errors import UserError

Span = tuple[int, int]  # characters [start, end) of a text
PATIENCE = 10.0  # seconds allowed for one conversation, a thousand times what long ones need
_REMEMBERED = 32  # texts
QUESTION, ANSWER = "lmtrain-question", "lmtrain-answer"  # placeholders for the text of turns
OPEN, CLOSE = "<think>", "</think>"
# Exceptions that a template raises on turns it doesn't support.
_REFUSALS = (TemplateError, TypeError, ValueError, KeyError, ArithmeticError, RecursionError, MemoryError)
_MARKERS = re.compile(r"\{%-?\s*generation\s*-?%\}")


class Endless(UserError):
    """Raised if a template takes too long, which another form of the turns would not change."""


class Template:
    """A Jinja chat template that is rendered with a tokenizer's special tokens.

    Args:
        text: the template.
        label: its name in messages: "chatml", "the tokenizer's own".
        tool_use: the template of conversations with tools, if the tokenizer has another for them.

    Raises:
        UserError: the template can't render a question and its answer, or there is no token to end an answer.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerFast, text: str, label: str, tool_use: str | None = None) -> None:
        self.text, self.label, self.tool_use = text, label, tool_use
        variants = [text, *([tool_use] if tool_use else [])]
        self.has_markers = all(_MARKERS.search(variant) for variant in variants)
        # Special tokens that the tokenizer lacks are rendered as ""; some templates fail on undefined names.
        self._special = dict.fromkeys(("bos_token", "eos_token", "pad_token", "unk_token"), "")
        self._special |= {k: v for k, v in tokenizer.special_tokens_map.items() if isinstance(v, str)}
        # The key under which the template reads an answer's reasoning, if it isn't reasoning_content; "" for none.
        every = "\n".join(variants)
        keys = () if "reasoning_content" in every else ("thinking", "reasoning")
        self._thought = next((key for key in keys if re.search(rf"message\W+(get\W+)?{key}\b", every)), "")
        self.special_tokens = special_tokens(tokenizer)
        # What it has counted over the messages may matter behind them, where a MessageReader doesn't see it.
        self._keeps_state = bool(re.search(r"\b(namespace|cycler|joiner)\b", every))
        self._in_parts = self._arguments_in_text = False
        self._known: dict[str, str] = {}  # texts by what they were rendered from
        try:
            self.end_of_turn, self.after_turn = self._end_of_turn()
        except Endless:
            raise
        except UserError as error:  # multimodal models' templates may take contents only as lists of parts
            self._in_parts, self._known = True, {}
            try:
                self.end_of_turn, self.after_turn = self._end_of_turn()
            except UserError:
                raise error from None
        # Without an end-of-turn token in the template, the tokenizer's end-of-text token ends the last answer.
        self.added_end = "" if self.end_of_turn else tokenizer.eos_token
        if not self.end_of_turn and not self.added_end:
            found = f"the chat template ({label}) writes no special token after an answer"
            raise UserError(f"{found}, nor has the tokenizer an end of text: choose another with data.chat_template")

    def prompt(self, messages: list[dict[str, Any]], tools: Any, where: str, ask: bool = True, **options: Any) -> str:
        """Renders the messages with the generation prompt, or without it if `ask` is false."""
        return self.render_texts([messages], tools, where, add_generation_prompt=ask, **options)[0]

    def differs(self, one: Conversation, other: Conversation, shown: int) -> bool:
        """Returns whether the first `shown` messages of two conversations render differently, or one is refused."""
        try:
            texts = [self.render_texts([c.messages[:shown]], c.tools, c.where, **c.options)[0] for c in (one, other)]
        except BadRow:
            return True
        return texts[0] != texts[1]

    def _end_of_turn(self) -> tuple[str, str]:
        """Returns the text after every answer up to and including the first special token, and the text after that."""
        asked = [{"role": "user", "content": QUESTION}, {"role": "assistant", "content": ANSWER}]
        try:
            (text,) = self.render_texts([asked], None, "")
        except BadRow as error:
            raise UserError(f"chat template ({self.label}) can't render question and answer: {error.reason}") from None
        before, found, suffix = text.rpartition(ANSWER)
        if not found or QUESTION not in before:
            raise UserError(f"the chat template ({self.label}) doesn't write out the turns of a conversation")
        ends = re.search("|".join(map(re.escape, self.special_tokens)), suffix) if self.special_tokens else None
        return (suffix[: ends.end()], suffix[ends.end() :]) if ends else ("", suffix)

    def render_texts(self, chats: list[list[dict[str, Any]]], tools: Any, where: str, **options: Any) -> list[str]:
        """Renders each list of messages; `options` are variables of the template and add_generation_prompt.

        The last texts are remembered: both answers of a pair share a prompt, and a last answer ends the whole.
        """
        keys = [repr((messages, tools, options)) for messages in chats]
        new = {key: messages for key, messages in zip(keys, chats, strict=True) if key not in self._known}
        rendered = self._rendered(list(new.values()), tools, where, **options)[0] if new else []
        known = dict(zip(new, rendered, strict=True))
        texts = [known[key] if key in known else self._known[key] for key in keys]
        self._known = known if len(self._known) > _REMEMBERED else self._known | known
        return texts

    def render_beginnings(
        self, messages: list[dict[str, Any]], ends: list[int], tools: Any, where: str, **options: Any
    ) -> list[str]:
        """Renders messages[:end] for each of the ascending `ends`, all at once where the template allows it."""
        if len(ends) > 1 and not self._keeps_state:
            reader = MessageReader(ends)
            with contextlib.suppress(NeedsLaterMessages, BadRow), reading(reader):
                self._rendered([messages[: ends[-1]]], tools, where, **options)
                return [reader.text(end) for end in ends]
        return self.render_texts([messages[:end] for end in ends], tools, where, **options)

    def render_marked(
        self, messages: list[dict[str, Any]], tools: Any, where: str, **options: Any
    ) -> tuple[str, list[Span]]:
        """Renders the messages; also returns the spans marked with {% generation %}, if the template has markers."""
        if not self.has_markers:
            return self.render_texts([messages], tools, where, **options)[0], []
        (text,), (marked,) = self._rendered([messages], tools, where, return_assistant_tokens_mask=True, **options)
        return text, [(start, end) for start, end in marked]

    def _rendered(self, chats: list[list[dict[str, Any]]], tools: Any, where: str, **options: Any) -> tuple[Any, Any]:
        """Returns the result of render_jinja_template.

        Raises:
            BadRow: the template refuses the turns.
            Endless: rendering takes more than PATIENCE seconds.
        """
        try:
            with time_limit(PATIENCE):
                spelt = [self._spelt(messages) for messages in chats]
                text = self.tool_use if tools and self.tool_use else self.text
                return render_jinja_template(
                    conversations=spelt, tools=tools, chat_template=text, **self._special, **options
                )
        except TookTooLong:
            found = f"{where + ': ' if where else ''}the chat template ({self.label}) has not rendered a conversation"
            advice = "it loops too often: choose another with data.chat_template"
            raise Endless(f"{found} after {PATIENCE:g} seconds; {advice}") from None
        except _REFUSALS as error:
            has_calls = any("tool_calls" in turn for turns in chats for turn in turns)
            if isinstance(error, TypeError) and has_calls and not self._arguments_in_text:
                self._arguments_in_text = True  # DeepSeek's templates join them to other text
                with contextlib.suppress(BadRow):
                    return self._rendered(chats, tools, where, **options)
                self._arguments_in_text = False
            reason = "it takes more memory than there is" if isinstance(error, MemoryError) else str(error)
            raise BadRow(where, f"the chat template ({self.label}) refuses it: {reason}") from None

    def _spelt(self, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Returns messages in the template's form: reasoning under its key, contents as parts, arguments as text."""
        thought, key = self._thought, "reasoning_content"
        if thought:
            messages = [{**turn, thought: turn[key]} if key in turn else turn for turn in messages]
        if self._in_parts:
            messages = [{**turn, "content": [{"type": "text", "text": turn["content"]}]} for turn in messages]
        return [_with_text(turn) for turn in messages] if self._arguments_in_text else messages


def _with_text(turn: dict[str, Any]) -> dict[str, Any]:
    """Returns a turn with the arguments of its tool calls as a text of JSON, as OpenAI's API has them."""
    calls = []
    for call in turn.get("tool_calls", ()):
        arguments = json.dumps(call["function"]["arguments"], ensure_ascii=False)
        calls.append({**call, "function": {**call["function"], "arguments": arguments}})
    return {**turn, "tool_calls": calls} if calls else turn


def answers_of(messages: list[dict[str, Any]]) -> list[int]:
    """Returns the positions of the assistant turns."""
    return [i for i, turn in enumerate(messages) if turn["role"] == "assistant"]


def thought_of(turn: dict[str, Any]) -> str:
    """Returns the reasoning of an answer: its reasoning_content, or the part of its content before </think>."""
    if turn.get("reasoning_content"):
        return str(turn["reasoning_content"]).strip()
    before, closed, _ = turn["content"].partition(CLOSE)
    return before.strip().removeprefix(OPEN).strip() if closed else ""
