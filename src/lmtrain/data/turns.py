"""The turns of a conversation, brought from the spellings that are about into one, and checked.

One turn becomes {"role", "content"} with the roles system, user, assistant and tool, and with tool_calls, name,
tool_call_id and reasoning_content where the row has them: what Hugging Face chat templates read.
"""

import json
import re
from collections.abc import Mapping
from typing import Any


class BadRow(Exception):
    """A row that can't be learned from: `where` it stands and the `reason`, which says what to change."""

    def __init__(self, where: str, reason: str) -> None:
        super().__init__(f"{where}: {reason}")
        self.where, self.reason = where, reason


# What datasets call the four roles: OpenAI's names, ShareGPT's, and those of tool calls.
ROLES = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "human": "user",
    "assistant": "assistant",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "model": "assistant",
    "bot": "assistant",
    "function_call": "assistant",
    "tool_call": "assistant",
    "tool": "tool",
    "function": "tool",
    "observation": "tool",
    "function_response": "tool",
    "tool_response": "tool",
}
_CALLS = ("function_call", "tool_call")  # their content is the call itself
_HALF = re.compile("[\ud800-\udfff]")  # JSON can hold it, UTF-8 and so tokenizers can't
_KEPT = ("name", "tool_call_id", "reasoning_content")


def turns_of(value: Any, where: str, column: str = "messages") -> list[dict[str, Any]]:
    """The turns of a row's list of messages; each is {"role", "content"} or ShareGPT's {"from", "value"}.

    A turn with `train: false` or `weight: 0` keeps "train": False: it is shown to the model and not learned.

    Raises:
        BadRow: what is no list of turns, or holds a turn without role or text or with an unknown role.
    """
    if isinstance(value, str):  # a list that was written as a string
        value = _from_json(value)
    if not isinstance(value, list | tuple) or not value:
        raise BadRow(where, f"{column} must be a list of turns and is {_shown(value)}")
    return [_turn(turn, f"turn {i}", where) for i, turn in enumerate(value, start=1)]


def check(messages: list[dict[str, Any]], where: str) -> list[dict[str, Any]]:
    """The same turns, if they make a conversation: an optional system turn, then a user turn, and an answer somewhere.

    Two user turns (or two assistant turns) in a row are let through: whether that is a conversation is for the chat
    template to say.

    Raises:
        BadRow: a second system turn or one that isn't first, no user turn at the start, or no assistant turn.
    """
    systems = [i for i, turn in enumerate(messages, start=1) if turn["role"] == "system"]
    if len(systems) > 1:
        raise BadRow(where, f"turns {systems[0]} and {systems[1]} are both system turns; there can be one, the first")
    if systems and systems[0] != 1:
        raise BadRow(where, f"turn {systems[0]} is a system turn; it must be the first")
    first = messages[1:] if systems else messages
    if first and first[0]["role"] != "user":
        number = len(systems) + 1
        raise BadRow(where, f"turn {number} is from {first[0]['role']}, but the first turn must be the user's")
    if not any(turn["role"] == "assistant" for turn in messages):
        raise BadRow(where, "there is no assistant turn to learn from")
    return messages


def tools_of(value: Any, where: str) -> list[dict[str, Any]] | None:
    """Tool schemas in OpenAI's form, from a list of them or a JSON string of one; bare functions are wrapped.

    Raises:
        BadRow: neither.
    """
    if isinstance(value, str):
        if not value.strip():
            return None
        value = _from_json(value)
    if value is None or value == []:
        return None
    if not isinstance(value, list) or not all(isinstance(tool, dict) for tool in value):
        raise BadRow(where, f"tools must be a list of function descriptions (or JSON of one) and is {_shown(value)}")
    wrapped = [tool if "function" in tool else {"type": "function", "function": tool} for tool in value]
    return [_without_none(tool) for tool in wrapped]


def text_of(value: Any, what: str, where: str, may_be_empty: bool = False) -> str:
    """A text, or the joined texts of a list of parts [{"type": "text", "text": ...}].

    Raises:
        BadRow: anything else, an image say, or nothing but white space.
    """
    if isinstance(value, list | tuple):
        for part in value:
            if not isinstance(part, Mapping) or "type" not in part:
                raise BadRow(where, f"{what} must be text and is a list with {_shown(part)} in it")
            if part["type"] != "text" or not isinstance(part.get("text"), str):
                raise BadRow(where, f"{what} has a part of type {part['type']!r}; only text can be learned")
        value = "".join(part["text"] for part in value)
    if not isinstance(value, str):
        raise BadRow(where, f"{what} must be text and is {_shown(value)}")
    if not value.strip() and not may_be_empty:
        raise BadRow(where, f"{what} is empty")
    if _HALF.search(value):
        raise BadRow(where, f"{what} holds half a surrogate pair (\\ud800 to \\udfff), which is no character")
    return value


def _turn(turn: Any, name: str, where: str) -> dict[str, Any]:
    if not isinstance(turn, Mapping):
        raise BadRow(where, f"{name} must be a mapping with role and content and is {_shown(turn)}")
    found = {key: value for key, value in turn.items() if value is not None}
    said = found.get("role", found.get("from"))
    if said is None:
        raise BadRow(where, f"{name} has no role (its keys: {_keys(turn)})")
    role = ROLES.get(said.lower()) if isinstance(said, str) else None
    if role is None:
        raise BadRow(where, f"{name} has the unknown role {_shown(said)}; known are {', '.join(ROLES)}")
    content = found.get("content", found.get("value"))
    calls = found.get("tool_calls") or None
    if said.lower() in _CALLS:
        content, calls = "", content
    if calls is not None:
        calls = _tool_calls(calls, name, where)
    if content is None and calls is None:
        raise BadRow(where, f"{name} ({role}) has no content (its keys: {_keys(turn)})")
    # A tool may well return nothing, and an assistant that calls one need not speak.
    empty = calls is not None or role == "tool"
    result: dict[str, Any] = {"role": role, "content": text_of(content or "", f"{name} ({role})", where, empty)}
    if calls is not None:
        result["tool_calls"] = calls
    result.update({key: found[key] for key in _KEPT if key in found})
    if found.get("train") is False or found.get("weight") == 0:
        result["train"] = False
    return result


def _tool_calls(value: Any, name: str, where: str) -> list[dict[str, Any]]:
    """Calls as {"type": "function", "function": {"name", "arguments": a mapping}}, with their id where there is one."""
    if isinstance(value, str):
        value = _from_json(value)
    calls = []
    for call in value if isinstance(value, list | tuple) else [value]:
        function = call.get("function", call) if isinstance(call, Mapping) else None
        arguments = function.get("arguments", {}) if isinstance(function, Mapping) else None
        if isinstance(arguments, str):  # as the API of OpenAI returns them; templates write JSON themselves
            arguments = _from_json(arguments)
        if not isinstance(function, Mapping) or not isinstance(arguments, Mapping) or not function.get("name"):
            raise BadRow(where, f"{name} has a tool call that isn't {{name, arguments}}: {_shown(call)}")
        made = {"type": "function", "function": {"name": function["name"], "arguments": _without_none(arguments)}}
        calls.append({"id": call["id"], **made} if call.get("id") else made)
    return calls


def _without_none(value: Any) -> Any:
    """Without keys whose value is None: Arrow writes one for every key that any other row of the file has."""
    if isinstance(value, Mapping):
        return {key: _without_none(item) for key, item in value.items() if item is not None}
    return [_without_none(item) for item in value] if isinstance(value, list) else value


def _from_json(text: str) -> Any:
    """What a JSON string holds; the string itself where it is none."""
    try:
        return json.loads(text)
    except ValueError:
        return text


def _shown(value: Any) -> str:
    shown = repr(value)
    return f"{shown[:60]}... ({type(value).__name__})" if len(shown) > 60 else f"{shown} ({type(value).__name__})"


def _keys(turn: Mapping[str, Any]) -> str:
    return ", ".join(map(str, turn)) or "none"
