"""Reads rows of a dataset as preference pairs: a prompt with a chosen and a rejected answer.

Turns and plain texts are read as for fine-tuning (turns.py). What is the same in both answers is the prompt: where a
row has no prompt of its own, or holds two whole conversations, their common beginning is.
"""

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from lmtrain.config.schema_data import DataConfig
from lmtrain.data.chat.conversations import Format, detect_format, filled, instruction, values_of
from lmtrain.data.chat.turns import BadRow, check, common, drop_first_answers, text_of, tools_of, turns_of

Turns = list[dict[str, Any]]


@dataclass(frozen=True)
class Pair:
    """Two answers to one prompt: all three are turns, or all plain text without a chat template."""

    prompt: Turns | str
    chosen: Turns | str
    rejected: Turns | str
    tools: list[dict[str, Any]] | None
    where: str
    margin: float | None = None  # how much better the chosen answer was found, where the row says so
    dropped_turns: int = 0  # before the first user turn (data.on_assistant_first)


# In the order in which they are tried. Strings are turns of user and assistant, but in preference_text.
PAIR_FORMATS = {
    "preference": Format(
        ("prompt|question|instruction|conversations|messages", "chosen", "rejected"),
        ("margin", "score_chosen", "score_rejected", "input", "system", "tools"),
    ),
    "preference_text": Format(("prompt", "chosen", "rejected"), ("margin", "score_chosen", "score_rejected")),
    "implicit_prompt": Format(("chosen", "rejected"), ("margin", "score_chosen", "score_rejected", "system", "tools")),
}
# How the conversations of hh-rlhf (Anthropic) are written: a blank line, then who speaks.
_SPEAKER = re.compile(r"(?:\A|\n\n)(Human|Assistant):")
_SPEAKER_ROLES = {"Human": "user", "Assistant": "assistant"}


def detect_pair_format(columns: Iterable[str], cfg: DataConfig) -> str:
    """As `detect_format`, of PAIR_FORMATS."""
    return detect_format(columns, cfg, PAIR_FORMATS)


def to_pair(row: Mapping[str, Any], format: str, cfg: DataConfig, where: str) -> Pair:
    """The pair of a row of `format`, from detect_pair_format; data.prompt_template makes its prompt of several columns.

    Raises:
        BadRow: the answers are equal or one is empty, two conversations share no beginning, see turns.py for turns.
    """
    own = {"prompt": filled(cfg.prompt_template, row, cfg, where)} if cfg.prompt_template else {}
    values = values_of(row, PAIR_FORMATS[format], cfg, where, **own)
    margin = _margin(values, where)
    if format == "preference_text":
        prompt, chosen, rejected = (text_of(values[name], name, where) for name in ("prompt", "chosen", "rejected"))
        pair = Pair(prompt, chosen, rejected, None, where, margin)
    else:
        given, answers = _parts(values, where)
        given, dropped = drop_first_answers(given, cfg.on_assistant_first, where)
        system = values.get("system") or cfg.system_prompt
        if system and given[0]["role"] != "system":
            given = [{"role": "system", "content": text_of(system, "system", where)}, *given]
        for turns in answers:
            check([*given, *turns], where)
        pair = Pair(given, *answers, tools_of(values.get("tools"), where), where, margin, dropped)
    if pair.chosen == pair.rejected:
        raise BadRow(where, "chosen and rejected are the same")
    return pair


def _parts(values: dict[str, Any], where: str) -> tuple[Turns, tuple[Turns, Turns]]:
    """The turns of the prompt, and those of the chosen and of the rejected answer."""
    chosen, rejected = (answer_turns(values[name], name, where) for name in ("chosen", "rejected"))
    whole = "assistant" not in (chosen[0]["role"], rejected[0]["role"])
    if whole or ("prompt" not in values and chosen[0] == rejected[0]):
        given, chosen, rejected = _split(chosen, rejected, where)
    elif "prompt" in values:
        given = prompt_turns(values, where)
    else:
        raise BadRow(
            where, "chosen and rejected are answers without a prompt: name its column with data.columns.prompt"
        )
    for name, turns in (("chosen", chosen), ("rejected", rejected)):
        if not turns:
            raise BadRow(where, f"{name} ends where the other goes on: it has no answer of its own")
    for name, turns in (("chosen", chosen), ("rejected", rejected)):
        if turns[0]["role"] != "assistant":
            raise BadRow(where, f"{name} goes on with a turn from {turns[0]['role']}; two answers can be compared only")
        if turns[-1]["role"] != "assistant":
            raise BadRow(where, f"{name} ends with a turn from {turns[-1]['role']}, not with an answer")
    return given, (chosen, rejected)


def prompt_turns(values: dict[str, Any], where: str) -> Turns:
    """The prompt's turns; a text is the user's, `input` (as of Alpaca) its second paragraph."""
    prompt = values["prompt"]
    if not isinstance(prompt, str):
        return turns_of(prompt, where, "prompt")
    if _SPEAKER.match(prompt):
        return _spoken(prompt, "prompt", where)
    extra = text_of(values.get("input", ""), "input", where, may_be_empty=True)
    text = text_of(prompt, "prompt", where)
    return [instruction(text, extra)]


def answer_turns(value: Any, name: str, where: str) -> Turns:
    """An answer or a whole conversation as turns: a list of them, one alone, or a string."""
    if not isinstance(value, str):
        return turns_of([value] if isinstance(value, Mapping) else value, where, name)
    if _SPEAKER.match(value):
        return _spoken(value, name, where)
    return [{"role": "assistant", "content": text_of(value, name, where)}]


def _spoken(text: str, name: str, where: str) -> Turns:
    """The turns of "\\n\\nHuman: ...\\n\\nAssistant: ..."; an unfinished last "Assistant:" of a prompt is left off."""
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
    """Two whole conversations as what they share and how each goes on."""
    shared = common(chosen, rejected)
    if shared == 0:
        raise BadRow(where, "chosen and rejected are conversations that share no beginning, so there is no prompt")
    if shared == len(chosen) == len(rejected):
        raise BadRow(where, "chosen and rejected are the same")
    return chosen[:shared], chosen[shared:], rejected[shared:]


def _margin(values: dict[str, Any], where: str) -> float | None:
    """The row's margin, or else score_chosen - score_rejected, where the row has both.

    Raises:
        BadRow: one is not a finite number, or says that the rejected answer is the better one.
    """
    if "margin" in values:
        name, margin = "margin", _number(values["margin"], "margin", where)
    elif "score_chosen" in values and "score_rejected" in values:
        chosen, rejected = (_number(values[name], name, where) for name in ("score_chosen", "score_rejected"))
        name, margin = "score_chosen - score_rejected", chosen - rejected
    else:
        return None
    if margin < 0:
        raise BadRow(
            where,
            f"{name} is {margin:g}: the rejected answer is the better one. Swap the columns chosen and rejected, or, "
            f"where lower scores are better, the scores with data.columns={{score_chosen: score_rejected, "
            f"score_rejected: score_chosen}}",
        )
    return margin


def _number(value: Any, name: str, where: str) -> float:
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not math.isfinite(number) or isinstance(value, bool):
        raise BadRow(where, f"{name} must be a number and is {repr(value)[:60]}")
    return number
