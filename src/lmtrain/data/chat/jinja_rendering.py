"""Jinja chat templates: finding them, rendering messages, the tokens that end an answer, and a sandbox.

The sandbox limits the cost of a single operation of a template; jinja2's own sandbox limits only `range`. A single
Python operation (a power with 400 million digits, a text repeated ten billion times) can't be interrupted by the time
limit, so it is refused before it starts. transformers creates its sandbox from a class in its module's namespace;
importing this module replaces that class by BoundedSandbox.
"""

import contextlib
import copy
import itertools
import json
import re
from collections.abc import Iterator
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import jinja2
from jinja2 import TemplateError
from jinja2.runtime import LoopContext
from jinja2.sandbox import ImmutableSandboxedEnvironment
from transformers import PreTrainedTokenizerFast
from transformers.utils import chat_template_utils
from transformers.utils.chat_template_utils import render_jinja_template

from lmtrain.data.chat import TABLES
from lmtrain.data.chat.conversations import Conversation
from lmtrain.data.chat.special_text import special_tokens
from lmtrain.data.chat.time_limits import TookTooLong, time_limit
from lmtrain.data.chat.turns import BadRow
from lmtrain.errors import UserError

ITEMS = 10_000_000  # maximum length of a repeated text or sequence
BITS = 10_000  # maximum number of bits of a product or power of integers
_WIDE = re.compile(r"%[^%a-zA-Z]*(\*|\d{5})")


class LooksAhead(BaseException):
    """Raised in a traced rendering that may depend on later messages; templates' tests catch every Exception."""


class Trace:
    """The messages that a template reads; notes the pieces of text written for each, and so for their beginnings.

    A template that has read nothing but the first i messages so far writes the same for every longer conversation.
    So it may go through the messages once, in order, writing something for each, and read single ones (`messages[0]`)
    up to the current one; whatever else it asks of them raises LooksAhead.

    ends: the ascending numbers of messages of the beginnings, the last of which is all messages.
    """

    def __init__(self, ends: list[int]) -> None:
        self._shortest, self._longest, self._start = ends[0], ends[-1], 0
        self._all: list[Any] = []
        self._pieces: list[str] = []
        self._borders: dict[int, int] = {}  # number of pieces written before each message, and before the rest

    def render(self, template: jinja2.Template, variables: dict[str, Any]) -> str:
        self._all = variables["messages"]
        for piece in template.generate(**variables | {"messages": self}):
            self._pieces.append(piece)
        return "".join(self._pieces)

    def text(self, shown: int) -> str:
        """Returns the text of the first `shown` messages; raises LooksAhead if it doesn't follow from the pieces."""
        borders = self._borders
        if self._longest not in borders or any(a == b for a, b in itertools.pairwise(borders.values())):
            raise LooksAhead
        return "".join(self._pieces[: borders[shown]] + self._pieces[borders[self._longest] :])

    def __iter__(self) -> Iterator[Any]:
        if self._borders or self._start >= self._shortest:
            raise LooksAhead
        for i in range(self._start, self._longest):
            self._borders[i] = len(self._pieces)
            yield self._all[i]
        self._borders[self._longest] = len(self._pieces)

    def __getitem__(self, at: Any) -> Any:
        if isinstance(at, slice) and at.stop is at.step is None and isinstance(at.start, int) and at.start >= 0:
            rest = copy.copy(self)
            rest._start += at.start
            return rest
        current = -1 if self._longest in self._borders else max(self._borders, default=-1)
        if isinstance(at, int) and 0 <= at < max(self._shortest, current + 1) - self._start:
            return self._all[self._start + at]
        raise LooksAhead

    def _refuse(self, *_: object) -> Any:
        raise LooksAhead

    __len__ = __eq__ = __repr__ = _refuse


_trace: ContextVar[Trace | None] = ContextVar("trace", default=None)


class TracedTemplate(jinja2.Template):
    """A template whose `messages` are the Trace in `_trace`, if there is one."""

    def render(self, *args: Any, **variables: Any) -> str:
        trace = _trace.get()
        return super().render(*args, **variables) if trace is None else trace.render(self, variables)


class BoundedSandbox(ImmutableSandboxedEnvironment):
    """A sandbox whose `*`, `**` and `%` raise OverflowError for results larger than ITEMS or BITS allow."""

    intercepted_binops = frozenset({"*", "**", "%"})
    template_class = TracedTemplate

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        if isinstance(obj, LoopContext):  # read for each message by many templates, all its attributes are safe
            if attr in ("last", "nextitem") and _trace.get() is not None:
                raise LooksAhead
            return not attr.startswith("_")
        return super().is_safe_attribute(obj, attr, value)

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        if _too_large(operator, left, right):
            raise OverflowError(f"the result of {operator} would be too large for a chat template")
        return super().call_binop(context, operator, left, right)


def _too_large(operator: str, left: Any, right: Any) -> bool:
    if operator == "%":
        return isinstance(left, str) and bool(_WIDE.search(left))
    if isinstance(left, int) and isinstance(right, int):
        bits = left.bit_length() * abs(right) if operator == "**" else left.bit_length() + right.bit_length()
        return bits > BITS
    items, times = (right, left) if isinstance(left, int) else (left, right)
    return operator == "*" and isinstance(times, int) and hasattr(items, "__len__") and len(items) * times > ITEMS


chat_template_utils.ImmutableSandboxedEnvironment = BoundedSandbox


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
        # What it has counted over the messages may matter behind them, where a Trace doesn't see it.
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
            trace = Trace(ends)
            token = _trace.set(trace)
            try:
                self._rendered([messages[: ends[-1]]], tools, where, **options)
                return [trace.text(end) for end in ends]
            except (LooksAhead, BadRow):
                pass
            finally:
                _trace.reset(token)
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
            if isinstance(error, TypeError) and not self._arguments_in_text and any(map(_has_calls, chats)):
                self._arguments_in_text = True  # DeepSeek's templates join them to other text
                with contextlib.suppress(BadRow):
                    return self._rendered(chats, tools, where, **options)
                self._arguments_in_text = False
            reason = "it takes more memory than there is" if isinstance(error, MemoryError) else str(error)
            raise BadRow(where, f"the chat template ({self.label}) refuses it: {reason}") from None

    def _spelt(self, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Returns messages in the template's form: reasoning under its key, contents as parts, arguments as text."""
        if self._thought:
            messages = [
                {**t, self._thought: t["reasoning_content"]} if "reasoning_content" in t else t for t in messages
            ]
        if self._in_parts:
            messages = [{**turn, "content": [{"type": "text", "text": turn["content"]}]} for turn in messages]
        if self._arguments_in_text:
            messages = [
                {**turn, "tool_calls": [_in_text(call) for call in turn["tool_calls"]]}
                if "tool_calls" in turn
                else turn
                for turn in messages
            ]
        return messages


def _has_calls(messages: list[dict[str, Any]]) -> bool:
    return any("tool_calls" in turn for turn in messages)


def _in_text(call: dict[str, Any]) -> dict[str, Any]:
    """Returns a tool call with its arguments as a text of JSON, as OpenAI's API has them."""
    arguments = json.dumps(call["function"]["arguments"], ensure_ascii=False)
    return {**call, "function": {**call["function"], "arguments": arguments}}


def answers_of(messages: list[dict[str, Any]]) -> list[int]:
    """Returns the positions of the assistant turns."""
    return [i for i, turn in enumerate(messages) if turn["role"] == "assistant"]


def thought_of(turn: dict[str, Any]) -> str:
    """Returns the reasoning of an answer: its reasoning_content, or the part of its content before </think>."""
    if turn.get("reasoning_content"):
        return str(turn["reasoning_content"]).strip()
    before, closed, _ = turn["content"].partition(CLOSE)
    return before.strip().removeprefix(OPEN).strip() if closed else ""


def reads(template: str, variable: str) -> bool:
    """Returns whether a template mentions a variable."""
    return re.search(rf"\b{re.escape(variable)}\b", template) is not None


def with_options(template: str, label: str, options: dict[str, Any], key: str = "data.template_options") -> str:
    """Returns a template with `options`, the value of `key`, as the values of variables that a caller leaves out.

    So whatever renders it later, here or in another program, renders it as in training.

    Raises:
        UserError: the template reads no such variable.
    """
    for name in options:
        if not name.isidentifier() or not reads(template, name):
            raise UserError(f"{key}.{name}: the chat template ({label}) reads no variable of that name")
    said = "".join(
        f"{{%- if {name} is not defined %}}{{%- set {name} = {value!r} %}}{{%- endif %}}"
        for name, value in options.items()
    )
    return f"{said}\n{template}" if said else template  # as transformers renders it, the line's end goes


_FOLDER = Path(__file__).parent / "jinja"
NAMED: dict[str, list[str]] = TABLES["templates"]  # the special tokens that each template writes


def find_template(name: str | None, tokenizer: PreTrainedTokenizerFast) -> tuple[str, str, str | None]:
    """Returns the Jinja text of data.chat_template, its label for messages, and the text for rows with tools, if any.

    Args:
        name: None for the tokenizer's own template, auto for that or else alpaca, one of `NAMED`, or a path to a Jinja
            file.

    Raises:
        UserError: there is no such template, or the tokenizer lacks special tokens of a named template.
    """
    known = ", ".join(sorted(NAMED))
    if name == "auto":
        name = None if tokenizer.chat_template else "alpaca"
    if name is None:
        own: Any = tokenizer.chat_template
        named = own if isinstance(own, dict) else {"default": own}
        if isinstance(named.get("default"), str):
            return named["default"], "the tokenizer's own", named.get("tool_use")
        found = f"{tokenizer.name_or_path}: chat_template of the tokenizer is {own!r:.80}, and no Jinja text"
        if own is None:
            found = "the tokenizer has no chat template"
        elif isinstance(own, dict):
            found = f"the tokenizer has the chat templates {', '.join(own)}, and none for every conversation (default)"
        raise UserError(f"{found}: choose one with data.chat_template ({known}, or a Jinja file)")
    if name not in NAMED:
        path = Path(name).expanduser()
        if not path.is_file():
            raise UserError(f"data.chat_template={name} is neither a file nor one of {known}")
        return path.read_text(encoding="utf-8"), str(path), None
    vocabulary = tokenizer.get_vocab()
    missing = [token for token in NAMED[name] if token not in vocabulary]
    if missing:
        raise UserError(
            f"data.chat_template={name}: the tokenizer has no {' '.join(missing)}: add them with 'tokenizer.add_tokens="
            f"[{','.join(missing)}]', or choose a template that needs none (alpaca, zephyr, vicuna)"
        )
    return (_FOLDER / f"{name}.jinja").read_text(encoding="utf-8"), name, None
