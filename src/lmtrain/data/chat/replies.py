"""What a chat template writes between an answer and the next: the turns that follow it, and what asks for the next.

Once turns follow, a template may render the answer itself differently: Qwen3 leaves out its thought. In a model's
context an answer stays as the model wrote it, so of the rendered text only what comes after the answer is taken. The
answer is a placeholder, which templates neither trim nor search for marks.
"""

from collections.abc import Iterator
from functools import cached_property
from typing import Any, NamedTuple

from lmtrain.data.chat.call_formats import Tools, Unreadable, call_format, calls_turn
from lmtrain.data.chat.jinja_rendering import ANSWER, QUESTION, Template
from lmtrain.data.chat.special_text import pattern_of
from lmtrain.data.chat.turns import BadRow, common
from lmtrain.errors import UserError

Turns = list[dict[str, Any]]

_REPLY = "lmtrain-reply"


class Replies:
    """Renders what follows the answers of a conversation."""

    def __init__(self, template: Template, tools: Tools | None) -> None:
        self.template, self.tools = template, tools
        self._special = pattern_of(template.special_tokens)
        self._ends: dict[bool, Ends] = {}

    def text(self, said: Turns, ended_by: str | None = None, **options: Any) -> str:
        """Returns the text from the end of an answer to the beginning of the next.

        The end of turn that the template writes after an answer is part of it, unless the answer ended with it.

        Args:
            said: the turns between the two; with the results of tool calls, the answer consists of these calls.
            ended_by: the token that the answer ended with; None: the one that the template writes.
            options: variables of the template.

        Raises:
            UserError: the template can't render such turns after an answer.
        """
        try:
            ends = self.ends(with_calls=_with_calls(said))
            following = self._around(said, **options)[0]
        except BadRow as bad:
            raise UserError(f"{bad}: choose another template with data.chat_template, such as chatml") from None
        if ended_by and _with_calls(said) and self._closing.endswith(ended_by):  # as objective.stop_tokens may have it
            return following
        ended_by = ended_by or (not _with_calls(said) and self.template.end_of_turn) or ends.end
        at = following.find(ends.end)
        return following[at + (len(ends.end) if ended_by == ends.end or ended_by == ends.last else 0) :]

    def ends(self, with_calls: bool) -> "Ends":
        """Returns how the template ends an answer.

        with_calls: one that consists of tool calls, which templates may end otherwise.

        Raises:
            BadRow: the template refuses turns after such an answer, or leaves them out.
        """
        if with_calls not in self._ends:
            role = {"role": "tool", "name": "lmtrain"} if with_calls else {"role": "user"}
            following, alone = self._around([{**role, "content": _REPLY}])
            if _REPLY not in following:
                found = f"the chat template ({self.template.label}) leaves out turns of the role {role['role']}"
                raise BadRow(_WHERE, found)
            same, before = common(following, alone), following.partition(_REPLY)[0]
            shared = [token for token in self._special.finditer(following) if token.end() <= same]
            first, last = self._special.search(before), self._special.search(alone)
            # Only a last answer may end with a token of its own, such as gpt-oss's <|return|>.
            apart = Ends(first[0] if first else "", last[0] if last else None)
            self._ends[with_calls] = Ends(shared[-1][0]) if shared else apart
        return self._ends[with_calls]

    def _around(self, said: Turns, **options: Any) -> tuple[str, str]:
        """Returns the text after a placeholder of an answer that `said` follows, and after one that nothing follows."""
        try:
            return self._placed(said, **options)
        except BadRow:  # templates may refuse ids that a model has written
            plain = [{key: value for key, value in turn.items() if key != "tool_call_id"} for turn in said]
            if plain == said:
                raise
            return self._placed(plain, **options)

    def _placed(self, said: Turns, **options: Any) -> tuple[str, str]:
        why = f"the chat template ({self.template.label}) doesn't write out an answer that turns follow"
        found = BadRow(_WHERE, why)
        # Results of tools need calls before them: the first of these answers with which the template renders them.
        results = [turn for turn in said if turn["role"] == "tool"]
        for answer, closing in self._answers([str(turn.get("name") or "tool") for turn in results]):
            # Calls and results get the same ids.
            calls = answer.get("tool_calls", [])
            answered = zip(results[-len(calls) :], calls, strict=False)
            ids = [turn.get("tool_call_id", call["id"]) for turn, call in answered]
            for call, own in zip(calls, ids, strict=True):
                call["id"] = own
            given = iter(ids * len(results))
            turns = [{"tool_call_id": next(given), **turn} if turn["role"] == "tool" else turn for turn in said]
            try:
                texts = [
                    self.template.prompt([_ASKED, answer, *turns], self.tools, _WHERE, **options),
                    self.template.prompt([_ASKED, answer], self.tools, _WHERE, ask=False, **options),
                ]
            except BadRow as bad:
                found = bad
                continue
            # What it writes after the answer, with the turns and without.
            if all(ANSWER in text for text in texts):
                after = [text.partition(ANSWER)[2] for text in texts]
                following, alone = (text.split(closing, 1)[-1] if closing else text for text in after)
                return following, alone
        raise found

    def _answers(self, called: list[str]) -> Iterator[tuple[dict[str, Any], str]]:
        """Yields answers with calls of these tools, and what closes the last call, after the placeholder.

        Some templates allow one call in an answer (Llama 3.1), or leave calls out (SmolLM2).
        """
        calls: list[tuple[str, Any]] = [(name, {}) for name in called]
        if calls:
            calls[-1] = (called[-1], {"lmtrain": ANSWER})
            yield calls_turn(calls), self._closing
        if len(calls) > 1:
            yield calls_turn(calls[-1:]), self._closing
        yield {**calls_turn(calls), "content": ANSWER} if calls else {"role": "assistant", "content": ANSWER}, ""

    @cached_property
    def _closing(self) -> str:
        """The text that ends a tool call."""
        try:
            return call_format(self.template, self.tools).closing.strip()
        except (Unreadable, BadRow):
            return ""


class Ends(NamedTuple):
    """The special tokens with which a template ends an answer."""

    end: str  # of an answer that turns follow, "" for none
    last: str | None = None  # of a last answer, if it isn't the same


_ASKED = {"role": "user", "content": QUESTION}
_WHERE = "a turn of the environment"


def _with_calls(said: Turns) -> bool:
    return any(turn["role"] == "tool" for turn in said)
