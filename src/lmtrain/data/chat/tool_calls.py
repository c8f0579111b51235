"""Reads the tool calls in what a model wrote."""

import json
import re
from collections.abc import Iterator
from typing import Any

_MARKED = re.compile(r"<tool_call>(.*?)(?:</tool_call>|\Z)", re.DOTALL)
_NAMED = re.compile(r"\[TOOL_CALLS\]\s*([\w.-]+)\s*(?:\[ARGS\])?\s*(\{.*?\})(?=\s*(?:\[TOOL_CALLS\]|\Z))", re.DOTALL)


def requested(answer: str) -> list[tuple[str, Any]]:
    """Returns name and arguments of the tool calls in an answer; a call that can't be read has "" and its text.

    Read are <tool_call>{"name", "arguments"}</tool_call> (Hermes, Qwen), [TOOL_CALLS] before a list of such objects or
    before name[ARGS]{...} (Mistral), <|python_tag|> before {"name", "parameters"} (Llama 3), and an answer that is
    nothing but such objects.
    """
    marked, named = _MARKED.findall(answer), _NAMED.findall(answer)
    if marked or named:
        return [call for text in marked for call in _read(text)] + [(name, _json(text)) for name, text in named]
    for mark in ("[TOOL_CALLS]", "<|python_tag|>"):
        if mark in answer:
            return list(_read(answer.split(mark, 1)[1]))
    text = answer.strip()
    bare = list(_read(text)) if text[:1] in ("{", "[") and '"name"' in text else []
    return [] if any(not name for name, _ in bare) else bare


def _read(text: str) -> Iterator[tuple[str, Any]]:
    """Yields the calls in a text of JSON objects, or a list of them, separated by white space, commas or semicolons."""
    text = text.strip()
    while text:
        try:
            value, end = json.JSONDecoder().raw_decode(text)
        except (ValueError, RecursionError):  # ValueError: no JSON, or a number of thousands of digits
            yield "", text
            return
        for call in value if isinstance(value, list) else [value]:
            call = call.get("function", call) if isinstance(call, dict) else {}
            name = call.get("name") if isinstance(call, dict) else None
            found = call.get("arguments", call.get("parameters", {})) if isinstance(name, str) else text[:end]
            yield (name, _json(found)) if isinstance(name, str) else ("", found)
        text = text[end:].lstrip(" \n\t,;")


def _json(value: Any) -> Any:
    """Returns what a text of JSON holds, and any other value as it is."""
    try:
        return json.loads(value) if isinstance(value, str) else value
    except (ValueError, RecursionError):
        return value
