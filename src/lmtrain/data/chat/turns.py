"""Normalises the turns of a conversation from common formats (OpenAI, ShareGPT, ...) and validates them.

A turn becomes {"role", "content"} with the role system, user, assistant or tool, and with tool_calls, name,
tool_call_id and reasoning_content if the row has them: the form that Hugging Face chat templates read.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lmtrain.data.chat import TABLES


@dataclass(frozen=True)
class Remark:
    """A note about a row that is used; `lost`: the note names a field of the row that the model never sees."""

    text: str
    lost: bool = False


class BadRow(Exception):
    """Raised for a row that can't be trained on: `where` it is, and the `reason`, which says what to change.

    skip: the row is left out and counted, whatever the value of data.on_bad_row.
    """

    def __init__(self, where: str, reason: str, skip: bool = False) -> None:
        super().__init__(where, reason, skip)
        self.where, self.reason, self.skip = where, reason, skip

    def __str__(self) -> str:
        return f"{self.where}: {self.reason}"

    def refusal(self) -> str:
        """Returns the error message for users who didn't ask for bad rows to be skipped."""
        return f"{self}; fix the row, or set data.on_bad_row=skip to leave such rows out"


ROLES = {name: role for role, names in TABLES["roles"].items() for name in names}
_CALLS = ("function_call", "tool_call")  # roles whose content is the call itself
_HALF = re.compile("[\ud800-\udfff]")  # surrogates: valid in JSON, but not in UTF-8 and so not in tokenizers
_KEPT = ("name", "tool_call_id", "reasoning_content")
_THOUGHTS = ("reasoning_content", "reasoning", "thinking")  # names of the key with an answer's reasoning
_LEARNED = ("train", "weight", "loss")  # keys that say whether a turn is trained on: lmtrain's, OpenAI's, ms-swift's
_IMAGE = "<image>"
_READ = {"role", "from", "content", "value", "tool_calls", *_LEARNED, *_KEPT, *_THOUGHTS}


def turns_of(value: Any, where: str, column: str = "messages") -> list[dict[str, Any]]:
    """Normalises a row's list of messages, each {"role", "content"} or ShareGPT's {"from", "value"}.

    A list of strings becomes alternating user and assistant turns. A turn with `train: false`, `weight: 0` or
    `loss: false` gets "train": False: the model sees it but is not trained on it.

    Raises:
        BadRow: the value is not a list of turns, or a turn has no role, an unknown role or no text.
    """
    value = from_json(value)
    if not isinstance(value, list | tuple) or not value:
        raise BadRow(where, f"{column} must be a list of turns and is {shown(value)}")
    if all(isinstance(turn, str) for turn in value):
        if len(value) == 1 and column not in ("messages", "conversations", "prompt"):
            raise BadRow(where, f"{column} is a list of one string, which doesn't say who speaks: leave out the list")
        value = [{"role": ("user", "assistant")[i % 2], "content": said} for i, said in enumerate(value)]
    return [_turn(turn, f"turn {i}", where) for i, turn in enumerate(value, start=1)]


def check(messages: list[dict[str, Any]], where: str) -> list[dict[str, Any]]:
    """Returns the turns if they are a conversation: optionally a system turn, then a user turn, and later an answer.

    Consecutive user turns (or assistant turns) are accepted here; the chat template decides whether they are valid.

    Raises:
        BadRow: there is a second system turn, one that isn't first, no user turn at the start, or no assistant turn.
    """
    systems = [i for i, turn in enumerate(messages, start=1) if turn["role"] == "system"]
    if len(systems) > 1:
        raise BadRow(where, f"turns {systems[0]} and {systems[1]} are both system turns; there can be one, the first")
    if systems and systems[0] != 1:
        raise BadRow(where, f"turn {systems[0]} is a system turn; it must be the first")
    first = messages[1:] if systems else messages
    if first and first[0]["role"] != "user":
        number = len(systems) + 1
        advice = "; data.on_assistant_first=drop_turn learns from what follows" if len(first) > 2 else ""
        raise BadRow(where, f"turn {number} is from {first[0]['role']}, but the first turn must be the user's{advice}")
    if not any(turn["role"] == "assistant" for turn in messages):
        raise BadRow(where, "there is no assistant turn to learn from")
    return messages


def drop_first_answers(
    messages: list[dict[str, Any]], policy: str | None, where: str
) -> tuple[list[dict[str, Any]], int]:
    """Drops the turns before the first user turn if the assistant begins; also returns how many were dropped.

    policy: data.on_assistant_first. Nothing is changed if the first turn (after a system turn) isn't the assistant's,
    if no user turn follows, or if the policy is raise; in the last two cases `check` rejects the conversation.

    Raises:
        BadRow: the policy is skip.
    """
    start = int(bool(messages) and messages[0]["role"] == "system")
    roles = [turn["role"] for turn in messages]
    if roles[start : start + 1] != ["assistant"] or policy in (None, "raise"):
        return messages, 0
    if policy == "skip":
        raise BadRow(where, "the first turn is the assistant's (data.on_assistant_first=skip)", skip=True)
    if "user" not in roles:
        return messages, 0
    user = roles.index("user")
    return [*messages[:start], *messages[user:]], user - start


def tools_of(value: Any, where: str) -> list[dict[str, Any]] | None:
    """Returns tool schemas in OpenAI's form, from a list or a JSON string of one; bare functions are wrapped.

    Raises:
        BadRow: the value is neither.
    """
    if isinstance(value, str):
        value = from_json(value) if value.strip() else None
    if value is None or value == []:
        return None
    if not isinstance(value, list) or not all(isinstance(tool, dict) for tool in value):
        raise BadRow(where, f"tools must be a list of function descriptions (or JSON of one) and is {shown(value)}")
    wrapped = [tool if "function" in tool else {"type": "function", "function": tool} for tool in value]
    return [whole_text(tool, "tools", where) for tool in wrapped]


def text_of(value: Any, what: str, where: str, may_be_empty: bool = False) -> str:
    """Returns a text, or the joined texts of a list of parts [{"type": "text", "text": ...}].

    Raises:
        BadRow: the value is anything else, such as an image, or only white space without `may_be_empty`.
    """
    if isinstance(value, list | tuple):
        for part in value:
            if not isinstance(part, Mapping) or "type" not in part:
                raise BadRow(where, f"{what} must be text and is a list with {shown(part)} in it")
            if part["type"] != "text" or not isinstance(part.get("text"), str):
                raise BadRow(where, f"{what} has a part of type {part['type']!r}; only text can be learned")
        value = "".join(part["text"] for part in value)
    if not isinstance(value, str):
        raise BadRow(where, f"{what} must be text and is {shown(value)}")
    if not value.strip() and not may_be_empty:
        raise BadRow(where, f"{what} is empty")
    return str(whole_text(value, what, where))


_TRUTHS = {"true": True, "1": True, "1.0": True, "false": False, "0": False, "0.0": False}


def is_exact(answer: str, reference: Any) -> bool:
    """Returns whether an answer is its reference, apart from white space around both: exact_match, on pages too."""
    return answer.strip() == str(reference).strip()


def truth_of(value: Any) -> bool | None:
    """Returns whether a value means true or false; it may also be text, as in CSV files. None for any other value."""
    if isinstance(value, str):
        return _TRUTHS.get(value.strip().lower())
    return bool(value) if value in (0, 1) else None


def common(one: Sequence[Any], other: Sequence[Any]) -> int:
    """Returns the length of the common prefix of two texts or lists of turns."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(one), len(other)))


def whole_text(value: Any, what: str, where: str) -> Any:
    """Returns the value if all strings in it can be encoded in UTF-8; raises BadRow otherwise."""
    if isinstance(value, str) and _HALF.search(value):
        raise BadRow(where, f"{what} holds half a surrogate pair (\\ud800 to \\udfff), which is not a character")
    if isinstance(value, Mapping):
        for key, item in value.items():
            whole_text(key, what, where)
            whole_text(item, what, where)
    elif isinstance(value, list | tuple):
        for item in value:
            whole_text(item, what, where)
    return value


def unread(row: Mapping[str, Any]) -> list[Remark]:
    """Returns a remark for each key of a row's turns that nothing reads, and one for the places of images in texts."""
    turns = [
        turn
        for value in row.values()
        if isinstance(value, list | tuple)
        for turn in value
        if isinstance(turn, Mapping) and ("role" in turn or "from" in turn)
    ]
    keys = dict.fromkeys(str(key) for turn in turns for key, value in turn.items() if value is not None)
    found = [Remark(f"turns have the key {key}, which nothing reads") for key in keys if key not in _READ]
    texts = [*row.values(), *(turn.get(key) for turn in turns for key in ("content", "value"))]
    if any(isinstance(text, str) and _IMAGE in text for text in texts):
        found.append(Remark(f"{_IMAGE} is written in the text and learned as text: images are not"))
    return found


def _turn(turn: Any, name: str, where: str) -> dict[str, Any]:
    if not isinstance(turn, Mapping):
        raise BadRow(where, f"{name} must be a mapping with role and content and is {shown(turn)}")
    found = {key: value for key, value in turn.items() if value is not None}
    # Who speaks, what is said, and the calls, by any of their names.
    said = _either(found, "role", "from", name, where)
    if said is None:
        raise BadRow(where, f"{name} has no role (its keys: {_keys(turn)})")
    role = ROLES.get(said.lower()) if isinstance(said, str) else None
    if role is None:
        raise BadRow(where, f"{name} has the unknown role {shown(said)}; known are {', '.join(ROLES)}")
    content = _either(found, "content", "value", name, where)
    calls = found.get("tool_calls") or None
    if said.lower() in _CALLS:
        content, calls = "", content
    if role == "tool" and not _is_text(content):
        # A tool's result may also be 0, false or {...}.
        content = json.dumps(content, ensure_ascii=False, default=str)
    if calls is not None:
        calls = _tool_calls(calls, name, where)
    # Nothing may be missing, and a text must be one.
    if content is None and calls is None:
        raise BadRow(where, f"{name} ({role}) has no content (its keys: {_keys(turn)})")
    # A tool may return nothing, and an assistant turn with tool calls needs no text.
    empty = calls is not None or role == "tool"
    text = text_of("" if content is None else content, f"{name} ({role})", where, empty)
    result: dict[str, Any] = {"role": role, "content": text}
    if calls is not None:
        result["tool_calls"] = calls
    result.update({key: whole_text(found[key], f"{name} ({role})", where) for key in _KEPT if key in found})
    # What else templates read of a turn.
    thought = next((found[key] for key in _THOUGHTS if found.get(key)), None)
    if thought is not None:
        result["reasoning_content"] = text_of(thought, f"{name} ({role}), its reasoning,", where, may_be_empty=True)
    if not _is_learned(found, name, where):
        result["train"] = False
    return result


def _either(found: Mapping[str, Any], ours: str, theirs: str, name: str, where: str) -> Any:
    """Returns the value of whichever of two keys is present; raises BadRow if both are and differ."""
    if ours in found and theirs in found and found[ours] != found[theirs]:
        both = f"{shown(found[ours])} and {shown(found[theirs])}"
        raise BadRow(where, f"{name} has {ours} and {theirs}, and they differ: {both}")
    return found.get(ours, found.get(theirs))


def _is_text(content: Any) -> bool:
    """Returns whether the content is None, a string or a list of parts, as `text_of` reads it."""
    parts = isinstance(content, list | tuple) and all(isinstance(p, Mapping) and "type" in p for p in content)
    return content is None or isinstance(content, str) or (parts and len(content) > 0)


def _is_learned(found: Mapping[str, Any], name: str, where: str) -> bool:
    """Returns whether a turn's `train`, `weight` and `loss` let it be trained on; raises BadRow for what is invalid."""
    said = {key: truth_of(found[key]) for key in _LEARNED if key in found}
    for key, truth in said.items():
        if truth is None:
            said_otherwise = f'{name} has "{key}": {shown(found[key])}'
            raise BadRow(where, f"{said_otherwise}; a turn is learned (true or 1) or not (false or 0)")
    if len(set(said.values())) > 1:
        raise BadRow(where, f"{name} has {' and '.join(said)}, and they differ")
    return False not in said.values()


def _tool_calls(value: Any, name: str, where: str) -> list[dict[str, Any]]:
    """Returns calls as {"type": "function", "function": {"name", "arguments": a mapping}}, and "id" if there is one."""
    value = from_json(value)
    calls = []
    for call in value if isinstance(value, list | tuple) else [value]:
        function = call.get("function", call) if isinstance(call, Mapping) else None
        function = function if isinstance(function, Mapping) else {}
        # OpenAI's API returns the arguments as a string; templates serialize them themselves.
        given, called = function.get("arguments"), function.get("name")
        arguments = {} if given in (None, "") else from_json(given)
        if not isinstance(arguments, Mapping) or not isinstance(called, str) or not called:
            raise BadRow(where, f"{name} has a tool call that isn't {{name, arguments}}: {shown(call)}")
        made = {"type": "function", "function": {"name": called, "arguments": arguments}}
        calls.append({"id": call["id"], **made} if call.get("id") else made)
        whole_text(calls[-1], f"{name}'s tool call", where)
    return calls


def from_json(value: Any) -> Any:
    """Parses a value that is stored as a JSON string; returns the value itself if it is no string, or not JSON."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        return value


def shown(value: Any) -> str:
    """Returns the beginning of a value and its type, for messages."""
    text = repr(value)
    return f"{text[:60]}{'...' if len(text) > 60 else ''} ({type(value).__name__})"


def _keys(turn: Mapping[str, Any]) -> str:
    return ", ".join(map(str, turn)) or "none"
