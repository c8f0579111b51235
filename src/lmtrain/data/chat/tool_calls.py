"""Reads the tool calls in an answer, in the format in which its chat template writes them (found by call_formats.py).

A call stands between the marks of its format, in which white space may differ from the template's. What looks like a
call inside a thought is none.
"""

import contextlib
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

from lmtrain.data.chat.arguments import Schema, typed, value_of
from lmtrain.data.chat.thoughts import ThoughtMarks


class ToolCall(NamedTuple):
    """A tool call that a model asks for; one that can't be read has the name "" and its text as arguments."""

    name: str
    arguments: Any
    id: str = ""  # as the model wrote it, for a template whose results refer to it (Mistral's)


Found = tuple[list[ToolCall], int]  # calls, and the position after them

_TRIES = 100  # places at which a value is tried to end
_NAME, _KEY = r"[\w.:/-]+", r"[\w.-]+"
_TAG = re.compile(r"<[^<>]+>|\[[A-Z_/]+\]")
_LLAMA = "<|python_tag|>"  # may precede Llama 3's objects, though its template writes none


class Untyped(str):
    """The text of an argument whose type only the tool's schema says."""


@dataclass(frozen=True)
class Objects:
    """JSON objects with name and arguments, one after another or in a list: <tool_call>{"name", "arguments"}."""

    opening: str
    closing: str = ""

    def read(self, text: str, at: int) -> Found | None:
        """Returns the calls after an opening that ends at position `at`, or None if they can't be read."""
        calls: list[ToolCall] = []
        while text[at : at + 1] in ("{", "["):
            try:
                value, at = json.JSONDecoder().raw_decode(text, at)
            except (ValueError, RecursionError):
                return None
            found = [_of_object(call) for call in (value if isinstance(value, list) else [value])]
            calls += [call for call in found if call is not None]
            if None in found:
                return None
            at = len(text) - len(text[at:].lstrip(" \n\t,;"))
        return (calls, at) if calls else None


@dataclass(frozen=True)
class NamedJSON:
    """A name and then a JSON object of arguments: [TOOL_CALLS]name[ARGS]{...}."""

    opening: str
    middle: str  # between name and arguments
    closing: str = ""

    def read(self, text: str, at: int) -> Found | None:
        """As that of `Objects`."""
        found = re.compile(rf"({_NAME}+)([^{{}}]*)").match(text, at)
        # What begins a call in gpt-oss, "to=functions.", may also be prose, unless <|message|> follows.
        tags = [] if _TAG.search(self.opening) else _TAG.findall(self.middle)[-1:]
        if not found or any(tag not in found[2] for tag in tags):
            return None
        try:
            arguments, end = json.JSONDecoder().raw_decode(text, found.end())
        except (ValueError, RecursionError):
            return None
        return [ToolCall(found[1], arguments)], end


@dataclass(frozen=True)
class NamedPairs:
    """A name and then keys with values: <function=name><parameter=key>value</parameter></function>, name(key='text').

    A value ends where an argument or the call's end follows it and where what is before that mark reads as a value.

    Attributes:
        middle: between name and first key.
        empty: what follows the name of a call without arguments.
        before_text, before_value: between a key and its text, or its value of another type.
        quote: what ends a text.
        escapes: how characters of a text are escaped: "json", "python" or "none".
        comma: between two arguments.
        closing: what ends a call.
        joint: between two calls after one opening; None if each call has an opening of its own.
        tail: what follows the last call after an opening.
    """

    opening: str
    middle: str
    empty: str
    before_text: str
    before_value: str
    comma: str
    closing: str
    quote: str = ""
    escapes: str = "none"
    joint: str | None = None
    tail: str = ""

    def read(self, text: str, at: int) -> Found | None:
        """As that of `Objects`."""
        calls: list[ToolCall] = []
        while found := self._call(text, at):
            call, at = found
            calls.append(call)
            more = self._joint.match(text, at)
            if not more:
                return calls, at
            at = more.end()
        return None

    def _call(self, text: str, at: int) -> tuple[ToolCall, int] | None:
        name, arguments = self._name.match(text, at), dict[str, Any]()
        if not name or name["empty"] is not None:
            return (ToolCall(name[1], arguments), name.end()) if name else None
        after: re.Match[str] = name
        while key := self._key.match(text, after.end()):
            found = self._value(text, key.end(), is_text=key["text"] is not None)
            if found is None:
                return None
            arguments[key[1]], after = found
            if after["last"] is not None:
                return ToolCall(name[1], arguments), after.end()
        return None

    def _value(self, text: str, at: int, is_text: bool) -> tuple[Any, re.Match[str]] | None:
        """Returns the value that begins at a position, and the mark after it."""
        after, read = (self._after_text, self._text) if is_text else (self._after_value, self._other)
        start = at
        for _ in range(_TRIES):
            found = after.search(text, start)
            if not found:
                break
            with contextlib.suppress(ValueError):
                return read(text[at : found.start()]), found
            start = found.start() + 1
        return None

    def _text(self, text: str) -> str:
        if self.before_text == self.before_value:
            return Untyped(text)
        if self.escapes == "none":
            return text
        mark = self.before_text[-1]
        return str(json.loads(f'"{text}"', strict=False) if self.escapes == "json" else value_of(mark + text + mark))

    def _other(self, text: str) -> Any:
        return value_of(text.strip(), self.quote or '"')

    @cached_property
    def _name(self) -> re.Pattern[str]:
        empty = rf"{_ending(self.empty)}(?:{_loose(self.tail)})?"
        return re.compile(rf"({_NAME}?)(?:(?P<empty>{empty})|{_loose(self.middle)})")

    @cached_property
    def _joint(self) -> re.Pattern[str]:
        return re.compile(r"(?!)" if self.joint is None else rf"{_loose(self.joint)}(?={_NAME})")

    @cached_property
    def _key(self) -> re.Pattern[str]:
        text, value = (_loose(mark, after_key=True) for mark in (self.before_text, self.before_value))
        return re.compile(rf"({_KEY}?)(?:(?P<text>{text})|{value})")

    @cached_property
    def _after_text(self) -> re.Pattern[str]:
        return self._after(self.quote)

    @cached_property
    def _after_value(self) -> re.Pattern[str]:
        return self._after("")

    def _after(self, quote: str) -> re.Pattern[str]:
        more = rf"{_loose(quote + self.comma, after_value=True)}(?={self._key.pattern.replace('?P<text>', '?:')})"
        last = _ending(quote + self.closing + self.tail, after_value=True)
        if self.joint is not None:
            last += rf"|{_loose(quote + self.closing, after_value=True)}(?={_loose(self.joint)}{_NAME}|\s*\Z)"
        return re.compile(f"{more}|(?P<last>{last})")


CallFormat = Objects | NamedJSON | NamedPairs


def _loose(mark: str, after_key: bool = False, after_value: bool = False) -> str:
    """Returns a pattern of a mark, with any white space where the mark has some.

    Next to a value, white space may be the value's: there is as much as the mark has, or none.

    Args:
        after_key: a value follows the mark.
        after_value: a value precedes it.
    """
    parts = mark.split()
    if not parts:
        return r"\s*"
    before, after = mark[: mark.index(parts[0])], mark[mark.rindex(parts[-1]) + len(parts[-1]) :]
    start = f"(?:{re.escape(before)})?" if after_value else r"\s*" * bool(before)
    end = f"(?:{re.escape(after)})?" if after_key else r"\s*" * bool(after)
    return start + r"\s*".join(map(re.escape, parts)) + end


def _ending(mark: str, after_value: bool = False) -> str:
    """Returns a pattern of a mark that ends a call, or of its beginning if nothing follows, as where it was cut off."""
    first, *rest = re.findall(r"\s*(?:<[^<>]*>|[^\s<]+|<)", mark) or [mark]
    whole, some = "".join(rf"\s*{_loose(part)}" for part in rest), ""
    for part in reversed(rest):
        some = rf"(?:\s*{_loose(part)}{some})?"
    return rf"{_loose(first, after_value=after_value)}(?:{whole}|{some}\s*\Z)"


def _of_object(call: Any) -> ToolCall | None:
    """Returns the call that a JSON object holds, also in OpenAI's form, where arguments are a text of JSON, or None."""
    given = call.get("function", call) if isinstance(call, dict) else None
    given = given if isinstance(given, dict) else {}
    name = given.get("name", given.get("tool_name"))
    if not isinstance(name, str):
        return None
    arguments = given.get("arguments", given.get("parameters", {}))
    own_id = call.get("id", call.get("tool_call_id", ""))
    with contextlib.suppress(ValueError, RecursionError):
        arguments = json.loads(arguments) if isinstance(arguments, str) else arguments
    return ToolCall(name, arguments, own_id if isinstance(own_id, str) else "")


@dataclass(frozen=True)
class CallReader:
    """Reads the calls in what a model wrote.

    Attributes:
        schemas: JSON schemas of the parameters of tools, by name; they tell the types of what is written without them.
        example: a call as it should be written, for the model.
    """

    format: CallFormat
    schemas: Mapping[str, Schema]
    thoughts: ThoughtMarks
    example: str

    def calls(self, text: str) -> list[ToolCall]:
        """Returns the calls in an assistant's turn.

        text: the turn from its start, with what the chat template has already written of it.
        """
        return [call._replace(arguments=self._typed(call.name, call.arguments)) for call in self._found(text)]

    def parameters(self, name: str) -> Mapping[str, Schema]:
        """Returns the schemas of a tool's parameters; {} for an unknown tool."""
        return self.schemas.get(name, {}).get("properties", {})

    def _found(self, text: str) -> Iterator[ToolCall]:
        at, opening = 0, self.format.opening.strip()
        if not re.search(r"\w", opening):  # not to be told from other text, unless nothing else is in the answer
            yield from self._bare(text, opening)
            return
        mark = _TAG.findall(opening)[-1:] or ([opening] if isinstance(self.format, Objects) else [])
        pattern = re.compile("|".join([rf"(?P<opening>{_loose(opening)}\s*)", *map(re.escape, mark)]))
        while found := self._next(pattern, text, at):
            at = found.end()
            read = self.format.read(text, at) if found["opening"] else None
            if read:
                calls, at = read
                yield from calls
            elif mark:  # without one, it is prose
                closing = self.format.closing.split()[-1:]
                end = text.find(closing[0], at) if closing else -1
                end = end if end >= 0 else len(text)
                yield ToolCall("", text[at:end].strip())
                at = end

    def _bare(self, text: str, opening: str) -> Iterator[ToolCall]:
        """Yields the calls of an answer that is nothing else, apart from its thought."""
        said = text.lstrip()
        if said.startswith(self.thoughts.opening):
            said = said.partition(self.thoughts.closing)[2]
        _, marked, after = said.partition(_LLAMA)
        said = (after if marked else said).strip()
        read = self.format.read(said, len(opening)) if said.startswith(opening) else None
        if read and not said[read[1] :].strip():
            yield from read[0]
        elif marked:
            yield ToolCall("", said)

    def _next(self, pattern: re.Pattern[str], text: str, at: int) -> re.Match[str] | None:
        """Returns the next place where a pattern is found outside of thoughts."""
        while True:
            found, thought = pattern.search(text, at), text.find(self.thoughts.opening, at)
            if not found or thought < 0 or found.start() < thought:
                return found
            at = text.find(self.thoughts.closing, thought)
            if at < 0:
                return None

    def _typed(self, name: str, arguments: Any) -> Any:
        if not isinstance(arguments, dict):
            return arguments
        known = self.parameters(name)
        return {
            key: typed(str(value), known.get(key, {})) if isinstance(value, Untyped) else value
            for key, value in arguments.items()
        }
