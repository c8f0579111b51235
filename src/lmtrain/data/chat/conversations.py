"""Reads rows of a dataset as conversations, or as plain prompt and completion texts.

A format defines what each column of a row holds. `detect_format` chooses it by the columns' names; data.columns maps
a format's columns to the names that a dataset uses instead.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from lmtrain.config.constraints import choice
from lmtrain.config.schema_data import DataConfig
from lmtrain.data.chat import TABLES
from lmtrain.data.chat.turns import BadRow, Remark, check, drop_first_answers, text_of, tools_of, truth_of, turns_of
from lmtrain.errors import UserError


class UnfitColumns(UserError):
    """Raised if the columns of a row fit no format, or not the format that is asked for."""


@dataclass(frozen=True)
class Conversation:
    """Turns in the form that chat templates read (turns.py), with the schemas of the tools they may call."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None
    where: str
    given: int = 0  # messages of the prompt, if the row separates it: their answers are not trained on
    dropped_turns: int = 0  # before the first user turn (data.on_assistant_first)


@dataclass(frozen=True)
class Completion:
    """Plain text without a chat template: `completion` is trained on, `prompt` only with data.train_on=all."""

    prompt: str
    completion: str
    where: str


@dataclass(frozen=True)
class Format:
    """The `required` and `optional` columns of a row; alternative names of a column are joined by |."""

    required: list[str]
    optional: list[str] = field(default_factory=list)

    @property
    def columns(self) -> list[str]:
        return [*self.required, *self.optional]


FORMATS = {name: Format(**columns) for name, columns in TABLES["conversations"].items()}
_BRACES = re.compile(r"\{\{|\}\}|\{([^{}]*)\}")  # {column}, and {{ or }} for a brace


def detect_format(columns: Iterable[str], cfg: DataConfig) -> str:
    """Returns data.conversation_format or, if it is auto, the first format whose required columns are all present.

    Raises:
        UnfitColumns: no format fits, or the rows lack a column that the chosen format or data.columns names.
        UserError: data.conversation_format is unknown, or data.columns has a column that the format doesn't have.
    """
    names = list(columns)
    wanted = cfg.conversation_format or "auto"
    choice("auto", *FORMATS)("data.conversation_format", wanted)
    for column, name in (cfg.columns or {}).items():
        if name not in names:
            raise UnfitColumns(f"data.columns.{column}={name}: the rows have no such column, but {', '.join(names)}")
    if wanted == "auto":
        wanted = "template" if cfg.prompt_template or cfg.response_template else _first_fit(names, cfg)
    absent = [c for c in needed(wanted, cfg) if column_of(c, names, cfg) is None]
    if absent:
        raise UnfitColumns(
            f"data.conversation_format={wanted} needs the column {' and '.join(absent)}, and the rows have "
            f"{', '.join(names)}: name it with data.columns, for example data.columns={{{absent[0].split('|')[0]}: "
            f"{names[0] if names else 'its_name'}}}"
        )
    check_renamed(cfg, f"the format {wanted} has", (*needed(wanted, cfg), *FORMATS[wanted].optional))
    return wanted


def check_renamed(cfg: DataConfig, has: str, columns: Iterable[str]) -> None:
    """Raises UserError if data.columns renames a column that is none of a format's `columns`."""
    known = list(dict.fromkeys(name for column in columns for name in column.split("|")))
    for column in cfg.columns or {}:
        if column not in known:
            raise UserError(f"data.columns.{column}: {has} no such column, but {', '.join(known)}")


def to_sample(row: Mapping[str, Any], format: str, cfg: DataConfig, where: str) -> Conversation | Completion:
    """Converts a row of `format` (from detect_format); turns without a system turn get data.system_prompt as one.

    Raises:
        BadRow: a column is absent, empty or not text, or its turns are invalid (see turns.py).
    """
    if format == "template":
        return _conversation(_template(row, cfg, where), None, cfg, where)
    values = values_of(row, FORMATS[format], cfg, where)
    if format == "text":
        return Completion("", text_of(values["text"], "text", where), where)
    if format == "prompt_completion" and isinstance(values["prompt"], str):
        completion = text_of(values["completion"], "completion", where)
        return Completion(text_of(values["prompt"], "prompt", where, may_be_empty=True), completion, where)
    given = turns_of(values["prompt"], where, "prompt") if format == "prompt_completion" else []
    messages = [*given, *_messages(format, values, where)]
    if str(values.get("system") or "").strip():
        messages = [{"role": "system", "content": text_of(values["system"], "system", where)}, *messages]
    return _conversation(messages, tools_of(values.get("tools"), where), cfg, where, len(given))


def values_of(row: Mapping[str, Any], format: Format, cfg: DataConfig, where: str, **given: Any) -> dict[str, Any]:
    """Returns the row's columns that are not null, under the format's first names; values in `given` replace them.

    Raises:
        BadRow: a required column is missing.
    """
    found = {c.split("|")[0]: column_of(c, row, cfg) for c in format.required + format.optional}
    values = {c: row[name] for c, name in found.items() if name is not None and row[name] is not None} | given
    for column in format.required:
        name = column.split("|")[0]
        if name not in values:
            hint = "" if found.get(name) else f"; say what yours is called with data.columns={{{name}: ...}}"
            raise BadRow(where, f"there is no {column.replace('|', ' or ')} (the row has {', '.join(row)}){hint}")
    return values


def _conversation(
    messages: list[dict[str, Any]], tools: Any, cfg: DataConfig, where: str, given: int = 0
) -> Conversation:
    if cfg.system_prompt and not any(turn["role"] == "system" for turn in messages):
        messages, given = [{"role": "system", "content": cfg.system_prompt}, *messages], given + bool(given)
    messages, dropped = drop_first_answers(messages, cfg.on_assistant_first, where)
    given = max(0, given - dropped)
    if not any(turn["role"] == "assistant" for turn in check(messages, where)[given:]):
        raise BadRow(where, "there is no assistant turn in completion to learn from")
    return Conversation(messages, tools, where, given, dropped)


def _first_fit(names: list[str], cfg: DataConfig) -> str:
    for name in FORMATS:
        if name != "template" and all(column_of(c, names, cfg) for c in needed(name, cfg)):
            return name
    raise UnfitColumns(
        f"no conversation format fits the columns {', '.join(names)}. Formats: {described(FORMATS)}. Say what "
        "yours are called with data.columns={prompt: ..., response: ...}, or write data.prompt_template and "
        "data.response_template with {column} in them"
    )


def described(formats: Mapping[str, Format]) -> str:
    """Returns the names of formats with the columns that each requires, for messages."""
    named = (f"{n} ({', '.join(f.required).replace('|', ' or ')})" for n, f in formats.items() if f.required)
    return "; ".join(named)


def needed(format: str, cfg: DataConfig) -> list[str]:
    if format != "template":
        return list(FORMATS[format].required)
    if not cfg.prompt_template or not cfg.response_template:
        raise UserError("data.conversation_format=template needs data.prompt_template and data.response_template")
    return sorted(set(_BRACES.findall(cfg.prompt_template + cfg.response_template)) - {""})


def column_of(column: str, there: Iterable[str], cfg: DataConfig) -> str | None:
    """Returns the data's name for a format's column: from data.columns, else its first usual name present, or None."""
    names, columns = column.split("|"), cfg.columns or {}
    renamed = [columns[name] for name in names if name in columns]
    return next((name for name in renamed[:1] or names if name in there), None)


# Columns that say how good an answer is, or how much it counts.
_MEANT = ("label", "score", "rating", "rank", "reward", "weight", "chosen", "rejected", "preference", "margin")


def unread_columns(row: Mapping[str, Any], columns: Iterable[str], cfg: DataConfig) -> list[Remark]:
    """Returns a remark for each column of a row that has a meaning and is not among the `columns` of its format."""
    read = {column_of(column, row, cfg) for column in columns}
    found = [name for name in _MEANT if row.get(name) is not None and name not in read]
    hint = "; data=unpaired_jsonl reads labels that are true or false" if truth_of(row.get("label")) is not None else ""
    return [Remark(f"the column {name} is not read{hint if name == 'label' else ''}") for name in found]


def _template(row: Mapping[str, Any], cfg: DataConfig, where: str) -> list[dict[str, Any]]:
    """Builds a user turn and an assistant turn from data.prompt_template and data.response_template."""

    def column(match: re.Match[str]) -> str:
        if match[1] is None:
            return match[0][0]
        name = column_of(match[1], row, cfg)
        if name is None or row[name] is None:
            raise BadRow(where, f"there is no {match[1]} (the row has {', '.join(row)})")
        return text_of(row[name], name, where, may_be_empty=True)

    prompt = _BRACES.sub(column, cfg.prompt_template or "")
    response = _BRACES.sub(column, cfg.response_template or "")
    return _asked(text_of(prompt, "the prompt", where), text_of(response, "the response", where))


def _messages(format: str, values: dict[str, Any], where: str) -> list[dict[str, Any]]:
    if format == "alpaca":
        return _alpaca(values, where)
    if format == "prompt_response":
        return _asked(text_of(values["prompt"], "prompt", where), text_of(values["response"], "response", where))
    if format == "prompt_completion":
        return turns_of(values["completion"], where, "completion")
    return turns_of(values[format], where, format)


def _alpaca(values: dict[str, Any], where: str) -> list[dict[str, Any]]:
    """Joins instruction and input to one user turn, with a blank line between; history is [[asked, answered], ...]."""
    turns: list[dict[str, Any]] = []
    history = values.get("history") or []
    for pair in history if isinstance(history, list | tuple) else [history]:
        if not isinstance(pair, list | tuple) or len(pair) != 2:
            raise BadRow(where, "history must be a list of [instruction, output] pairs")
        turns += _asked(text_of(pair[0], "history", where), text_of(pair[1], "history", where))
    asked = text_of(values["instruction"], "instruction", where)
    extra = text_of(values.get("input", ""), "input", where, may_be_empty=True)
    return [*turns, instruction(asked, extra), *_asked(asked, text_of(values["output"], "output", where))[1:]]


def instruction(asked: str, extra: str) -> dict[str, Any]:
    """Builds a user turn from an instruction and its input, which a template may also read separately (alpaca does)."""
    if not extra.strip():
        return {"role": "user", "content": asked}
    return {"role": "user", "content": f"{asked}\n\n{extra}", "instruction": asked, "input": extra}


def _asked(prompt: str, response: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": prompt}, {"role": "assistant", "content": response}]
