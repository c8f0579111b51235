"""Finds the format in which a chat template writes tool calls, and tries to read back what the template renders.

Known calls are rendered, and the text around their names, keys and values is the format's marks.
"""

import json
import re
from collections.abc import Sequence
from functools import cached_property
from typing import Any

from lmtrain.data.chat.arguments import Schema, value_of
from lmtrain.data.chat.jinja_rendering import ANSWER, QUESTION, Template
from lmtrain.data.chat.special_text import pattern_of
from lmtrain.data.chat.thoughts import thought_marks
from lmtrain.data.chat.tool_calls import CallFormat, CallReader, NamedJSON, NamedPairs, Objects, ToolCall
from lmtrain.data.chat.turns import BadRow, common
from lmtrain.errors import UserError

Tools = list[dict[str, Any]]
Pair = tuple[str, Any]  # name and arguments of a call

_ONE, _TWO, _KEY, _MORE, _TEXT = "lmtrain_one", "lmtrain_two", "lmtrain_key", "lmtrain_more", "lmtrain-value"
_NUMBER, _OTHER = 12345678, 87654321
_ESCAPED = "a'b\"c\\d\ne"
_HARD = 'It\'s "1", {2}\n<b> = c: (d)'


class Unreadable(Exception):
    """Raised with the text of a rendered call that can't be read."""


def calls_turn(calls: Sequence[Pair]) -> dict[str, Any]:
    """Returns an assistant's turn that makes tool calls, with ids as Mistral's templates want them."""
    made = [
        {"type": "function", "id": f"lmtrain{i:02d}", "function": {"name": name, "arguments": arguments}}
        for i, (name, arguments) in enumerate(calls)
    ]
    return {"role": "assistant", "content": "", "tool_calls": made}


def reader_of(template: Template, tools: Tools) -> CallReader:
    """Returns the reader of the calls of `tools` that a model writes with this chat template.

    Raises:
        UserError: calls of the tools, as the template renders them, can't be read back.
    """
    schemas = {tool["function"]["name"]: tool["function"].get("parameters", {}) for tool in tools}
    # Two calls of each tool, one with values that are hard to read back.
    calls = [
        (name, {key: sample(s, hard) for key, s in schema.get("properties", {}).items()})
        for name, schema in schemas.items()
        for hard in (False, True)
    ]
    who = f"objective.environment: the chat template ({template.label})"
    other = "choose another template with data.chat_template, such as chatml"
    try:
        rendered = _Rendered(template, tools)
        format = rendered.format()
        example = rendered.ended(rendered.whole(calls[:1]), format.closing)
        reader = CallReader(format, schemas, rendered.thoughts, example)
        # Alone, together if the template writes several, and after a thought.
        tried = [*([call] for call in calls), *([calls] if rendered.several else [])]
        texts = [rendered.ended(rendered.turn(some), format.closing) for some in tried]
        thinking = rendered.turn(calls[:1], reasoning_content="lmtrain-thought")
        texts.append(rendered.ended(thinking, format.closing))
        for some, text in zip([*tried, calls[:1]], texts, strict=True):
            if _plain(reader.calls(text)) != _plain(some):
                raise Unreadable(text)
    except Unreadable as error:
        shown = f"{who} writes a tool call as {str(error)!r:.300}"
        raise UserError(f"{shown}, which can't be read back, so the model's calls would be lost: {other}") from None
    except BadRow as error:
        raise UserError(f"objective.environment: {error.reason} (a tool call): {other}") from None
    return reader


def call_format(template: Template, tools: Tools | None) -> CallFormat:
    """Returns the format in which a template writes calls.

    Raises:
        Unreadable: it is none of those of tool_calls.py.
        BadRow: the template refuses calls.
    """
    return _Rendered(template, tools).format()


def sample(schema: Schema, hard: bool) -> Any:
    """Returns a value that a schema allows; a `hard` one has quotes and brackets, or is null if that is allowed."""
    if "enum" in schema:
        return schema["enum"][-1 if hard else 0]
    kinds = schema.get("type", schema.get("anyOf", [{}])[0].get("type", "string"))
    kind = kinds if isinstance(kinds, str) else kinds[0]
    if hard and schema.get("nullable"):
        return None
    if kind == "array":
        return [sample(items, hard) for items in schema.get("prefixItems", [schema.get("items", {})])]
    if kind == "object":
        properties = schema.get("properties", {"some": schema.get("additionalProperties", {})})
        return {key: sample(value, hard) for key, value in properties.items()}
    plain = {"string": "Oslo", "integer": 7, "number": 2.5, "boolean": True, "null": None}
    return {**plain, "string": _HARD, "integer": -12, "boolean": False}[kind] if hard else plain[kind]


def _plain(calls: Sequence[Pair | ToolCall]) -> str:
    return json.dumps([call[:2] for call in calls], sort_keys=True)


class _Rendered:
    """Calls as a template renders them, and the marks that it writes around their parts."""

    def __init__(self, template: Template, tools: Tools | None) -> None:
        self.template, self.tools = template, tools
        self.thoughts = thought_marks(template, tools)
        self.answer = self._text({"role": "assistant", "content": ANSWER})
        try:
            self.two = self.whole([(_ONE, {_KEY: _NUMBER}), (_TWO, {_KEY: _OTHER})])
        except BadRow:  # it allows only one
            self.two = ""

    @property
    def several(self) -> bool:
        """Whether an answer may have several calls."""
        return _TWO in self.two

    def whole(self, calls: Sequence[Pair]) -> str:
        """Returns the text of calls from where it differs from an answer without calls, with what ends the turn."""
        text = self._text(calls_turn(calls))
        return text[common(text, self.answer) :]

    def turn(self, calls: Sequence[Pair], **more: str) -> str:
        """Returns the text of a turn with calls from where the prompt ends; `more` are further keys of the turn."""
        asked = {"role": "user", "content": QUESTION}
        prompt, text = self.template.prompt([asked], self.tools, ""), self._text({**calls_turn(calls), **more})
        return text[common(prompt, text) :]

    def format(self) -> CallFormat:
        """Returns the format of calls; raises Unreadable if it is none of those of tool_calls.py."""
        text = self.whole([(_ONE, {_KEY: _TEXT})])
        for at in (found.start() for found in re.finditer(r"[{\[]", text)):
            read = Objects("").read(text, at)
            if read and [call[:2] for call in read[0]] == [(_ONE, {_KEY: _TEXT})]:
                return self._objects(text[:at], text[read[1] :])
        key = text.find(_KEY)
        name = text.rfind(_ONE, 0, key)
        if min(key, name) < 0:
            raise Unreadable(text)
        head, rest = text[:name], text[name + len(_ONE) :]
        try:
            _, end = json.JSONDecoder().raw_decode(rest, rest.index("{"))
        except ValueError:
            return self._pairs(head)
        return self._named_json(head, rest[: rest.index("{")], rest[end:])

    def _objects(self, head: str, rest: str) -> Objects:
        first = Objects("").read(self.two, len(head)) if self.several else None
        between = self.two[first[1] : self.two.index(_TWO)] if first and len(first[0]) == 1 else ""
        return Objects(self._opening(head, between[: between.rfind("{")]), self._closing(rest, between))

    def _named_json(self, head: str, middle: str, rest: str) -> NamedJSON:
        between = self.two[self.two.find(str(_NUMBER)) + len(str(_NUMBER)) + 1 : self.two.rfind(_TWO)]
        return NamedJSON(self._opening(head, between), middle, self._closing(rest, between))

    def _pairs(self, head: str) -> NamedPairs:
        text, number, escaped = (self._after_name({_KEY: value}) for value in (_TEXT, _NUMBER, _ESCAPED))
        middle, _, after_key = number.partition(_KEY)
        before_value, found, rest = after_key.partition(str(_NUMBER))
        before_text, said, after_text = text.partition(_KEY)[2].partition(_TEXT)
        comma, more, _ = self._after_name({_KEY: _NUMBER, _MORE: _OTHER}).partition(str(_NUMBER))[2].partition(_MORE)
        if not (found and said and more and after_text.endswith(rest)):
            raise Unreadable(head + _ONE + text)
        quote = after_text[: len(after_text) - len(rest)]
        between = self.two[self.two.find(str(_NUMBER)) + len(str(_NUMBER)) : self.two.rfind(_TWO)]
        closing = self._closing(rest, between)
        opening, joint = self._opening(head, between), between[len(closing) :]
        shared = self.several and opening.strip() != joint.strip()[-len(opening.strip()) :]
        tail = self.ended(rest, closing)[len(closing) :]
        inner = escaped[len(middle + _KEY + before_text) : len(escaped) - len(after_text)]
        return NamedPairs(
            opening, middle, self.ended(self._after_name({}), closing).removesuffix(tail), before_text, before_value,
            comma, closing, quote, _escapes(inner, before_text), joint if shared else None, tail if shared else "",
        )  # fmt: skip

    def _after_name(self, arguments: dict[str, Any]) -> str:
        text = self.whole([(_ONE, arguments)])
        key = text.find(_KEY) if arguments else len(text)
        return text[text.rfind(_ONE, 0, key) + len(_ONE) :]

    def _opening(self, head: str, between: str) -> str:
        """Returns what begins a call: the text before the first, or the end of it if that begins the second too."""
        head = head.rpartition(_ONE)[2].rpartition(self.thoughts.closing)[2].strip()
        shared = common(head[::-1], between.rpartition(_TWO)[2].rstrip()[::-1])
        return head[len(head) - shared :] if head[len(head) - shared :].strip() else head

    def _closing(self, rest: str, between: str) -> str:
        """Returns what ends a call: the text after it, without what ends the turn or only comes after the last call."""
        if not between:
            return self.ended(rest)
        same = common(rest, between)
        cut = [found.start() for found in self._special.finditer(rest) if found.start() < same < found.end()]
        return rest[: cut[0] if cut else same]

    def ended(self, text: str, closing: str = "") -> str:
        """Returns a text without what ends the turn: the token that ends answers, or another special token.

        closing: what ends a call; it may itself end with a special token.
        """
        end = self.template.end_of_turn + self.template.after_turn
        if end and text.endswith(end):
            return text.removesuffix(end)
        last = [found for found in self._special.finditer(text) if not text[found.end() :].strip()]
        return text[: last[-1].start()] if last and not closing.rstrip().endswith(last[-1][0]) else text

    @cached_property
    def _special(self) -> re.Pattern[str]:
        return pattern_of(self.template.special_tokens)

    def _text(self, turn: dict[str, Any]) -> str:
        return self.template.render_texts([[{"role": "user", "content": QUESTION}, turn]], self.tools, "")[0]


def _escapes(inner: str, before: str) -> str:
    """Returns how a text is escaped, from _ESCAPED as it is rendered."""
    if inner == json.dumps(_ESCAPED, ensure_ascii=False)[1:-1]:
        return "json"
    try:
        return "python" if value_of(before[-1:] + inner + before[-1:]) == _ESCAPED else "none"
    except ValueError:
        return "none"
