"""The arguments of a tool call against the JSON schema of the tool's parameters."""

import ast
import json
import re
from collections.abc import Mapping
from typing import Any

Schema = Mapping[str, Any]

_KINDS = {bool: "boolean", int: "integer", float: "number", str: "string", list: "array", dict: "object"}
_KEY = re.compile(r"([^\s{}\[\],:\"][^{}\[\],:\"]*?)(?=\s*:)|None\b")


class Misfit(ValueError):
    """Raised for a value that its schema doesn't allow, in words for the model."""


def fitted(value: Any, schema: Schema, name: str) -> Any:
    """Returns a value as its schema has it: a whole number written as 2.0 is an integer.

    Raises:
        Misfit: the schema doesn't allow the value of the argument `name`.
    """
    wanted = _kinds(schema)
    if value is None and (not wanted or "null" in wanted):
        return None
    kind = _KINDS.get(type(value), "null")
    if kind == "number" and "integer" in wanted and "number" not in wanted and value.is_integer():
        value, kind = int(value), "integer"
    if wanted and kind not in wanted and not (kind == "integer" and "number" in wanted):
        raise Misfit(f"{name} must be {' or '.join(wanted)}, and {_shown(value)} is {kind}")
    if "enum" in schema and value not in schema["enum"]:
        raise Misfit(f"{name} must be one of {', '.join(map(_shown, schema['enum']))}, and not {_shown(value)}")
    if isinstance(value, list):
        items = [*schema.get("prefixItems", ())]
        items += [schema.get("items", {})] * (len(value) - len(items))
        return [fitted(v, s, f"{name}[{i}]") for i, (v, s) in enumerate(zip(value, items, strict=False))]
    if isinstance(value, dict):
        own, other = schema.get("properties", {}), schema.get("additionalProperties", {})
        other = other if isinstance(other, Mapping) else {}
        return {key: fitted(v, own.get(key, other), f"{name}.{key}") for key, v in value.items()}
    return value


def typed(text: str, schema: Schema) -> Any:
    """Returns the value of an argument that a template writes without quotes, by what its schema allows.

    It is a text where the schema allows one, unless it reads as something else that the schema allows too.
    """
    wanted = _kinds(schema)
    if wanted == ["string"]:
        return text
    try:
        value = value_of(text.strip())
    except ValueError:
        return text
    try:
        return fitted(value, {**schema, "type": [k for k in wanted if k != "string"]}, "")
    except Misfit:
        return text if "string" in wanted else value


def value_of(text: str, quote: str = '"') -> Any:
    """Returns the value that a text stands for: JSON, a literal of Python, or JSON with bare keys and other quotes.

    Raises:
        ValueError: it is none of them.
    """
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        pass
    try:
        value = ast.literal_eval(text)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        pass
    else:
        if type(value) in _KINDS or value is None:
            return value
    parts = text.split(quote)  # texts are every second of them
    parts[::2] = [_KEY.sub(lambda found: f'"{found[1]}"' if found[1] else "null", part) for part in parts[::2]]
    parts[1::2] = [json.dumps(part) for part in parts[1::2]]
    try:
        return json.loads("".join(parts))
    except RecursionError:
        raise ValueError(text) from None


def _kinds(schema: Schema) -> list[str]:
    """Returns the kinds of values that a schema allows, [] if all."""
    found: list[str] = []
    for one in schema.get("anyOf", [schema]):
        kinds = one.get("type", [])
        found += [kinds] if isinstance(kinds, str) else [*kinds]
    return [*dict.fromkeys(found), *(["null"] if found and schema.get("nullable") else [])]


def _shown(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= 60 else f"{text[:60]}..."
