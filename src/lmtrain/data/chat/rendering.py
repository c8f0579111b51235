"""Renders a conversation to text with the character spans of the assistant's turns.

The span of a turn is found in one of two ways. A template with {% generation %} markers marks it. With any other
template, the conversation is rendered up to the turn with the generation prompt (the words that ask for an answer),
and once more with the turn: the answer is the difference.

If all of these texts are prefixes of the whole conversation's text, that one text is trained on. A template that
rewrites earlier turns (Qwen3 drops their reasoning) gives several texts: each answer is trained on in the text that the
model sees when it generates it, and answers whose texts are prefixes of one another share the longest.

An answer's end-of-turn token belongs to it, because the model must learn to stop with it. What a template writes after
that token (a newline, in ChatML) doesn't, because no model ever has to generate it. This module also detects what a
template never shows of a conversation (`unshown`, `check_tools`).
"""

from dataclasses import dataclass, field, replace
from typing import Any

from lmtrain.data.chat.conversations import Conversation
from lmtrain.data.chat.jinja_rendering import ANSWER, CLOSE, OPEN, Span, Template, answers_of, thought_of
from lmtrain.data.chat.turns import BadRow, common
from lmtrain.errors import UserError

_MODES = ({"enable_thinking": False}, {"enable_thinking": True})  # one of them is a template's default
_REWRITTEN = "answers whose history the chat template renders differently when it asks for them: learned from that"


@dataclass(eq=False)
class Rendered:
    """The text of a conversation's first `shown` messages, with the spans of the answers located in it.

    marked: the spans that the template marks with {% generation %}.
    answers: the span of the assistant turn at each of these positions of the messages, in ascending order.
    borders: for each answer, the end of what the template writes after its end-of-turn token.
    remarks: notes about the text for the plan.
    """

    text: str
    shown: int
    marked: list[Span] = field(default_factory=list)
    answers: dict[int, Span] = field(default_factory=dict)
    borders: list[int] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)


class ChatTemplate(Template):
    """A chat template that locates the answers in the text it renders."""

    def render(self, conversation: Conversation, turns: list[int]) -> list[Rendered]:
        """Returns texts with the spans of the assistant turns at positions `turns` of messages, each in one text.

        There is one text, of the whole conversation, unless the template rewrites earlier turns.

        Raises:
            BadRow: the template refuses the conversation.
            UserError: an answer can't be separated from its prompt, or the template's markers miss turns.
        """
        messages = conversation.messages
        if turns and not self.has_markers:
            texts = self._by_prefixes(conversation, turns)
        else:
            texts = [self._text(conversation, len(messages))]
            if turns:
                self._by_markers(texts, conversation, turns)
        found = sorted((text for text in texts if text.answers), key=lambda text: text.shown) or texts[:1]
        for text in found:
            self._finish(text, messages)
        return found

    def render_one(self, conversation: Conversation, turns: list[int]) -> Rendered:
        """Works like `render` for callers that need a single text, that of the whole conversation.

        Raises:
            UserError: as for `render`, and if the template rewrites earlier turns.
        """
        texts = self.render(conversation, turns)
        if len(texts) > 1 or texts[0].shown < len(conversation.messages):
            what = f"renders earlier turns differently, so its {len(turns)} answers can't be learned from one text"
            fixes = "data.train_on=last_assistant, for conversations also assistant"
            raise self._unfit(conversation, f"{what}. Possible fixes: {fixes}, or")
        return texts[0]

    def _finish(self, made: Rendered, messages: list[dict[str, Any]]) -> None:
        """Ends the last answer if the template doesn't, sorts the answers, and finds their borders."""
        made.answers = dict(sorted(made.answers.items()))
        last = made.shown - 1
        if self.added_end and messages[last]["role"] == "assistant":
            made.text = made.text.removesuffix(self.after_turn) + self.added_end
            if last in made.answers:
                made.answers[last] = (made.answers[last][0], len(made.text))
        ends = [end for _, end in made.answers.values()]
        if any(not made.text[:end].rstrip().endswith(self.special_tokens) for end in ends):
            ended = f"answers that the chat template ({self.label}) ends without a special token"
            made.remarks.append(f"{ended}: the model doesn't learn to stop there")
        if "strftime_now" in f"{self.text}{self.tool_use}":
            made.remarks.append(f"rendered with the day they were prepared, for the chat template ({self.label})")
        after = self.after_turn
        made.borders = [end + len(after) if made.text.startswith(after, end) else end for end in ends]

    def _text(self, conversation: Conversation, shown: int) -> Rendered:
        messages, options = conversation.messages[:shown], conversation.options
        text, marked = self.render_marked(messages, conversation.tools, conversation.where, **options)
        return Rendered(text, shown, marked)

    def _by_markers(self, texts: list[Rendered], conversation: Conversation, turns: list[int]) -> None:
        """Finds each of `turns` in the first of `texts` that continues its text; if none does, adds its text.

        A marked span that ends before the end-of-turn token is extended over it.
        """
        for turn in reversed(turns):
            own = self._text(conversation, turn + 1) if turn + 1 < texts[0].shown else texts[0]
            text = _that_continues(own.text.removesuffix(self.after_turn), texts, own)
            answers = answers_of(conversation.messages[: text.shown])
            if len(text.marked) != len(answers):
                marked = f"marks {len(text.marked)} stretches with {{% generation %}}"
                there = f"the conversation has {len(answers)} assistant turns"
                raise self._unfit(conversation, f"{marked} where {there}: fix its markers, or")
            start, end = text.marked[answers.index(turn)]
            missing = self.end_of_turn and text.text.startswith(self.end_of_turn, end)
            text.answers[turn] = (start, end + len(self.end_of_turn) if missing else end)

    def _by_prefixes(self, conversation: Conversation, turns: list[int]) -> list[Rendered]:
        """Finds `turns` without markers, the whole conversation first: an answer is what follows its prompt's text."""
        messages, tools, where = conversation.messages, conversation.tools, conversation.where
        options = conversation.options
        ends = sorted({*(i + 1 for i in turns), len(messages)})
        said = self.render_beginnings(messages, ends, tools, where, **options)
        given = self.render_beginnings(messages, turns, tools, where, add_generation_prompt=True, **options)
        texts = [Rendered(said[-1], len(messages))]
        for turn, before, own in reversed(list(zip(turns, given, said, strict=False))):
            remarks: list[str] = []
            if not own.startswith(before):
                before, own, remark = self._asked_otherwise(before, own, conversation, turn)
                remarks.append(remark)
            # After the end-of-turn token a template may write text that only ends a conversation.
            after = own.removesuffix(self.after_turn)
            text = _that_continues(after, texts, Rendered(own, turn + 1))
            text.answers[turn] = (len(before), len(after))
            text.remarks += remarks
        return texts

    def _asked_otherwise(self, before: str, own: str, conversation: Conversation, turn: int) -> tuple[str, str, str]:
        """Returns prompt, prompt with answer, and a remark, for an answer whose text doesn't begin with its prompt.

        Nemotron's text of an answer without reasoning begins with its prompt for enable_thinking=false. DeepSeek-R1's
        prompt ends with an open <think>, which it leaves out of earlier answers: there the reasoning and </think> are
        put after the prompt, as the model generates them (arXiv:2501.12948, table 1).

        Raises:
            UserError: no text with the answer can be made to begin with its prompt.
        """
        messages, tools, where = conversation.messages, conversation.tools, conversation.where
        options = conversation.options
        # Does it begin so with thinking on or off?
        for mode in ({**one, **options} for one in _MODES):
            asked = self.render_texts([messages[:turn]], tools, where, add_generation_prompt=True, **mode)[0]
            (answered,) = self.render_texts([messages[: turn + 1]], tools, where, **mode)
            if answered.startswith(asked):
                words = "true" if mode["enable_thinking"] else "false"
                return asked, answered, f"answers rendered with enable_thinking={words}, as they are written"
        # Or has the text the words that ask for the answer somewhere else?
        history = self.render_texts([messages[:turn]], tools, where, **options)[0]
        words = before.removeprefix(history) if before.startswith(history) else ""
        answer = self._answer(own, words, conversation, turn) if words else ""
        if answer:
            return before, before + answer, _REWRITTEN
        # Or does only the prompt open a thought?
        same = common(before, own)
        if before[same:].strip() != OPEN:
            asked, there = before[same : same + 30], own[same : same + 30]
            what = f"asks for turn {turn + 1} with {asked!r}, where the text with the answer has {there!r}, which"
            fixes = "the model never sees. Possible fixes: mark the answers in it with {% generation %}, or"
            raise self._unfit(conversation, f"{what} {fixes}")
        thought = thought_of(messages[turn])
        remark = (
            f"answers put behind the {OPEN} that the chat template writes only when it asks for an answer, after "
            f"their {'thought' if thought else 'empty thought'} and {CLOSE}"
        )
        answer = own[same:].lstrip()
        return before, before + (answer if CLOSE in answer else f"{thought}\n{CLOSE}\n\n{answer}"), remark

    def _answer(self, own: str, words: str, conversation: Conversation, turn: int) -> str:
        """Returns the part of `own` after `words`, the generation prompt, or "" if `own` doesn't contain it.

        It is looked for in the beginning that `own` shares with the text of another answer in the same place.
        """
        messages = [*conversation.messages[:turn], {"role": "assistant", "content": ANSWER}]
        (text,) = self.render_texts([messages], conversation.tools, conversation.where, **conversation.options)
        at = own.rfind(words, 0, common(own, text))
        return own[at + len(words) :] if at >= 0 else ""

    def _unfit(self, conversation: Conversation, what: str) -> UserError:
        template = f"{conversation.where}: the chat template ({self.label})"
        return UserError(f"{template} {what} choose another with data.chat_template")


def _that_continues(beginning: str, texts: list[Rendered], own: Rendered) -> Rendered:
    """Returns the first of `texts` that continues `beginning`; if none does, `own`, which is added to them."""
    found = next((text for text in texts if text.text.startswith(beginning)), own)
    if found not in texts:
        texts.append(found)
    return found


LABELS = ("name", "tool_call_id")  # who speaks and which tool call is answered; a template may leave these out


def unshown(template: ChatTemplate, conversation: Conversation, texts: list[Rendered], learned: list[int]) -> list[str]:
    """Returns the names of the conversation's fields that are in none of its `texts`.

    Args:
        learned: positions of the turns that are trained on; templates may leave out the reasoning of other turns.
    """
    found: dict[str, None] = {}  # used as an ordered set
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
    """Raises BadRow if the template's text would be the same without the tools, or without one turn's tool calls."""
    without = [("tools", replace(conversation, tools=None))] if conversation.tools else []
    for place, turn in enumerate(conversation.messages):
        if "tool_calls" in turn:
            bare = {key: value for key, value in turn.items() if key != "tool_calls"}
            without.append(("tool calls", _with_turn(conversation, place, bare)))
    for words, other in without:
        if not template.differs(conversation, other, len(conversation.messages)):
            found = f"the row has {words}, which the chat template ({template.label}) never shows the model"
            raise BadRow(conversation.where, f"{found}: choose one that does, such as data.chat_template=chatml")


def _has_content(conversation: Conversation, texts: list[Rendered], place: int, template: ChatTemplate) -> bool:
    """Returns whether a turn's content is in one of `texts`, literally or because other content would change one."""
    turn = conversation.messages[place]
    if any(turn["content"].strip() in text.text for text in texts):
        return True
    others = dict.fromkeys({"content", "instruction", "input"} & turn.keys(), "lmtrain-other")
    return _differs(template, conversation, _with_turn(conversation, place, {**turn, **others}), texts)


def _with_turn(conversation: Conversation, place: int, turn: dict[str, Any]) -> Conversation:
    messages = [*conversation.messages[:place], turn, *conversation.messages[place + 1 :]]
    return replace(conversation, messages=messages)


def _differs(template: ChatTemplate, one: Conversation, other: Conversation, texts: list[Rendered]) -> bool:
    return any(template.differs(one, other, text.shown) for text in texts)
