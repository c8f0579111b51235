"""A conversation as text, with the stretches of it that an assistant's turns are.

Which characters are a turn's is found in one of two ways. A template with {% generation %} markers says so itself.
Of any other, the conversation is rendered up to the turn, with the words that ask for an answer (the generation
prompt), and once more with the turn: the answer is what lies between. That holds only where both are beginnings of
the whole conversation's text, which is checked for every turn.

An answer's end-of-turn token belongs to it, for it is what the model must learn to stop with. What a template writes
after that token (a newline, in ChatML) doesn't: no model is ever asked to say it.
"""

import re
from dataclasses import dataclass
from typing import Any

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerFast
from transformers.utils.chat_template_utils import render_jinja_template

from lmtrain.data.conversations import Conversation
from lmtrain.data.turns import BadRow
from lmtrain.errors import UserError

Span = tuple[int, int]  # characters [start, end) of a text
_QUESTION, _ANSWER = "lmtrain-question", "lmtrain-answer"  # stand where a template puts the turns' text
_REFUSALS = (TemplateError, TypeError, ValueError, KeyError)  # what a template raises on turns it isn't made for
_MARKERS = re.compile(r"\{%-?\s*generation\s*-?%\}")


@dataclass(frozen=True)
class Rendered:
    """`spans` of the assistant turns that were asked for, and `borders`, the characters after which each ends."""

    text: str
    spans: list[Span]
    borders: list[int]


class ChatTemplate:
    """A Jinja chat template at work with a tokenizer's special tokens.

    Args:
        text: the template.
        label: what messages call it: "chatml", "the tokenizer's own".

    Raises:
        UserError: the template can't render a question and its answer, or nothing could end an answer.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerFast, text: str, label: str) -> None:
        self.text, self.label = text, label
        self.has_markers = bool(_MARKERS.search(text))
        self._special = {k: v for k, v in tokenizer.special_tokens_map.items() if isinstance(v, str)}
        self.end_of_turn, self._after_turn = self._end_of_turn(tokenizer)
        # A template without an end-of-turn token: the tokenizer's end of text ends the last answer.
        self._added_end = "" if self.end_of_turn else tokenizer.eos_token
        if not self.end_of_turn and not self._added_end:
            raise UserError(
                f"the chat template ({label}) writes no special token after an answer and the tokenizer has no end of "
                f"text, so the model could never learn to stop: choose another with data.chat_template"
            )

    def prompt(self, messages: list[dict[str, Any]], tools: Any, where: str) -> str:
        """The text up to and including the words that ask for an answer."""
        return self._render([messages], tools, where, add_generation_prompt=True)[0]

    def render(self, conversation: Conversation, turns: list[int]) -> Rendered:
        """The whole conversation, with the spans of the assistant turns whose positions in messages are `turns`.

        Raises:
            BadRow: the template refuses the conversation, or has no place for its tools.
            UserError: the template isn't a prefix of itself, or its markers miss turns.
        """
        messages, tools, where = conversation.messages, conversation.tools, conversation.where
        self._check_tools(conversation)
        text, marked = self._full(messages, tools, where)
        spans = self._by_markers(text, marked, conversation, turns) if self.has_markers else []
        if not self.has_markers and turns:
            spans = self._by_prefixes(text, conversation, turns)
        if self._added_end and messages[-1]["role"] == "assistant":
            end = len(text) - len(self._after_turn) if text.endswith(self._after_turn) else len(text)
            text = text[:end] + self._added_end
            if turns and turns[-1] == len(messages) - 1:
                spans[-1] = (spans[-1][0], len(text))
        borders = [end + len(self._after_turn) if text.startswith(self._after_turn, end) else end for _, end in spans]
        return Rendered(text, spans, borders)

    def _end_of_turn(self, tokenizer: PreTrainedTokenizerFast) -> tuple[str, str]:
        """What is written after every answer up to its first special token, and what comes after that token."""
        asked = [{"role": "user", "content": _QUESTION}, {"role": "assistant", "content": _ANSWER}]
        try:
            (text,) = self._render([asked], None, "")
        except BadRow as error:
            raise UserError(
                f"the chat template ({self.label}) can't render a question and its answer: {error.reason}"
            ) from None
        before, found, suffix = text.rpartition(_ANSWER)
        if not found or _QUESTION not in before:
            raise UserError(f"the chat template ({self.label}) doesn't write out the turns of a conversation")
        added = [t.content for t in tokenizer.added_tokens_decoder.values() if t.special]
        special = sorted({*added, *tokenizer.all_special_tokens}, key=len, reverse=True)
        ends = re.search("|".join(map(re.escape, special)), suffix) if special else None
        return (suffix[: ends.end()], suffix[ends.end() :]) if ends else ("", suffix)

    def _render(
        self, chats: list[list[dict[str, Any]]], tools: Any, where: str, add_generation_prompt: bool = False
    ) -> list[str]:
        try:
            texts, _ = render_jinja_template(
                conversations=chats,
                tools=tools,
                chat_template=self.text,
                add_generation_prompt=add_generation_prompt,
                **self._special,
            )
        except _REFUSALS as error:
            raise BadRow(where, f"the chat template ({self.label}) refuses it: {error}") from None
        return texts

    def _full(self, messages: list[dict[str, Any]], tools: Any, where: str) -> tuple[str, list[Span]]:
        """The whole text and, for templates with markers, the spans they mark."""
        if not self.has_markers:
            return self._render([messages], tools, where)[0], []
        try:
            (text,), (marked,) = render_jinja_template(
                conversations=[messages],
                tools=tools,
                chat_template=self.text,
                return_assistant_tokens_mask=True,
                **self._special,
            )
        except _REFUSALS as error:
            raise BadRow(where, f"the chat template ({self.label}) refuses it: {error}") from None
        return text, [(start, end) for start, end in marked]

    def _by_markers(self, text: str, marked: list[Span], conversation: Conversation, turns: list[int]) -> list[Span]:
        """One span for each of `turns`; a marker that stops short of the end-of-turn token is carried over it."""
        answers = answers_of(conversation.messages)
        if len(marked) != len(answers):
            raise UserError(
                f"{conversation.where}: the chat template ({self.label}) marks {len(marked)} stretches with "
                f"{{% generation %}} where the conversation has {len(answers)} assistant turns: mend its markers, or "
                f"choose another with data.chat_template"
            )
        spans = []
        for start, end in (marked[answers.index(turn)] for turn in turns):
            missing = self.end_of_turn and text.startswith(self.end_of_turn, end)
            spans.append((start, end + len(self.end_of_turn) if missing else end))
        return spans

    def _by_prefixes(self, text: str, conversation: Conversation, turns: list[int]) -> list[Span]:
        messages, tools, where = conversation.messages, conversation.tools, conversation.where
        given = self._render([messages[:i] for i in turns], tools, where, add_generation_prompt=True)
        said = self._render([messages[: i + 1] for i in turns], tools, where)
        spans = []
        for turn, before, after in zip(turns, given, said, strict=True):
            # Behind the end-of-turn token a template may write what only the end of a conversation has.
            after = after.removesuffix(self._after_turn)
            for part in (before, after):
                if not text.startswith(part):
                    raise UserError(self._not_a_prefix(text, part, conversation, turn))
            spans.append((len(before), len(after)))
        return spans

    def _not_a_prefix(self, text: str, part: str, conversation: Conversation, turn: int) -> str:
        """Says where the text of the turns up to one departs from the whole conversation's."""
        at = next((i for i, (a, b) in enumerate(zip(part, text, strict=False)) if a != b), min(len(part), len(text)))
        out = ["choose another with data.chat_template", "mark the answers in the template with {% generation %}"]
        if turn != answers_of(conversation.messages)[-1]:
            out.insert(0, "learn the last answer only (data.train_on=last_assistant)")
        return (
            f"{conversation.where}: the chat template ({self.label}) writes a conversation otherwise while it is going "
            f"on than when it is over, so the model would learn from a text that it never sees. Up to turn {turn + 1} "
            f"it writes ...{part[max(0, at - 30) : at]!r}, then {part[at : at + 30]!r}; in the whole conversation "
            f"{text[at : at + 30]!r} stands there. Ways out: {', or '.join(out)}"
        )

    def _check_tools(self, conversation: Conversation) -> None:
        calls = any("tool_calls" in turn for turn in conversation.messages)
        for has, word in ((calls, "tool_calls"), (conversation.tools, "tools")):
            if has and word not in self.text:
                raise BadRow(
                    conversation.where,
                    f"the row has {word.replace('_', ' ')}, which the chat template ({self.label}) never shows the "
                    f"model: choose one that does, such as data.chat_template=chatml",
                )


def answers_of(messages: list[dict[str, Any]]) -> list[int]:
    """Positions of the assistant turns."""
    return [i for i, turn in enumerate(messages) if turn["role"] == "assistant"]
