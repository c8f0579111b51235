"""Rewards computed from the text of an answer: a final number, a pattern, a length."""

import re
from collections.abc import Sequence
from decimal import Decimal, InvalidOperation
from typing import Any

from lmtrain.data.chat.turns import is_exact
from lmtrain.errors import UserError
from lmtrain.rewards.base import ComparedWithReference, Reward, needed

# With a power of ten, as Python writes a float such as 1e-05.
_NUMBER = re.compile(r"[-+]?\$?(?:(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?|\.\d+)(?:[eE][-+]?\d+)?")
_MINUS = "\u2212"  # Unicode's minus sign, which models write too


def final_number(text: str, after: str | None = None) -> Decimal | None:
    """Returns the last number of a text, or of what follows the last `after` in it, or None if there is none."""
    if after is not None:
        _, found, text = text.rpartition(after)
        if not found:
            return None
    numbers = _NUMBER.findall(text.replace(_MINUS, "-"))
    try:
        return Decimal(numbers[-1].replace(",", "").replace("$", "")) if numbers else None
    except InvalidOperation:
        return None


def whole_turns(completions: Sequence[str], columns: dict[str, Sequence[Any]]) -> list[str]:
    """Returns the assistant's turns from their start, with what the prompts have written of them."""
    begun = columns.get("turn_start") or [""] * len(completions)
    return [start + text for start, text in zip(begun, completions, strict=True)]


class ExactNumber(ComparedWithReference):
    """A reward of `right` if the completion's last number equals the reference's, as decimals: 1,000.0 is 1000."""

    def __init__(
        self,
        column: str = "answer",
        after: str | None = None,
        reference_after: str | None = None,
        right: float = 1.0,
        wrong: float = 0.0,
    ) -> None:
        """
        Args:
            column: the column of the reference, a number or a text that ends with one.
            after: only what follows the last of these in a completion counts, such as "####"; None: all of it.
            reference_after: the same for the reference.
        """
        super().__init__(column, right, wrong)
        self.after, self.reference_after = after, reference_after

    def is_right(self, completion: str, reference: Any) -> bool:
        wanted = final_number(str(reference), self.reference_after)
        if wanted is None:
            raise ValueError(f"the column {self.column} holds no number: {str(reference)[:80]!r}")
        return final_number(completion, self.after) == wanted


class Equal(ComparedWithReference):
    """A reward of `right` if the completion equals the reference, ignoring white space around both."""

    def is_right(self, completion: str, reference: Any) -> bool:
        return is_exact(completion, reference)


class Regex(Reward):
    """A reward of `right` if a pattern is found or, with `whole`, if it matches the whole completion.

    Where the prompt has already written the beginning of the answer, such as <think>, the pattern may match the
    completion with it or without.
    """

    def __init__(self, pattern: str, whole: bool = True, right: float = 1.0, wrong: float = 0.0) -> None:
        """
        Args:
            pattern: a regular expression of Python's re, in which `.` also matches the end of a line.
            whole: whether the pattern has to match the completion from its first character to its last.
        """
        try:
            self.pattern = re.compile(pattern, re.DOTALL)
        except re.error as error:
            raise UserError(f"reward: {pattern!r} is no regular expression: {error}") from None
        self.whole, self.right, self.wrong = whole, right, wrong

    def __call__(self, prompts: Sequence[Any], completions: Sequence[str], **columns: Sequence[Any]) -> list[float]:
        looked = self.pattern.fullmatch if self.whole else self.pattern.search
        whole = whole_turns(completions, columns)
        found = [looked(turn) or looked(said) for turn, said in zip(whole, completions, strict=True)]
        return [self.right if match else self.wrong for match in found]


class TaggedFormat(Reward):
    """A reward for thoughts between one pair of tags, then the answer between another, and no more (as DeepSeek-R1).

    It reads the assistant's turn from its start, with a <think> that the prompt may have written.
    """

    def __init__(self, thought: str = "think", answer: str = "answer", right: float = 1.0, wrong: float = 0.0) -> None:
        t, a = re.escape(thought), re.escape(answer)
        inside = r"(?:(?!</?(?:" + t + "|" + a + r")>).)*"
        self.pattern = re.compile(rf"\s*<{t}>{inside}</{t}>\s*<{a}>{inside}</{a}>\s*", re.DOTALL)
        self.right, self.wrong = right, wrong

    def __call__(self, prompts: Sequence[Any], completions: Sequence[str], **columns: Sequence[Any]) -> list[float]:
        whole = whole_turns(completions, columns)
        return [self.right if self.pattern.fullmatch(turn) else self.wrong for turn in whole]


class LengthPenalty(Reward):
    """A penalty of 1 / `scale` for each token beyond `most`, and for each one missing below `least`."""

    def __init__(self, most: int, least: int = 0, scale: float = 100.0) -> None:
        self.most, self.least, self.scale = most, least, scale

    def __call__(self, prompts: Sequence[Any], completions: Sequence[str], **columns: Sequence[Any]) -> list[float]:
        lengths = [len(ids) for ids in needed(columns, "completion_ids", "LengthPenalty")]
        return [-(max(0, n - self.most) + max(0, self.least - n)) / self.scale for n in lengths]
