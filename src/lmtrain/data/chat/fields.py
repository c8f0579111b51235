"""Finds fields of a conversation that its chat template does not render."""

from dataclasses import replace
from typing import Any

from lmtrain.data.chat.conversations import Conversation
from lmtrain.data.chat.jinja_rendering import thought_of
from lmtrain.data.chat.rendering import ChatTemplate, Rendered
from lmtrain.data.chat.turns import BadRow

LABELS = ("name", "tool_call_id")  # they say who speaks or what is answered; a template may well do without


def unshown(template: ChatTemplate, conversation: Conversation, texts: list[Rendered], learned: list[int]) -> list[str]:
    """The fields of a conversation that are in none of its `texts`, by name.

    Args:
        learned: positions of the turns that are learned; the thoughts of others are history, which templates may leave
            out.
    """
    found: dict[str, None] = {}  # a set that keeps its order
    for place, turn in enumerate(conversation.messages[: max(text.shown for text in texts)]):
        holders = [text for text in texts if text.shown > place]
        if not _has_content(conversation, holders, place, template):
            found[f"{turn['role']} content"] = None
        thought = thought_of(turn) if place in learned else ""
        if thought and not any(thought in text.text for text in holders):
            found["reasoning_content" if turn.get("reasoning_content") else "<think> block"] = None
    for label in LABELS:
        bare = [{k: v for k, v in turn.items() if k != label} for turn in conversation.messages]
        other = replace(conversation, messages=bare)
        if bare != conversation.messages and not _differs(template, conversation, other, texts):
            found[label] = None
    return list(found)


def check_tools(template: ChatTemplate, conversation: Conversation) -> None:
    """Raises BadRow where the template shows nothing of a conversation's tools or of one of its tool calls."""
    without = [("tools", replace(conversation, tools=None))] if conversation.tools else []
    for place, turn in enumerate(conversation.messages):
        if "tool_calls" in turn:
            bare = {key: value for key, value in turn.items() if key != "tool_calls"}
            without.append(("tool calls", _with_turn(conversation, place, bare)))
    for words, other in without:
        if not template.differs(conversation, other, len(conversation.messages)):
            raise BadRow(
                conversation.where,
                f"the row has {words}, which the chat template ({template.label}) never shows the model: choose one "
                f"that does, such as data.chat_template=chatml",
            )


def _has_content(conversation: Conversation, texts: list[Rendered], place: int, template: ChatTemplate) -> bool:
    """Whether what a turn says is in one of `texts`: it stands there, or with other words they read otherwise."""
    content = conversation.messages[place]["content"].strip()
    if any(content in text.text for text in texts):
        return True
    turn = conversation.messages[place]
    others = dict.fromkeys({"content", "instruction", "input"} & turn.keys(), "lmtrain-other")
    other: dict[str, Any] = {**turn, **others}
    return _differs(template, conversation, _with_turn(conversation, place, other), texts)


def _with_turn(conversation: Conversation, place: int, turn: dict[str, Any]) -> Conversation:
    messages = [*conversation.messages[:place], turn, *conversation.messages[place + 1 :]]
    return replace(conversation, messages=messages)


def _differs(template: ChatTemplate, one: Conversation, other: Conversation, texts: list[Rendered]) -> bool:
    return any(template.differs(one, other, text.shown) for text in texts)
