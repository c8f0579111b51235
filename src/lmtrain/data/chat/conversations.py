"""Reads rows of a dataset as conversations, or as plain prompt and completion texts; columns.py finds their columns."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from lmtrain.config.schema_data import DataConfig
from lmtrain.data.chat.columns import BESIDE, BRACES, RowColumns
from lmtrain.data.chat.turns import BadRow, check, drop_first_answers, from_json, shown, text_of, tools_of, turns_of

Turns = list[dict[str, Any]]


@dataclass(frozen=True)
class Conversation:
    """Turns in the form that chat templates read (turns.py), with the schemas of the tools they may call."""

    messages: Turns
    tools: list[dict[str, Any]] | None
    where: str
    given: int = 0  # messages of the prompt, if the row separates it: their answers are not trained on
    dropped_turns: int = 0  # before the first user turn (data.on_assistant_first)
    options: dict[str, Any] = field(default_factory=dict)  # variables of the chat template (chat_template_kwargs)


@dataclass(frozen=True)
class Completion:
    """Plain text without a chat template: `completion` is trained on, `prompt` only with data.train_on=all."""

    prompt: str
    completion: str
    where: str


def to_sample(row: Mapping[str, Any], reading: RowColumns, cfg: DataConfig, where: str) -> Conversation | Completion:
    """Converts a row, read as columns.detect says; turns without a system turn get data.system_prompt as one.

    Raises:
        BadRow: a column is absent, empty or not text, its turns are invalid (see turns.py), or a column that changes
            the prompt has no place in it.
    """
    given = {"prompt": filled(cfg.prompt_template or "", reading, row, where),
             "response": filled(cfg.response_template or "", reading, row, where)}  # fmt: skip
    values = reading.values(row, where, **(given if reading.format.name == "template" else {}))
    if "text" in values:
        return Completion("", text_of(values["text"], "text", where), where)
    if reading.format.name == "prompt_completion" and isinstance(values["prompt"], str):
        reading.refuse(values, BESIDE, "which plain text has no place for", where)
        completion = text_of(values["response"], "completion", where)
        return Completion(text_of(values["prompt"], "prompt", where, may_be_empty=True), completion, where)
    before, answer, separated = _parts(values, reading, where)
    turns = with_system([*before, *answer], values, cfg, where)
    messages, dropped = drop_first_answers(turns, cfg.on_assistant_first, where)
    count = max(0, len(messages) - len(answer)) if separated else 0
    if not any(turn["role"] == "assistant" for turn in check(messages, where)[count:]):
        raise BadRow(where, "there is no assistant turn in completion to learn from")
    tools = tools_of(values.get("tools"), where)
    return Conversation(messages, tools, where, count, dropped, options_of(values, where))


def _parts(values: dict[str, Any], reading: RowColumns, where: str) -> tuple[Turns, Turns, bool]:
    """Returns the turns before the answer, the answer's, and whether answers in the former are only to be seen."""
    if "turns" in values:
        reading.refuse(values, ("history", "input"), "which has no place beside whole conversations", where)
        return [], turns_of(values["turns"], where, reading.format.name), False
    separated = not isinstance(values["prompt"], str)
    answer = values["response"]
    if isinstance(answer, str) or not separated:
        answer = [{"role": "assistant", "content": text_of(answer, reading.name("response"), where)}]
    else:
        answer = turns_of(answer, where, "completion")
    return prompt_turns(values, reading, where), answer, separated


def prompt_turns(values: Mapping[str, Any], reading: RowColumns, where: str) -> Turns:
    """Returns the turns of a prompt: those it is a list of, or history and a user turn with `input` in its text."""
    if not isinstance(values["prompt"], str):
        why = "which has no place beside a prompt that is a list of turns"
        reading.refuse(values, ("history", "input"), why, where)
        return turns_of(values["prompt"], where, "prompt")
    asked = text_of(values["prompt"], reading.name("prompt"), where)
    extra = text_of(values.get("input", ""), "input", where, may_be_empty=True)
    turn = {"role": "user", "content": asked}
    if extra.strip():  # a template may also read the two separately (alpaca does)
        turn = {"role": "user", "content": f"{asked}\n\n{extra}", "instruction": asked, "input": extra}
    return [*_history(values.get("history"), where), turn]


def _history(value: Any, where: str) -> Turns:
    turns: Turns = []
    for pair in value if isinstance(value, list | tuple) else [value] if value else []:
        if not isinstance(pair, list | tuple) or len(pair) != 2:
            raise BadRow(where, "history must be a list of [instruction, output] pairs")
        texts = [text_of(text, "history", where) for text in pair]
        turns += [{"role": role, "content": text} for role, text in zip(("user", "assistant"), texts, strict=True)]
    return turns


def with_system(turns: Turns, values: Mapping[str, Any], cfg: DataConfig, where: str) -> Turns:
    """Returns turns with the row's system turn first, or else data.system_prompt, if they have none of their own.

    Raises:
        BadRow: the turns have another system turn than the row's column.
    """
    own = values.get("system")
    said = text_of(own, "system", where, may_be_empty=True) if own is not None else ""
    there = next((turn["content"] for turn in turns if turn["role"] == "system"), None)
    if there is not None and said.strip() and said.strip() != there.strip():
        raise BadRow(where, f"the row has a system column, {shown(said)}, and a system turn, {shown(there)}")
    said = said if said.strip() else cfg.system_prompt or ""
    return [{"role": "system", "content": said}, *turns] if said and there is None else turns


_RESERVED = frozenset(("messages", "conversations", "tools", "documents", "chat_template", "add_generation_prompt",
                       "continue_final_message", "return_assistant_tokens_mask", "bos_token", "eos_token", "pad_token",
                       "unk_token"))  # fmt: skip


def options_of(values: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Returns the row's variables of the chat template, from a mapping or a JSON string of one.

    Raises:
        BadRow: the value is neither, or names a variable that says something else.
    """
    options = from_json(values.get("chat_template_kwargs") or {})
    if not isinstance(options, Mapping):
        raise BadRow(where, f"chat_template_kwargs must be a mapping and is {shown(options)}")
    if taken := sorted(_RESERVED.intersection(options)):
        raise BadRow(where, f"chat_template_kwargs has {taken[0]}, which is not for rows to say")
    return dict(options)


def filled(template: str, reading: RowColumns, row: Mapping[str, Any], where: str) -> str:
    """Returns data.prompt_template or data.response_template with a row's columns in the places of their names.

    Raises:
        BadRow: a column is absent, or not text.
    """

    def column(match: Any) -> str:
        if match[1] is None:
            return str(match[0][0])
        name = reading.filled.get(match[1])
        if name is None or name not in row:
            raise BadRow(where, f"there is no {match[1]} (the row has {', '.join(row)})")
        return "" if row[name] is None else text_of(row[name], name, where, may_be_empty=True)

    return BRACES.sub(column, template)
