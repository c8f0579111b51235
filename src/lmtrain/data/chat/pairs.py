"""Reads rows of a dataset as preference pairs: a prompt with a chosen and a rejected answer.

Turns and plain texts are read as for fine-tuning (turns.py). If a row has no prompt of its own, or holds two whole
conversations, the prompt is their common beginning.
"""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from lmtrain.config.schema_data import DataConfig
from lmtrain.data.chat import conversations
from lmtrain.data.chat.columns import BESIDE, FORMATS, RowColumns, leave_out
from lmtrain.data.chat.conversations import Turns, filled, options_of, with_system
from lmtrain.data.chat.turns import BadRow, check, common, drop_first_answers, shown, text_of, tools_of, turns_of


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
    options: dict[str, Any] = field(default_factory=dict)  # variables of the chat template


# In conversations of hh-rlhf (Anthropic), each turn begins with a blank line and the name of the speaker.
_SPEAKER = re.compile(r"(?:\A|\n\n)(Human|Assistant):")
_SPEAKER_ROLES = {"Human": "user", "Assistant": "assistant"}


def to_pair(row: Mapping[str, Any], reading: RowColumns, cfg: DataConfig, where: str) -> Pair:
    """Returns the pair of a row, read as columns.detect says; data.prompt_template builds its prompt.

    Raises:
        BadRow: the answers are equal, one is empty, two conversations share no beginning, turns.py rejects a turn, or a
            column that changes the prompt has no place in it.
    """
    given = {"prompt": filled(cfg.prompt_template, reading, row, where)} if cfg.prompt_template else {}
    values = reading.values(row, where, **given)
    margin = _margin(values, where)
    if reading.format.name == "preference_text":
        reading.refuse(values, BESIDE, "which plain text has no place for", where)
        prompt, chosen, rejected = (text_of(values[name], name, where) for name in ("prompt", "chosen", "rejected"))
        return _different(Pair(prompt, chosen, rejected, None, where, margin))
    chosen_turns, rejected_turns = (answer_turns(values[name], name, where) for name in ("chosen", "rejected"))
    whole = "assistant" not in (chosen_turns[0]["role"], rejected_turns[0]["role"])
    if whole or ("prompt" not in values and chosen_turns[0] == rejected_turns[0]):
        reading.refuse(values, ("history", "input"), "which has no place beside whole conversations", where)
        before, chosen_turns, rejected_turns = _split(chosen_turns, rejected_turns, where)
        if "prompt" in values:
            _check_prompt(prompt_turns(values, reading, where), before, reading.name("prompt"), where)
    elif "prompt" in values:
        before = prompt_turns(values, reading, where)
    else:
        raise BadRow(where, "chosen and rejected answer no prompt: name its column with data.columns.prompt")
    return replace(_pair(before, chosen_turns, rejected_turns, values, cfg, where), margin=margin)


def _check_prompt(own: Turns, given: Turns, column: str, where: str) -> None:
    """Raises BadRow if the row's `own` prompt is not in the conversations' common beginning `given`."""
    prompt = [(turn["role"], turn["content"].strip()) for turn in own]
    shared = [(turn["role"], turn["content"].strip()) for turn in given]
    begins = prompt[: len(shared)] == shared  # for a column that holds the whole conversation
    if not begins and not any(shared[at : at + len(prompt)] == prompt for at in range(len(shared))):
        said = prompt[-1][1]
        said = said[:60] + ("..." if len(said) > 60 else "")
        found = f"chosen and rejected don't begin with the prompt, {said!r} in the column {column}"
        raise BadRow(where, f"{found}: fix it, or {leave_out(column)}")


def prompt_turns(values: Mapping[str, Any], reading: RowColumns, where: str) -> Turns:
    """Works like conversations.prompt_turns, also for a text in which Human: and Assistant: speak."""
    if isinstance(values["prompt"], str) and _SPEAKER.match(values["prompt"]):
        reading.refuse(values, ("history", "input"), "which has no place beside a prompt of several turns", where)
        return _spoken(values["prompt"], "prompt", where)
    return conversations.prompt_turns(values, reading, where)


def bare_turns(prompt: Any, where: str) -> Turns:
    """Returns the turns of a prompt that stands alone, without the other columns of its row."""
    return prompt_turns({"prompt": prompt}, RowColumns(FORMATS["prompts"]["prompt"], {}, {}, {}), where)


def opening(values: Mapping[str, Any], reading: RowColumns, cfg: DataConfig, where: str) -> tuple[Turns, int]:
    """Returns the turns before the answer: the prompt's, after the row's system turn or data.system_prompt.

    Also returns how many turns before the first user turn were dropped (data.on_assistant_first).
    """
    turns = with_system(prompt_turns(values, reading, where), values, cfg, where)
    return drop_first_answers(turns, cfg.on_assistant_first, where)


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
    texts = [text_of(said, f"{name}, turn {i}", where) for i, (_, said) in enumerate(turns, 1)]
    return [{"role": role, "content": text} for (role, _), text in zip(turns, texts, strict=True)]


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
    given, dropped = drop_first_answers(with_system(given, values, cfg, where), cfg.on_assistant_first, where)
    check([*given, *chosen], where)
    check([*given, *rejected], where)
    tools, options = tools_of(values.get("tools"), where), options_of(values, where)
    return _different(Pair(given, chosen, rejected, tools, where, dropped_turns=dropped, options=options))


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
