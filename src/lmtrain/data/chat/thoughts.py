"""Where a chat template keeps an answer's thoughts: the marks around them, and those that it writes itself."""

import re
from collections.abc import Sequence
from typing import Any, NamedTuple

from lmtrain.data.chat.jinja_rendering import ANSWER, CLOSE, OPEN, QUESTION, Template
from lmtrain.data.chat.turns import BadRow, common

_THOUGHT = "lmtrain-thought"
_CALL = {"type": "function", "function": {"name": "lmtrain", "arguments": {}}}
_LONGEST = 64  # tokens that a prompt may write of an answer
_TAG = re.compile(r"[<\[][^<>\[\]\s]+[>\]]")


class ThoughtMarks(NamedTuple):
    """The texts before and after a thought."""

    opening: str = OPEN
    closing: str = CLOSE

    def begun(self, tokenizer: Any, prompt: Sequence[int]) -> str:
        """Returns what a prompt has written of the answer: the beginning of a thought, a whole empty one, or ""."""
        text = tokenizer.decode(prompt[-_LONGEST:])
        found = re.search(rf"{re.escape(self.opening)}\s*(?:{re.escape(self.closing)}\s*)?\Z", text)
        return found[0] if found else ""


def thought_marks(template: Template | None, tools: Any = None) -> ThoughtMarks:
    """Returns the marks around the thought of an answer that the template renders; <think> if it shows none."""
    if template is None:
        return ThoughtMarks()
    asked: dict[str, Any] = {"role": "user", "content": QUESTION}
    answer = {"role": "assistant", "content": ANSWER, "reasoning_content": _THOUGHT}
    # Some templates show only thoughts before tool calls.
    for turn in (answer, {**answer, "content": "", "tool_calls": [_CALL]}):
        try:
            prompt = template.prompt([asked], tools, "")
            (text,) = template.render_texts([[asked, turn]], tools, "")
        except BadRow:
            continue
        before, found, after = text.partition(_THOUGHT)
        tags, closing = _TAG.findall(before), _TAG.search(after)
        if found and tags and closing:
            # The prompt may already end with the opening mark, or with a whole empty thought.
            opening = before[common(prompt, before) :].strip() or before[before.rindex(tags[-1]) :].strip()
            return ThoughtMarks(opening, closing[0])
    return ThoughtMarks()
