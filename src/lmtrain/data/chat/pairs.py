"""Reads rows of a dataset as preference pairs: a prompt with a chosen and a rejected answer.

Turns and plain texts are read as for fine-tuning (turns.py). If a row has no prompt of its own, or holds two whole
conversations, the prompt is their common beginning.
"""

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from lmtrain.config.constraints import choice
from lmtrain.config.schema_data import DataConfig
from lmtrain.data.chat import TABLES, conversations
from lmtrain.data.chat.conversations import Format, UnfitColumns, column_of, described
from lmtrain.data.chat.turns import BadRow, check, common, drop_first_answers, shown, text_of, tools_of, turns_of

Turns = list[dict[str, Any]]


@dataclass(frozen=True)
class Pair:
    """Two answers to one prompt; all three are lists of turns, or all are plain text without a chat template."""

    prompt: Turns | str
    chosen: Turns | str
    rejected: Turns | str
    tools: list[dict[str, Any]] | None
    where: str
    margin: float | None = None  # the row's column margin, how much better the chosen answer was rated
    dropped_turns: int = 0  # before the first user turn (data.on_assistant_first)


PAIR_FORMATS = {name: Format(**columns) for name, columns in TABLES["pairs"].items()}
# In conversations of hh-rlhf (Anthropic), each turn begins with a blank line and the name of the speaker.
_SPEAKER = re.compile(r"(?:\A|\n\n)(Human|Assistant):")
_SPEAKER_ROLES = {"Human": "user", "Assistant": "assistant"}


def detect_pair_format(columns: Iterable[str], cfg: DataConfig) -> str:
    """Returns data.conversation_format or, if it is auto, the first format whose required columns are all present.

    Raises:
        UnfitColumns: no format fits, or data.conversation_format needs a column that is absent.
        UserError: data.conversation_format is unknown, or data.columns has a column that the format doesn't have.
    """
    names = list(columns)
    wanted = cfg.conversation_format or "auto"
    choice("auto", *PAIR_FORMATS)("data.conversation_format", wanted)
    formats = list(PAIR_FORMATS) if wanted == "auto" else [wanted]
    columns = [column for name in formats for column in PAIR_FORMATS[name].columns]
    conversations.check_renamed(cfg, "pairs have" if wanted == "auto" else f"the format {wanted} has", columns)
    for name in formats:
        # data.prompt_template replaces the prompt column.
        needed = [c for c in PAIR_FORMATS[name].required if not (cfg.prompt_template and c.startswith("prompt"))]
        if all(column_of(c, names, cfg) is not None for c in needed):
            return name
    raise UnfitColumns(
        f"no format of pairs fits the columns {', '.join(names)}. Formats: {described(PAIR_FORMATS)}. Say what yours "
        f"are called with data.columns={{chosen: ..., rejected: ...}}"
    )


def to_pair(row: Mapping[str, Any], format: str, cfg: DataConfig, where: str) -> Pair:
    """Returns the pair of a row of `format` (from detect_pair_format); data.prompt_template builds its prompt.

    Raises:
        BadRow: the answers are equal, one is empty, two conversations share no beginning, or turns.py rejects a turn.
    """
    filled = {"prompt": _filled(cfg.prompt_template, row, where)} if cfg.prompt_template else {}
    values = conversations.values_of(row, PAIR_FORMATS[format], cfg, where, **filled)
    margin = _margin(values, where)
    if format == "preference_text":
        prompt, chosen, rejected = (text_of(values[name], name, where) for name in ("prompt", "chosen", "rejected"))
        return _different(Pair(prompt, chosen, rejected, None, where, margin))
    chosen_turns, rejected_turns = (answer_turns(values[name], name, where) for name in ("chosen", "rejected"))
    whole = "assistant" not in (chosen_turns[0]["role"], rejected_turns[0]["role"])
    if whole or ("prompt" not in values and chosen_turns[0] == rejected_turns[0]):
        given, chosen_turns, rejected_turns = _split(chosen_turns, rejected_turns, where)
        _check_prompt(values, given, where)
    elif "prompt" in values:
        given = prompt_turns(values, where)
    else:
        raise BadRow(where, "chosen and rejected answer no prompt: name its column with data.columns.prompt")
    return replace(_pair(given, chosen_turns, rejected_turns, values, cfg, where), margin=margin)


def _filled(template: str, row: Mapping[str, Any], where: str) -> str:
    texts = {name: value or "" for name, value in row.items() if value is None or isinstance(value, str)}
    try:
        return template.format_map(texts)
    except (KeyError, IndexError, ValueError, AttributeError, TypeError) as error:
        raise BadRow(where, f"data.prompt_template needs the column {error}, which is absent or no text") from None


def _check_prompt(values: dict[str, Any], given: Turns, where: str) -> None:
    """Raises BadRow if the row has a prompt of its own that is not in the conversations' common beginning `given`."""
    if "prompt" not in values:
        return
    prompt = [(turn["role"], turn["content"].strip()) for turn in prompt_turns(values, where)]
    shared = [(turn["role"], turn["content"].strip()) for turn in given]
    begins = prompt[: len(shared)] == shared  # for a column that holds the whole conversation
    if not begins and not any(shared[at : at + len(prompt)] == prompt for at in range(len(shared))):
        said = prompt[-1][1]
        said = said[:60] + ("..." if len(said) > 60 else "")
        raise BadRow(where, f"chosen and rejected don't begin with the prompt, {said!r}: fix it, or drop that column")


def prompt_turns(values: dict[str, Any], where: str) -> Turns:
    """Returns the prompt's turns; a text becomes a user turn with `input` (as in Alpaca) as its second paragraph."""
    prompt = values["prompt"]
    if not isinstance(prompt, str):
        return turns_of(prompt, where, "prompt")
    if _SPEAKER.match(prompt):
        return _spoken(prompt, "prompt", where)
    extra = text_of(values.get("input", ""), "input", where, may_be_empty=True)
    text = text_of(prompt, "prompt", where)
    return [conversations.instruction(text, extra)]


def opening(prompt: Any, cfg: DataConfig, where: str) -> tuple[Turns, int]:
    """Returns the turns of a prompt, after a system turn of data.system_prompt if they have none of their own.

    Also returns how many turns before the first user turn were dropped (data.on_assistant_first).
    """
    turns, dropped = drop_first_answers(prompt_turns({"prompt": prompt}, where), cfg.on_assistant_first, where)
    if cfg.system_prompt and turns[0]["role"] != "system":
        turns = [{"role": "system", "content": cfg.system_prompt}, *turns]
    return turns, dropped


def answer_turns(value: Any, name: str, where: str) -> Turns:
    """Returns an answer or a whole conversation as turns, from a list of turns, a single turn or a string."""
    if not isinstance(value, str):
        return turns_of([value] if isinstance(value, Mapping) else value, where, name)
    if _SPEAKER.match(value):
        return _spoken(value, name, where)
    return [{"role": "assistant", "content": text_of(value, name, where)}]


def _spoken(text: str, name: str, where: str) -> Turns:
    """Parses "\\n\\nHuman: ...\\n\\nAssistant: ..." into turns; drops an empty last "Assistant:" of a prompt."""
    _, *parts = _SPEAKER.split(text)
    turns = [(_SPEAKER_ROLES[who], said.strip()) for who, said in zip(parts[::2], parts[1::2], strict=True)]
    if name == "prompt" and turns[-1] == ("assistant", ""):
        turns.pop()
    if not turns:
        raise BadRow(where, f"{name} is empty")
    return [
        {"role": role, "content": text_of(said, f"{name}, turn {i}", where)} for i, (role, said) in enumerate(turns, 1)
    ]


def _split(chosen: Turns, rejected: Turns, where: str) -> tuple[Turns, Turns, Turns]:
    """Splits two whole conversations into their common beginning and the rest of each."""
    shared = common(chosen, rejected)
    if shared == 0:
        raise BadRow(where, "chosen and rejected are conversations that share no beginning, so there is no prompt")
    if shared == len(chosen) == len(rejected):
        raise BadRow(where, "chosen and rejected are the same")
    return chosen[:shared], chosen[shared:], rejected[shared:]


def _pair(given: Turns, chosen: Turns, rejected: Turns, values: dict[str, Any], cfg: DataConfig, where: str) -> Pair:
    answers = {"chosen": chosen, "rejected": rejected}
    for name, answer in answers.items():
        if not answer:
            raise BadRow(where, f"{name} ends where the other goes on: it has no answer of its own")
    for name, answer in answers.items():
        if answer[0]["role"] != "assistant":
            raise BadRow(where, f"{name} goes on with a turn from {answer[0]['role']}; only two answers are compared")
        if answer[-1]["role"] != "assistant":
            raise BadRow(where, f"{name} ends with a turn from {answer[-1]['role']}, not with an answer")
    given, dropped = drop_first_answers(given, cfg.on_assistant_first, where)
    system = values.get("system") or cfg.system_prompt
    if system and given[0]["role"] != "system":
        given = [{"role": "system", "content": text_of(system, "system", where)}, *given]
    check([*given, *chosen], where)
    check([*given, *rejected], where)
    tools = tools_of(values.get("tools"), where)
    return _different(Pair(given, chosen, rejected, tools, where, dropped_turns=dropped))


def _different(pair: Pair) -> Pair:
    if pair.chosen == pair.rejected:
        raise BadRow(pair.where, "chosen and rejected are the same")
    return pair


def _margin(values: dict[str, Any], where: str) -> float | None:
    """Returns the row's margin, or None; its scores only say which answer is the better one.

    Raises:
        BadRow: a value is not a finite number, or implies that the rejected answer is the better one.
    """
    if values.get("margin") is not None:
        margin = _number(values["margin"], "margin", where)
        if margin < 0:
            raise BadRow(where, f"margin is {margin:g}: the rejected answer is the better one; swap the two")
        return margin
    scores = [values.get("score_chosen"), values.get("score_rejected")]
    if None in scores:
        return None
    chosen, rejected = _number(scores[0], "score_chosen", where), _number(scores[1], "score_rejected", where)
    if chosen < rejected:
        found = f"score_chosen is {chosen:g}, below score_rejected, {rejected:g}"
        lower = "data.columns={score_chosen: score_rejected, score_rejected: score_chosen} if lower scores are better"
        raise BadRow(where, f"{found}: swap the answers, or set {lower}")
    return None


def _number(value: Any, name: str, where: str) -> float:
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        number = math.inf
    if math.isnan(number):
        raise BadRow(where, f"{name} is NaN: leave out the row, or give it a number")
    if math.isinf(number) or isinstance(value, bool):
        raise BadRow(where, f"{name} must be a number and is {shown(value)}")
    return number
