"""Renders messages with a Jinja chat template and finds the tokens that end an answer."""

import contextlib
import re
import signal
import threading
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerFast
from transformers.utils.chat_template_utils import render_jinja_template

from lmtrain.data.chat import sandbox  # noqa: F401  the renderer's bounds
from lmtrain.data.chat.conversations import Conversation
from lmtrain.data.chat.special_text import special_tokens
from lmtrain.data.chat.turns import BadRow
from lmtrain.errors import UserError

Span = tuple[int, int]  # characters [start, end) of a text
PATIENCE = 10.0  # seconds for one conversation, a thousand times what long ones need
QUESTION, ANSWER = "lmtrain-question", "lmtrain-answer"  # stand where a template puts the turns' text
OPEN, CLOSE = "<think>", "</think>"
_REFUSALS = (
    TemplateError,
    TypeError,
    ValueError,
    KeyError,
    ArithmeticError,
    RecursionError,
    MemoryError,
)  # what a template raises on turns it isn't made for
_MARKERS = re.compile(r"\{%-?\s*generation\s*-?%\}")


class _TooLong(BaseException):
    """Raised in a template that takes too long; no Exception, which the libraries between may catch."""


class Endless(UserError):
    """A template that takes too long, in whichever way it is given the turns."""


def _too_long(*_: object) -> None:
    raise _TooLong


class Template:
    """A Jinja chat template at work with a tokenizer's special tokens.

    Args:
        text: the template.
        label: what messages call it: "chatml", "the tokenizer's own".

    Raises:
        UserError: the template can't render a question and its answer, or nothing could end an answer.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerFast, text: str, label: str) -> None:
        self.text, self.label = text, label
        self.has_markers = bool(_MARKERS.search(text))
        # A tokenizer without one of these writes nothing there; some templates fail where the name is unknown.
        self._special = dict.fromkeys(("bos_token", "eos_token", "pad_token", "unk_token"), "")
        self._special |= {k: v for k, v in tokenizer.special_tokens_map.items() if isinstance(v, str)}
        self._thought = "" if "reasoning_content" in text else _thought_key(text)
        self.special_tokens = special_tokens(tokenizer)
        self._in_parts = False
        try:
            self.end_of_turn, self.after_turn = self._end_of_turn()
        except Endless:
            raise
        except UserError as error:  # those of models that also see images may take contents in parts alone
            self._in_parts = True
            try:
                self.end_of_turn, self.after_turn = self._end_of_turn()
            except UserError:
                raise error from None
        # A template without an end-of-turn token: the tokenizer's end of text ends the last answer.
        self.added_end = "" if self.end_of_turn else tokenizer.eos_token
        if not self.end_of_turn and not self.added_end:
            raise UserError(
                f"the chat template ({label}) writes no special token after an answer and the tokenizer has no end of "
                f"text, so the model could never learn to stop: choose another with data.chat_template"
            )

    def prompt(self, messages: list[dict[str, Any]], tools: Any, where: str) -> str:
        """The text up to and including the words that ask for an answer."""
        return self.render_texts([messages], tools, where, add_generation_prompt=True)[0]

    def differs(self, one: Conversation, other: Conversation, shown: int) -> bool:
        """Whether the first `shown` messages of two conversations read otherwise, or the template refuses the other."""
        try:
            texts = [self.render_texts([c.messages[:shown]], c.tools, c.where)[0] for c in (one, other)]
        except BadRow:
            return True
        return texts[0] != texts[1]

    def _end_of_turn(self) -> tuple[str, str]:
        """What is written after every answer up to its first special token, and what comes after that token."""
        asked = [{"role": "user", "content": QUESTION}, {"role": "assistant", "content": ANSWER}]
        try:
            (text,) = self.render_texts([asked], None, "")
        except BadRow as error:
            raise UserError(
                f"the chat template ({self.label}) can't render a question and its answer: {error.reason}"
            ) from None
        before, found, suffix = text.rpartition(ANSWER)
        if not found or QUESTION not in before:
            raise UserError(f"the chat template ({self.label}) doesn't write out the turns of a conversation")
        ends = re.search("|".join(map(re.escape, self.special_tokens)), suffix) if self.special_tokens else None
        return (suffix[: ends.end()], suffix[ends.end() :]) if ends else ("", suffix)

    def render_texts(
        self,
        chats: list[list[dict[str, Any]]],
        tools: Any,
        where: str,
        add_generation_prompt: bool = False,
        more: Mapping[str, Any] = MappingProxyType({}),
    ) -> list[str]:
        try:
            with self._in_time(where):
                texts, _ = render_jinja_template(
                    conversations=[self._spelt(messages) for messages in chats],
                    tools=tools,
                    chat_template=self.text,
                    add_generation_prompt=add_generation_prompt,
                    **self._special,
                    **more,
                )
        except _REFUSALS as error:
            raise BadRow(where, f"the chat template ({self.label}) refuses it: {_reason(error)}") from None
        return texts

    @contextlib.contextmanager
    def _in_time(self, where: str) -> Iterator[None]:
        """Ends a template that loops on and on; in the main thread, the only one that can be interrupted."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = signal.signal(signal.SIGALRM, _too_long)
        signal.setitimer(signal.ITIMER_REAL, PATIENCE)
        try:
            yield
        except _TooLong:
            raise Endless(
                f"{where + ': ' if where else ''}the chat template ({self.label}) has not rendered a conversation "
                f"after {PATIENCE:g} seconds; it loops too often: choose another with data.chat_template"
            ) from None
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)

    def _spelt(self, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """As the template reads them: thoughts under its name for them, contents in parts where it takes no text."""
        if self._thought:
            messages = [
                {**t, self._thought: t["reasoning_content"]} if "reasoning_content" in t else t for t in messages
            ]
        if self._in_parts:
            messages = [{**turn, "content": [{"type": "text", "text": turn["content"]}]} for turn in messages]
        return messages

    def render_marked(self, messages: list[dict[str, Any]], tools: Any, where: str) -> tuple[str, list[Span]]:
        """The whole text and, for templates with markers, the spans they mark."""
        if not self.has_markers:
            return self.render_texts([messages], tools, where)[0], []
        try:
            with self._in_time(where):
                (text,), (marked,) = render_jinja_template(
                    conversations=[self._spelt(messages)],
                    tools=tools,
                    chat_template=self.text,
                    return_assistant_tokens_mask=True,
                    **self._special,
                )
        except _REFUSALS as error:
            raise BadRow(where, f"the chat template ({self.label}) refuses it: {_reason(error)}") from None
        return text, [(start, end) for start, end in marked]


def _reason(error: BaseException) -> str:
    return "it takes more memory than there is" if isinstance(error, MemoryError) else str(error)


def answers_of(messages: list[dict[str, Any]]) -> list[int]:
    """Positions of the assistant turns."""
    return [i for i, turn in enumerate(messages) if turn["role"] == "assistant"]


def thought_of(turn: dict[str, Any]) -> str:
    """What an answer thinks before it speaks: its reasoning_content, or what its content has before </think>."""
    if turn.get("reasoning_content"):
        return str(turn["reasoning_content"]).strip()
    before, closed, _ = turn["content"].partition(CLOSE)
    return before.strip().removeprefix(OPEN).strip() if closed else ""


def _thought_key(text: str) -> str:
    """What a template calls an answer's thought."""
    return next((key for key in ("thinking", "reasoning") if re.search(rf"message\W+(get\W+)?{key}\b", text)), "")
